"""A rank holds parts of a captured model's parameters; here are they and what fills them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...experts import ExpertLinear
from ...layers import Linear
from ...sharding import ShardRule
from ...spec import ModelSpec
from ..facts import CapturedFacts, Shard
from ..linears import rows_in_memory
from ..moves import Move, in_file_order, narrowed, shifted
from . import products as products, rules as rules
from .spread import Spread


class SpreadParameters:
    """The parameters of a model's modules that are spread: each becomes a part, without memory."""

    def __init__(self, model: nn.Module, shards: Mapping[str, Shard], world: int) -> None:
        """``model`` has our linear layers, which have parts."""
        self._world = world
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._held: list[tuple[nn.Module, str, ShardRule, bool]] = []
        parts: dict[str, nn.Parameter] = {}
        for module in model.modules():
            for kind, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                if isinstance(module, ExpertLinear):
                    if (rule := module.weight_rule).split:
                        of_experts = replace(rule, dim=rule.dim + 1)
                        self._held.append((module, kind, of_experts, False))
                elif isinstance(module, Linear):
                    rule = module.weight_rule if kind == "weight" else module.rules[kind]
                    if rule.split or rule.once:
                        self._held.append((module, kind, rule, rule.once))
                elif shard := shards.get(name := names[id(parameter)]):
                    if name not in parts:
                        parts[name] = _part(parameter, shard.rule, world)
                    module._parameters[kind] = parts[name]
                    self._held.append((module, kind, shard.rule, shard.rule.once))
                    if shard.kind == "vocabulary" and hasattr(module, "padding_idx"):
                        vars(module)["padding_idx"] = None  # a row of the whole weight

    @contextmanager
    def in_place(self, first: Tensor | None) -> Iterator[None]:
        """Let the modules have spread tensors in the place of their parts.

        Args:
            first: the number of the rank's first row of the vocabulary, [1] int32.
        """
        before = [module._parameters[kind] for module, kind, *_ in self._held]
        try:
            for module, kind, rule, once in self._held:
                module._parameters[kind] = self._spread(module, kind, rule, once, first)  # type: ignore[assignment]
            yield
        finally:
            for (module, kind, *_), parameter in zip(self._held, before, strict=True):
                module._parameters[kind] = parameter

    def _spread(
        self, module: nn.Module, kind: str, rule: ShardRule, once: bool, first: Tensor | None
    ) -> Spread:
        local: Any = module._parameters[kind]
        # A stored weight claims the shape of its numbers.
        stored = isinstance(module, Linear | ExpertLinear) and kind == "weight"
        whole: Any = module.shape if stored else local.shape
        shape = list(whole)
        if once:
            made = Spread(local, shape, self._world)
            made.partial = True
            return made
        shape[rule.dim] = sum(part.size for part in rule.parts)
        made = Spread(local, shape, self._world, rule)
        made.first = first
        return made


def _part(parameter: nn.Parameter, rule: ShardRule, world: int) -> nn.Parameter:
    shape = list(parameter.shape)
    if rule.split:
        shape[rule.dim] = rule.local_size(world)
    part = parameter.new_empty(shape)
    if not parameter.is_contiguous():
        part = rows_in_memory(part)
    return nn.Parameter(part, requires_grad=False)


def moves_of_rank(moves: Iterable[Move], spec: ModelSpec, rank: int) -> list[Move]:
    """The part of the copies into a whole model that fills what a rank holds."""
    facts = spec.captured
    assert facts is not None
    shards = {shard.name: shard.rule for shard in facts.shards}
    return in_file_order(
        part for move in moves for part in of_rank(move, shards.get(move.parameter), rank, facts)
    )


def of_rank(move: Move, rule: ShardRule | None, rank: int, facts: CapturedFacts) -> Iterator[Move]:
    """The parts of a copy into a parameter with a rule that fill what a rank holds of it."""
    if rule is None or (rule.once and rank == 0):
        yield move
    elif not rule.once:
        yield from _of_parts(move, rule, rank, facts.ranks)


def _of_parts(move: Move, rule: ShardRule, rank: int, world: int) -> Iterator[Move]:
    start = 0
    for part in rule.parts:
        place = rule.place(part.name, rank, world)
        for piece in narrowed(move, rule.dim, start + place.source_start, place.length):
            yield shifted(piece, rule.dim, place.dest_start)
        start += part.size


def set_captured_rank(model: Any, rank: int) -> None:
    """Fill what tells one rank from another beside slices of weights: the first id of its part of
    the vocabulary, and zeros for what rank 0 alone adds to sums over the ranks."""
    facts: CapturedFacts = model.spec.captured
    tensors: dict[str, Tensor] = model.library_tensors()
    with torch.no_grad():
        for shard in facts.shards:
            if shard.kind == "vocabulary":
                size = shard.rule.local_size(facts.ranks)
                model.first_id.fill_(rank * size)
            if shard.rule.once and rank > 0:
                tensors[shard.name].zero_()
