"""``Spread`` is a tensor that is spread over the ranks: it has the whole one's shape, and a part.

The library's code is written for one rank: it reads sizes, splits and reshapes by them.  It sees
whole sizes here, and every op that reaches the dispatcher runs on the parts that this rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .... import ops
from ...parallel import GROUP
from ...sharding import Part, ShardRule


class NotSpreadError(Exception):
    """An op cannot be computed of the parts that ranks hold.

    Attributes:
        reason: which op, and why.
        origins: names of the parameters whose split made its arguments what they are.
    """

    def __init__(self, reason: str, *spreads: Spread) -> None:
        super().__init__(reason)
        self.reason = reason
        self.origins = frozenset(name for spread in spreads for name in spread.origins)


@dataclass(frozen=True)
class Weight:
    """A tensor that is made of a parameter alone: dimension i is the parameter's ``dims[i]``."""

    name: str
    dims: tuple[int | None, ...]


class Planner(Protocol):
    """Decides how parameters are split while a model runs without data."""

    def split(
        self, weight: Spread, dim: int, kind: str, parts: Sequence[Part] | None = None
    ) -> bool:
        """Split a parameter along the dimension that is ``dim`` of ``weight``: evenly, or as
        ``parts``.  Returns whether that is possible; may raise to begin anew."""

    def once(self, weight: Spread) -> None:
        """Note a parameter that is added to a sum over ranks; may raise to begin anew."""

    def cut(self, spread: Spread, bounds: Sequence[int]) -> None:
        """Begin anew with parts that end at ``bounds`` of a dimension; returns if it cannot."""

    def repeat(self, spread: Spread, units: int) -> None:
        """Begin anew with fewer units than ranks, each held by several; returns if it cannot."""


class Spread(Tensor):
    """A tensor of which a rank holds ``local``.

    Attributes:
        rule: which part of one dimension that is; None: all ranks have all of it.
        partial: the ranks' tensors are summands of it.
        world: number of ranks.
        first: of a parameter, the place of a rank's first row, [1] int32.
        origins: parameters whose split makes this one split.
        weight: see ``Weight``; None while a plan is followed.
    """

    local: Tensor
    rule: ShardRule | None
    partial: bool
    world: int
    first: Tensor | None
    origins: frozenset[str]
    weight: Weight | None
    planner: Planner | None
    _total: Tensor | None

    @staticmethod
    def __new__(
        cls, local: Tensor, shape: Sequence[Any], world: int, rule: ShardRule | None = None
    ) -> Spread:
        made = Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=False
        )
        made.local, made.world, made.rule = local, world, rule
        made.partial, made.first, made._total = False, None, None
        made.origins, made.weight, made.planner = frozenset(), None, None
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Spread({list(self.shape)}, {self.rule}, partial={self.partial})"

    @property
    def split_dim(self) -> int:
        """The dimension that is split."""
        assert self.rule is not None
        return self.rule.dim

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the dimension that is split."""
        assert self.rule is not None
        return self.rule.parts

    @property
    def total(self) -> Tensor:
        """The whole tensor of one whose summands ranks hold, or which all of them have."""
        if not self.partial:
            return self.local
        if self._total is None:
            self._total = sum_over_ranks(self.local)
        return self._total

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(func, args, kwargs or {})


def split_as(local: Tensor, dim: int, parts: Sequence[Part], *sources: Spread) -> Any:
    """The spread tensor of which a rank has ``local``; that itself, if it is the whole one."""
    if all(part.replicate and part.units == 1 for part in parts):
        return local
    dim = dim % local.dim()
    shape = list(local.shape)
    shape[dim] = sum(part.size for part in parts)
    made = Spread(local, shape, sources[0].world, ShardRule(dim, tuple(parts)))
    made.origins = frozenset(name for source in sources for name in source.origins)
    made.planner = next((s.planner for s in sources if s.planner is not None), None)
    return made


def summand(local: Tensor, world: int, planner: Planner | None = None) -> Spread:
    """The spread tensor that is the sum of the ranks' ``local``."""
    made = Spread(local, local.shape, world)
    made.partial, made.planner = True, planner
    return made


