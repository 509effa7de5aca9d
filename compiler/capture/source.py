"""Defines what a build starts from: a module, and the inputs that it is traced with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, fx, nn

from ...config.expert_tables import Experts

WEIGHTS = "weights/"
"""Begins the name of every parameter and buffer among a program's inputs."""

OutsideCalls: TypeAlias = Callable[[int, int], Iterable[tuple[str, tuple[Any, ...]]]]
"""(num_tokens, num_seqs) -> ops called outside of the program, with arguments on the meta
device."""


@dataclass(frozen=True)
class Repeat:
    """Says how a traced model stands for a deeper one.

    Attributes:
        module: name of the traced model's list of layers.
        layers: for each layer of the deeper model, the traced layer that it is a copy of.
        inputs: names of graph inputs that belong to one layer, as patterns of its number:
            ``weights/layers.{}.`` for all that starts so, ``kv_cache/{}`` for one.
        carried: name of the graph input that the first layer reads as others read what the layer
            before makes, where the model has nothing ahead of its layers.
        shared: for each layer of the deeper model, names of the graph inputs that it shares with
            the layers of its cache group.  A copy reads its own where the traced layer, which is
            the first of its kind, reads those of another group.
    """

    module: str
    layers: tuple[int, ...]
    inputs: tuple[str, ...]
    carried: str = ""
    shared: tuple[tuple[str, ...], ...] = ()

    def traced_layer(self, node: fx.Node) -> int | None:
        """The traced layer that a node was captured in, None outside of the list."""
        # Only now: a start that finds its artifact imports no pass.
        from ...passes.module_paths import STACK

        for path, *_ in (node.meta.get(STACK) or {}).values():
            if match := re.search(rf"\b{self.module}\W+(\d+)\b", path):
                return int(match[1])
        return None

    def layer_of(self, module: str) -> tuple[int | None, str]:
        """Split a module's path into (layer, path in it); the layer is None outside of layers."""
        match = re.fullmatch(rf"(?:.*\b)?{self.module}\.(\d+)(?:\.(.*))?", module)
        return (int(match[1]), match[2] or "") if match else (None, module)

    def owner(self, name: str) -> int | None:
        """The layer that an input belongs to; None if it belongs to none."""
        for pattern in self.inputs:
            own = re.escape(pattern).replace(r"\{\}", r"(\d+)")
            if match := re.match(own if pattern.endswith(".") else f"{own}$", name):
                return int(match[1])
        return None

    def relocate(self, node: fx.Node, layer: int) -> None:
        """Let ``node``, a copy of one of a traced layer, say that it belongs to ``layer``."""
        from ...passes.module_paths import STACK

        if stack := node.meta.get(STACK):
            number = rf"(\b{self.module}\W+)\d+\b"
            node.meta[STACK] = {
                key: (re.sub(number, rf"\g<1>{layer}", path, count=1), *rest)
                for key, (path, *rest) in stack.items()
            }

    def other_group(self, layer: int) -> dict[str, str]:
        """For each input of its cache group that the traced layer reads, the one that ``layer``, a
        copy of it, reads instead; none if both are of one group."""
        if not self.shared:
            return {}
        first = self.layers.index(self.layers[layer])
        pairs = zip(self.shared[first], self.shared[layer], strict=True)
        return {name: own for name, own in pairs if name != own}

    def rename(self, name: str, traced: int, layer: int) -> str:
        """The name, in ``layer``, of an input that belongs to ``traced``."""
        own = next(p for p in self.inputs if name.startswith(p.format(traced)))
        return own.format(layer) + name.removeprefix(own.format(traced))


@dataclass(frozen=True)
class Example:
    args: tuple[Any, ...]
    named: Mapping[str, Tensor]
    dynamic: Mapping[str, Mapping[int, str]]


@dataclass(frozen=True)
class Source:
    """Everything that a build starts from.

    Attributes:
        model: the module; its weights become inputs.  May hold fake tensors.
        example: arguments to trace with; may be fake tensors.
        repeat: how the traced layers stand for all, if they do.
        outside: the ops that the caller runs beside the program.
        whole: why all layers are traced where that is captured by running it; "" if they are not.
        shown: how the layers of such a model are named, for reports.
        experts: those whose tiles can be measured, if the model has some.
        why: of a model that is captured by running it, an error of its code in one line; None for
            one that Dynamo captures.
        prove: compares the model with its unmodified implementation before anything is built; what
            it returns is a part of the artifact's report.
        describe: makes files of the artifact that describe the model to other starts.
        while_traced: a context in which the model is captured by running it.
    """

    model: nn.Module
    example: Example
    repeat: Repeat | None = None
    outside: OutsideCalls = lambda num_tokens, num_seqs: ()
    whole: str = ""
    shown: Repeat | None = None
    experts: Experts | None = None
    why: Callable[[BaseException], str] | None = None
    prove: Callable[[], Mapping[str, Any]] | None = None
    describe: Callable[[], Mapping[str, bytes]] = dict
    while_traced: Callable[[], AbstractContextManager[None]] = nullcontext
