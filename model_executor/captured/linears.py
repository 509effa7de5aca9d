"""Puts our linear layers in the place of a library's: they know formats, and siblings are one.

Siblings are layers that read the same tensor one after the other, such as q, k and v, whenever
they run.  They become parts of one layer, whose weight is loaded where its parts lie: nothing is
copied to merge them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..experts import ExpertLinear
from ..layers import Linear
from ..quant.scheme import QuantKind
from ..sharding import Part, ShardRule
from .facts import Shard
from .quantized.formats import (
    OF_EXPERTS,
    is_experts,
    is_linear as is_linear,
    is_transposed_linear,
    mergeable,
)


class Siblings:
    """Notices which linear layers of a model are siblings, while the model runs once.

    Attributes:
        calls: how often attention was called; layers on both sides of a call are not siblings,
            since a compiled piece ends there.
    """

    def __init__(self, model: nn.Module) -> None:
        self.calls = 0
        self._seen: list[tuple[str, Tensor, int]] = []
        head = model.get_output_embeddings()  # type: ignore[operator]
        self._hooks = [
            module.register_forward_pre_hook(self._hook(name))
            for name, module in model.named_modules()
            if is_linear(module) and module is not head
        ]
        self._modules = dict(model.named_modules())

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._seen.append((name, args[0], self.calls))

        return hook

    def found(self) -> tuple[tuple[str, ...], ...]:
        """Names of the siblings of each group, in the order of their calls; ends the watch."""
        for hook in self._hooks:
            hook.remove()
        runs: dict[Any, list[str]] = {}
        names_of: dict[int, set[str]] = {}
        for name, x, calls in self._seen:
            linear: Any = self._modules[name]
            names_of.setdefault(id(linear.weight), set()).add(name)
            runs.setdefault((id(x), calls, linear.bias is None), []).append(name)
        groups = dict.fromkeys(group for names in runs.values() for group in _by_module(names))
        often = Counter(name for names in groups for name in names)
        alone = [name for name, count in often.items() if count > 1]
        alone += [name for names in names_of.values() if len(names) > 1 for name in names]
        return tuple(names for names in groups if len(names) > 1 and not {*names} & {*alone})


def _by_module(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Layers that read one tensor, those of one module apart: gate and up stay two halves where
    another layer reads what they read.  Each layer that is alone in its module is of the rest."""
    parents = Counter(name.rpartition(".")[0] for name in names)
    groups: dict[str, list[str]] = {}
    for name in names:
        parent = name.rpartition(".")[0]
        groups.setdefault(parent if parents[parent] > 1 else "", []).append(name)
    return [tuple(group) for group in groups.values()]


class _Shared:
    """Calls the layer of some siblings for the first of them, and hands out the parts."""

    def __init__(self, linear: Linear, sizes: Sequence[int], rows: Sequence[int]) -> None:
        """``sizes`` are what the layers make in all, ``rows`` what a rank has of each."""
        self.linear, self.sizes, self.rows = linear, list(sizes), list(rows)
        self.x: Tensor | None = None
        self.parts: dict[int, Tensor] = {}

    def part(self, place: int, x: Tensor) -> Tensor:
        if self.x is not x or place not in self.parts:
            made = self.linear(x).split(self.sizes, dim=-1)
            self.x, self.parts = x, dict(enumerate(made))
        part = self.parts.pop(place)
        if not self.parts:
            self.x = None  # keeps no memory of a step
        return part


class Sibling(nn.Module):
    """Stands where the library has a linear layer that is a part of another one."""

    def __init__(self, shared: _Shared, place: int) -> None:
        super().__init__()
        self.shared, self.place = shared, place
        self.in_features, self.out_features = shared.linear.in_features, shared.sizes[place]

    @property
    def rows(self) -> tuple[int, int]:
        """The first row of the part in the shared layer, and how many there are."""
        return sum(self.shared.rows[: self.place]), self.shared.rows[self.place]

    def tensor(self, kind: str) -> Tensor | None:
        """The part of the weight or the bias."""
        whole = getattr(self.shared.linear, kind)
        return None if whole is None else whole.detach().narrow(0, *self.rows)

    @property
    def weight(self) -> Tensor | None:
        return self.tensor("weight")

    @property
    def bias(self) -> Tensor | None:
        return self.tensor("bias")

    def forward(self, x: Tensor) -> Tensor:
        return self.shared.part(self.place, x)