def whole(x: Any) -> Any:
    """A tensor that all ranks have, if it is one: sums over ranks are computed."""
    if isinstance(x, Spread) and x.rule is None:
        return x.total
    return x


def is_split(x: Any) -> bool:
    """Whether ranks hold parts of a tensor."""
    return isinstance(x, Spread) and x.rule is not None


def is_weight(x: Any) -> bool:
    """Whether a tensor is made of a parameter alone that is not split, or not yet."""
    return isinstance(x, Spread) and x.weight is not None and x.rule is None


def reads_across(func: Any, *spreads: Spread) -> NotSpreadError:
    """The error of an op that needs all places of a dimension that is split."""
    return NotSpreadError(f"{name_of(func)} reads across what is split", *spreads)


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum of the ranks' tensors, of rows each."""
    return ops.all_reduce(x.flatten(0, -2).contiguous(), GROUP).view(x.shape)


def gathered(logits: Tensor) -> Tensor:
    """The whole logits, [rows, vocabulary], of a batch of one whose vocabulary may be split."""
    x = whole(logits)
    if not isinstance(x, Spread):
        return x[0]  # type: ignore[no-any-return]
    if x.split_dim != x.dim() - 1 or len(x.parts) > 1 or x.parts[0].replicate:
        raise NotSpreadError("logits are split in parts that are not in order", x)
    return ops.all_gather(x.local[0], x.world, GROUP)


def local_size(part: Part, world: int) -> int:
    """Length of a rank's share of a part."""
    return ShardRule(0, (part,)).local_size(world)


def same_parts(one: Sequence[Part], other: Sequence[Part]) -> bool:
    """Whether ranks hold the same places of two dimensions."""

    def places(parts: Sequence[Part]) -> list[tuple[int, int]]:
        return [(part.size, part.units if part.replicate else 0) for part in parts]

    return places(one) == places(other)


def scaled(parts: Sequence[Part], by: Callable[[int], int]) -> tuple[Part, ...]:
    """Parts of other sizes."""
    return tuple(
        replace(p, size=by(p.size), units=p.units if p.replicate else by(p.size)) for p in parts
    )


def even(size: int, name: str = "0") -> Part:
    """A part whose every place may be the first of a rank's."""
    return Part(name, size, size)


Rule: TypeAlias = Callable[[Any, dict[str, Any]], Any]
"""Computes an op, of which it gets the arguments by their names in its schema.

Raises ``NotSpreadError``."""
RULES: dict[Any, Rule] = {}
POINTWISE: list[Rule] = []
"""The rule of all ops that compute each element of the same element of each argument."""


def rule(*funcs: Any) -> Callable[[Rule], Rule]:
    """Say that a function computes some ops."""

    def known(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(funcs, function))
        return function

    return known


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute an op some of whose arguments are spread.

    Raises:
        NotSpreadError: it is not known how.
    """
    found = RULES.get(func)
    if found is None and torch.Tag.pointwise in func.tags:
        (found,) = POINTWISE
    if found is None and (made := func.decompose(*args, **kwargs)) is not NotImplemented:
        return made
    spreads = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Spread)]
    if found is None and any(x.rule is not None for x in spreads):
        raise NotSpreadError(f"{name_of(func)} is not known to keep what is split", *spreads)
    if found is None:
        args, kwargs = tree_map(whole, (args, kwargs))
        return func(*args, **kwargs)
    given = {
        argument.name: args[place]
        if place < len(args)
        else kwargs.get(argument.name, argument.default_value)
        for place, argument in enumerate(func._schema.arguments)
    }
    return found(func, given)


def name_of(func: Any) -> str:
    """The name of an op without its overload."""
    return str(func._schema.name.rpartition("::")[2])
