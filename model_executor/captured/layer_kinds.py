"""Which layers of a model are alike, and which few of them a twin keeps.

Two layers are of one kind if their modules have the same classes, shapes and plain attributes, and
if every list of the configuration with an entry a layer says the same of both.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from .library import unmodified

LEAST, FEW, MOST = 2, 3, 8
"""Layers of a twin: so few are all kept; two show a mistake in what goes from layer to layer; a
prefix that has every kind and is longer than the most gives way to one layer of each kind."""

_COUNTS = re.compile(r"^(num_)?((hidden|encoder|decoder)_)?layers$|^n_layers?$|num_blocks$")
_COUNTS_TOO = re.compile(r"layers_per_stack$|^depth$|_num_hidden_layers$")
_INDICES = re.compile(r"layer|idx|ind(ex|ices)")

Chosen = Mapping[int, Sequence[int]]
"""Depth of a stack of layers -> the layers of it that a twin keeps, in ascending order."""


_ABSENT = "absent"


def counts_layers(name: str) -> bool:
    """Whether a field of that name is the number of layers of a stack."""
    return bool(_COUNTS.search(name) or _COUNTS_TOO.search(name))


def lists_layers(name: str, value: Any, depth: int) -> bool:
    """Whether a field lists some layers of a stack by their numbers."""
    ints = isinstance(value, (list, tuple)) and all(type(item) is int for item in value)
    ascending = ints and all(a < b for a, b in pairwise(value))
    return ascending and bool(_INDICES.search(name)) and all(0 <= item < depth for item in value)


def kinds_of_layers(
    model: nn.Module, per_layer: Mapping[int, Iterable[Sequence[Any]]]
) -> dict[int, list[str]]:
    """Depth of a stack -> the kind of each of its layers.

    ``per_layer``: depth -> the lists of the configuration with an entry for each of its layers.
    """
    kinds = {}
    for depth, lists in per_layer.items():
        if facts := [*_structures(model, depth), *lists]:
            kinds[depth] = [repr(kind) for kind in zip(*facts, strict=True)]
    return kinds


def few_layers(kinds: Mapping[int, Sequence[str]]) -> Iterator[Chosen]:
    """Choices of layers to keep of each stack, the fewest first.

    The first has each kind.  The next has each twice, for weights that layers share.  The last is a
    prefix, however long, for configurations that give a layer its kind by its number.
    """
    yield {depth: _choose(of_layers, 1, MOST) for depth, of_layers in kinds.items()}
    yield {depth: _choose(of_layers, 2, 2 * MOST) for depth, of_layers in kinds.items()}
    yield {depth: _choose(of_layers, 1, depth) for depth, of_layers in kinds.items()}


def _choose(kinds: Sequence[str], times: int, longest_prefix: int) -> Sequence[int]:
    if len(kinds) <= FEW:
        return range(len(kinds))
    needed = [index for index, kind in enumerate(kinds) if kinds[:index].count(kind) < times]
    prefix = max(LEAST, max(needed) + 1)
    return range(prefix) if prefix <= longest_prefix else sorted({*range(LEAST), *needed})


def _structures(model: nn.Module, depth: int) -> list[list[Hashable]]:
    """For every list of modules of that length, what each layer in it is."""
    return [
        _structure(stack)
        for stack in model.modules()
        if isinstance(stack, nn.ModuleList) and len(stack) == depth
    ]


def _structure(stack: nn.ModuleList) -> list[Hashable]:
    facts = [dict(_facts(layer)) for layer in stack]
    names = sorted({name for layer in facts for name in layer})
    columns = [_kinds_of([layer.get(name, _ABSENT) for layer in facts]) for name in names]
    return [*zip(*columns, strict=True)] if columns else [()] * len(stack)


def _kinds_of(column: list[Hashable]) -> list[Hashable]:
    """A fact of every layer. A number that differs wherever it is present is that of the layer, or
    follows from it: that makes no kind."""
    numbers = {index: v for index, v in enumerate(column) if type(v) in (int, float)}
    differ = len(numbers) > 2 and len({*numbers.values()}) == len(numbers)
    if differ or (len(numbers) > 1 and all(index == v for index, v in numbers.items())):
        return ["numbered" if index in numbers else v for index, v in enumerate(column)]
    return column


def _facts(layer: nn.Module) -> Iterable[tuple[str, Hashable]]:
    for name, module in layer.named_modules():
        yield name, type(module).__qualname__
        for key, value in vars(module).items():
            if not key.startswith("_") and isinstance(value, (int, float, str, bool, type(None))):
                yield f"{name}.{key}", value
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            shape = None if tensor is None else (*tensor.shape,)
            yield f"{name}.{key}", shape


def on_meta(config: Any) -> nn.Module:
    """The causal language model of a configuration, without memory for its weights."""
    # A copy: models may write into their configuration.
    return unmodified(deepcopy(config), torch.float32, "meta")