def replace_linears(
    model: nn.Module,
    siblings: Sequence[Sequence[str]],
    formats: Mapping[str, QuantKind] = MappingProxyType({}),
    shards: Mapping[str, Shard] = MappingProxyType({}),
    world: int = 1,
) -> None:
    """Put our layers in the place of the library's linear layers, but for the head, which may share
    its weight with the embedding; those of a group of ``siblings`` become parts of one where their
    formats allow it.  Experts are replaced where they are quantized.

    Args:
        formats: how layers are quantized, see ``formats_of``.
        shards: by the names of parameters; of these the layers have what one of ``world`` ranks
            holds.
    """
    spread = {name: shard.rule for name, shard in shards.items()}
    head = model.get_output_embeddings()  # type: ignore[operator]
    for names in [part for group in siblings for part in mergeable(model, group, formats)]:
        linears = [model.get_submodule(name) for name in names]
        rules = [spread.get(f"{name}.weight") for name in names]
        parent = model.get_submodule(names[0].rpartition(".")[0])
        sizes = [int(one.out_features) for one in linears]  # type: ignore[arg-type]
        rows = [
            size if rule is None or rule.dim else rule.local_size(world)
            for size, rule in zip(sizes, rules, strict=True)
        ]
        kind = formats.get(names[0])
        shared = _Shared(_like(linears, kind, rules, world), sizes, rows)
        parent.add_module("+".join(name.rpartition(".")[2] for name in names), shared.linear)
        for place, name in enumerate(names):
            _set(model, name, Sibling(shared, place))
    for name, module in list(model.named_modules()):
        if is_linear(module) and module is not head:
            _set(
                model,
                name,
                _like([module], formats.get(name), [spread.get(f"{name}.weight")], world),
            )
        elif is_experts(module):
            for kind in OF_EXPERTS:
                if f"{name}.{kind}" in formats:
                    rule = spread.get(f"{name}.{kind}")
                    _replace_experts(module, kind, formats[f"{name}.{kind}"], rule, world)
                elif module.is_transposed and kind in module._parameters:
                    _lay_rows(module, kind)
        elif is_transposed_linear(module):
            _lay_rows(module, "weight")


def _lay_rows(module: nn.Module, kind: str) -> None:
    """Let a weight that is stored by input lie in memory by output, as kernels read it."""
    weight: Any = module._parameters[kind]
    weight.data = rows_in_memory(weight.data)


def rows_in_memory(weight: Tensor) -> Tensor:
    """A tensor without data like a weight [..., in_features, out_features], whose transpose is
    contiguous."""
    *experts, columns, rows = weight.shape
    return weight.new_empty((*experts, rows, columns)).transpose(-1, -2)


def _replace_experts(
    module: Any, name: str, kind: QuantKind, shard: ShardRule | None, world: int
) -> None:
    """``shard`` is the rule of the library's parameter, of which the experts are dimension 0."""
    count, rows, columns = getattr(module, name).shape
    if module.is_transposed:
        rows, columns = columns, rows
    rule = ShardRule(0, (Part("", rows, 1),), split=False)
    if shard is not None:
        rule = replace(shard, dim=2 - shard.dim if module.is_transposed else shard.dim - 1)
    delattr(module, name)
    one = Linear(columns, rows, rule, False, kind, world=world)
    setattr(module, name, ExpertLinear(count, one))


def _set(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def _like(
    linears: Sequence[Any], quant: QuantKind | None, rules: Sequence[ShardRule | None], world: int
) -> Linear:
    first, rows = linears[0], sum(one.out_features for one in linears)
    rule = _joined([one.out_features for one in linears], rules)
    made = Linear(first.in_features, rows, rule, first.bias is not None, quant, world=world)
    for kind in ("bias",) if quant else ("weight", "bias"):
        if (tensor := getattr(made, kind)) is not None:
            tensor.data = torch.empty_like(tensor, dtype=getattr(first, kind).dtype)
    made.in_features, made.out_features = first.in_features, rows
    return made


def _joined(sizes: Sequence[int], rules: Sequence[ShardRule | None]) -> ShardRule:
    """The rule of a weight that is several ones, of which some may be whole on every rank."""
    split = [rule for rule in rules if rule is not None]
    if not split:
        return ShardRule(0, (Part("", sum(sizes), 1),), split=False)
    if split[0].dim == 1:  # they read the same, so that all are split there
        return split[0]
    parts = []
    for number, (size, rule) in enumerate(zip(sizes, rules, strict=True)):
        own = rule.parts if rule else (Part("", size, 1, replicate=True),)
        parts += [replace(part, name=f"{number}.{part.name}") for part in own]
    return ShardRule(0, tuple(parts))


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """A library's model's parameters and buffers under the library's names; those of siblings are
    parts of the tensors that they share."""
    return dict(_tensors(model))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for tensors in (model.named_parameters(), model.named_buffers()):
        yield from ((name, tensor) for name, tensor in tensors if "+" not in name)
    for name, module in model.named_modules():
        if isinstance(module, Sibling):
            for kind in ("weight", "bias"):
                if (tensor := module.tensor(kind)) is not None:
                    yield f"{name}.{kind}", tensor
