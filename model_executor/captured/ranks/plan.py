"""Decides which parameters of a captured model are split over ranks, by running it without data.

Every linear layer is first taken to have its outputs split.  What reads them goes on with parts, as
``rules`` says, up to a layer whose inputs they are, of which the sum over ranks is whole again.
Where an op needs more than parts, the layers that they come from stay whole, with the reason, and
the run begins anew: so only layers are split whose parts are all that anybody reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ....config import UserError
from ...sharding import Part, ShardRule
from ..facts import AttentionFacts, CapturedFacts, Shard
from ..interfaces import AttentionCall
from ..library import build
from ..model import run
from .spread import NotSpreadError, Spread, Weight, even, local_size

_Key: TypeAlias = tuple[str, tuple[int, ...]]
"""Parameters of equal names but for numbers, and equal shapes."""
_NUM_TOKENS = 37
_MOST_RUNS = 200


class _AnewError(Exception):
    """The run knows more now than it did when it began."""


@dataclass
class _Planner:
    """Holds what earlier runs found out, and the parameters of the present one."""

    world: int
    vocabulary: str
    ahead: dict[_Key, tuple[int, str, tuple[Part, ...], bool]]
    summands: set[_Key]
    cuts: dict[_Key, tuple[int, ...]]
    units: dict[tuple[_Key, str], int]
    whole: dict[_Key, str]
    weights: dict[str, Spread]
    shards: dict[str, Shard]
    roots: dict[str, int]

    def key(self, name: str) -> _Key:
        return re.sub(r"\b\d+\b", "*", name), tuple(self.weights[name].shape)

    def begin(self, tensors: dict[str, Tensor]) -> None:
        self.weights, self.shards, self.roots = {}, {}, {}
        for name, tensor in tensors.items():
            weight = self.weights[name] = Spread(tensor, tensor.shape, self.world)
            weight.weight, weight.planner = Weight(name, tuple(range(tensor.dim()))), self
            key = self.key(name)
            if key in self.ahead:
                self._split(weight, *self.ahead[key])
            elif key in self.summands:
                self._add_once(weight)

    def split(
        self, weight: Spread, dim: int, kind: str, parts: Sequence[Part] | None = None
    ) -> bool:
        assert weight.weight is not None
        name, at = weight.weight.name, weight.weight.dims[dim]
        if at is None or (key := self.key(name)) in self.whole:
            return False
        if kind == "vocabulary" and name != self.vocabulary:
            return False
        if name == self.vocabulary:
            kind = "vocabulary"
        is_root = parts is None
        if parts is None and (parts := self._parts(key, at)) is None:
            return False
        if weight is not self.weights[name]:
            self.ahead[key] = at, kind, tuple(parts), is_root
            raise _AnewError
        self._split(weight, at, kind, tuple(parts), is_root)
        return True

    def _parts(self, key: _Key, dim: int) -> tuple[Part, ...] | None:
        bounds = (0, *self.cuts.get(key, ()), key[1][dim])
        parts = []
        for number, (start, end) in enumerate(pairwise(bounds)):
            units = self.units.get((key, str(number)))
            part = even(end - start, str(number))
            if units is not None:
                part = replace(part, units=units, replicate=True)
            elif part.size % self.world:
                self.whole[key] = f"{part.size} features do not spread over {self.world} ranks"
                return None
            parts.append(part)
        return tuple(parts)

    def _split(
        self, weight: Spread, dim: int, kind: str, parts: tuple[Part, ...], is_root: bool
    ) -> None:
        assert weight.weight is not None
        if is_root:
            self.roots[weight.weight.name] = dim
            weight.origins = frozenset({weight.weight.name})
        sizes = list(weight.shape)
        sizes[dim] = sum(local_size(part, self.world) for part in parts)
        weight.local = weight.local.new_empty(sizes)
        weight.rule = ShardRule(dim, parts)
        weight.first = weight.local.new_empty([1], dtype=torch.int32)
        self.shards[weight.weight.name] = Shard(weight.weight.name, kind, weight.rule)

    def once(self, weight: Spread) -> None:
        assert weight.weight is not None
        name = weight.weight.name
        if weight is not self.weights[name]:
            self.summands.add(self.key(name))
            raise _AnewError
        self._add_once(weight)

    def _add_once(self, weight: Spread) -> None:
        assert weight.weight is not None
        weight.partial, name = True, weight.weight.name
        rule = ShardRule(0, (even(weight.shape[0]),), split=False, once=True)
        self.shards[name] = Shard(name, "summand", rule)

    def cut(self, spread: Spread, bounds: Sequence[int]) -> None:
        size = spread.shape[spread.split_dim]
        known = True
        for name in sorted(spread.origins):
            key, dim = self.key(name), self.roots[name]
            if key[1][dim] != size:
                return
            known &= self.cuts.get(key) == tuple(bounds[1:-1])
            self.cuts[key] = tuple(bounds[1:-1])
        if not known:
            raise _AnewError

    def repeat(self, spread: Spread, units: int) -> None:
        (part,) = spread.parts
        asked = {(self.key(name), part.name): units for name in sorted(spread.origins)}
        if asked and not self.units.keys() & asked.keys():
            self.units |= asked
            raise _AnewError

    def refuse(self, error: NotSpreadError) -> None:
        """Leave the layers whole whose parts are not enough."""
        if not error.origins:
            raise error
        for name in sorted(error.origins):  # a set's order is that of its process
            self.whole[self.key(name)] = error.reason
        self.ahead, self.summands = {}, set()


def planned_facts(facts: CapturedFacts, dtype: torch.dtype, world: int, what: str) -> CapturedFacts:
    """The facts of a model that ``world`` ranks hold together.

    Raises:
        UserError: nothing of it can be split, or its own plan says otherwise.
    """
    model = build(facts, dtype)
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    planner = _Planner(world, names[id(embedding)], {}, set(), {}, {}, {}, {}, {}, {})
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        tensors = {
            name: torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            for name, parameter in model.named_parameters()
        }
        _fake_buffers(model)
        calls = _plan(model, planner, tensors, names, what)
    shards = tuple(planner.shards.values())
    reasons = tuple((name, reason) for (name, _), reason in planner.whole.items())
    if not any(shard.rule.split for shard in shards):
        said = (
            "; ".join(f"{name}: {reason}" for name, reason in reasons) or "it has no linear layers"
        )
        raise UserError(f"tensor_parallel_size={world}: nothing of {what} can be split ({said})")
    _check_own_plan(model, shards, what)
    return replace(facts, attention=calls, shards=shards, unsplit=reasons, ranks=world)


def _plan(
    model: nn.Module,
    planner: _Planner,
    tensors: dict[str, Tensor],
    names: dict[int, str],
    what: str,
) -> tuple[AttentionFacts, ...]:
    ids = torch.zeros(_NUM_TOKENS, dtype=torch.int32)
    positions = torch.arange(_NUM_TOKENS, dtype=torch.int32)
    for _ in range(_MOST_RUNS):
        planner.begin(tensors)
        calls: list[AttentionFacts] = []

        def attend(call: AttentionCall, calls: list[AttentionFacts] = calls) -> Tensor:
            calls.append(call.facts)
            return torch.empty_like(call.q)

        try:
            with in_place_of(model, {i: planner.weights[name] for i, name in names.items()}):
                run(model, ids, positions, attend)
            return tuple(calls)
        except _AnewError:
            continue
        except NotSpreadError as error:
            planner.refuse(error)
    raise UserError(f"{what}: no plan for {planner.world} ranks was found in {_MOST_RUNS} runs")


@contextmanager
def in_place_of(model: nn.Module, tensors: dict[int, Spread]) -> Iterator[None]:
    """Let a model have other tensors in the place of parameters, which are known by their ids."""
    held = [
        (module, kind, parameter)
        for module in model.modules()
        for kind, parameter in module._parameters.items()
        if parameter is not None and id(parameter) in tensors
    ]
    try:
        for module, kind, parameter in held:
            module._parameters[kind] = tensors[id(parameter)]  # type: ignore[assignment]
        yield
    finally:
        for module, kind, parameter in held:
            module._parameters[kind] = parameter


def _fake_buffers(model: nn.Module) -> None:
    for module in model.modules():
        for kind, buffer in module._buffers.items():
            if buffer is not None:
                fake = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
                module._buffers[kind] = fake


def _check_own_plan(model: Any, shards: Sequence[Shard], what: str) -> None:
    """Refuse a plan that the model's own contradicts: it has the styles of its modules by patterns
    of their names, of which those with "colwise" split outputs, those with "rowwise" inputs."""
    own: dict[str, str] = getattr(model, "tp_plan", None) or {}
    against = {"column": "rowwise", "row": "colwise"}
    for shard in shards:
        names = (shard.name, shard.name.rpartition(".")[0])
        patterns = {re.sub(r"\b\d+\b", "*", name) for name in names}
        for pattern in patterns & own.keys():
            style = own[pattern]
            if shard.kind in against and against[shard.kind] in style:
                raise UserError(
                    f"{what}: {shard.name} would be split by {shard.kind}s, but the model's own "
                    f"tp_plan says {style!r}; use one rank and report it"
                )
