"""Runs one layer of each kind of a model; the others pass on what they are given."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...layers import rules_of
from ...spec import ModelSpec
from ..interfaces import PagedAttention
from ..ranks.spread import whole
from .alike import first_tensor

Mark: TypeAlias = Callable[[Tensor, int], Tensor]
"""(what is passed on, number of the layer that begins with it) -> the same; the number of layers
stands for what comes after the last."""


@dataclass(frozen=True)
class OneOfEachKind:
    """Says how a model runs.

    Attributes:
        layers: the model's layers.
        kinds: for each, the first that computes the same, which runs alone.
        mark: marks where a layer begins.
    """

    layers: Sequence[nn.Module]
    kinds: Sequence[int]
    mark: Mark

    @contextmanager
    def running(self, attend: PagedAttention) -> Iterator[None]:
        """Let the model run so; ``attend`` is what computes its attention."""
        results: dict[int, Any] = {}
        hooks: list[Any] = []
        shortened: list[nn.Module] = []

        def enter(number: int) -> Any:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
                attend.calls = number
                x = first_tensor((args, kwargs))
                assert x is not None
                return _replaced((args, kwargs), self.mark(whole(x), number))

            return hook

        def keep(number: int) -> Any:
            def hook(module: nn.Module, args: Any, out: Any) -> None:
                results[number] = out

            return hook

        def pass_on(number: int) -> Any:
            def forward(*args: Any, **kwargs: Any) -> Any:
                return _replaced(results[self.kinds[number]], first_tensor((args, kwargs)))

            return forward

        def end(module: nn.Module, args: Any, out: Any) -> Any:
            x = first_tensor(out)
            assert x is not None
            return _replaced(out, self.mark(whole(x), len(self.layers)))

        for number, layer in enumerate(self.layers):
            if self.kinds[number] == number:
                hooks.append(layer.register_forward_pre_hook(enter(number), with_kwargs=True))
                hooks.append(layer.register_forward_hook(keep(number)))
            else:
                layer.forward = pass_on(number)
                shortened.append(layer)
        hooks.append(self.layers[-1].register_forward_hook(end))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for layer in shortened:
                del layer.forward


def _replaced(values: Any, first: Any) -> Any:
    """The same with another tensor in the place of the first."""
    leaves, structure = tree_flatten(values)
    place = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    return tree_unflatten([*leaves[:place], first, *leaves[place + 1 :]], structure)


def layer_kinds(spec: ModelSpec, library: nn.Module) -> tuple[int, ...]:
    """For each layer of a captured model, the first that differs from it in the values of weights
    and in the cache group alone: it computes the same, over a cache of the same layout, and has
    weights of the same formats, of which a rank has the same parts.  A layer whose input is kept
    for a draft head is like no other.

    ``library`` is the library's model with our linear layers.
    """
    facts = spec.captured
    assert facts is not None
    own = re.compile(rf"{re.escape(facts.layers)}\.(\d+)\.(.+)")
    caches = [spec.cache_groups[spec.cache_group(n)].spec for n in range(spec.num_layers)]
    found: list[set[Any]] = [{pair} for pair in zip(facts.kinds, caches, strict=True)]
    tensors = [*library.named_parameters(), *library.named_buffers()]
    modules = library.named_modules()
    for name, *what in (
        *((name, str(module), str(rules_of(module))) for name, module in modules),
        *((name, tensor.shape, tensor.dtype) for name, tensor in tensors),
        *((shard.name, shard.kind, shard.rule) for shard in facts.shards),
    ):
        if match := own.fullmatch(name):
            found[int(match[1])].add((match[2], *what))
    for number in set(spec.kept) & set(range(spec.num_layers)):
        found[number].add(("kept", number))
    return tuple(map(found.index, found))
