"""Attention of a rank: its heads of queries, and the KV heads that these read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...sharding import Part
from .spread import NotSpreadError, Spread, is_split, same_parts, split_as, whole

_HEADS = 1


@dataclass(frozen=True)
class HeadsOfRank:
    """How heads are spread: as those of ``query``; None if every rank has all."""

    query: Spread | None = None

    @property
    def ranks(self) -> int:
        """Ranks over which the heads are spread."""
        return 1 if self.query is None else self.query.world

    def spread(self, out: Tensor) -> Tensor:
        """The result of attention, [1, tokens, heads, width], of which a rank has its heads."""
        return out if self.query is None else split_as(out, 2, self.query.parts, self.query)


def heads_of_rank(
    query: Any, key: Any, value: Any, sinks: Any
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor | None], HeadsOfRank]:
    """The heads that this rank holds of queries, keys and values, [1, heads, tokens, width], and of
    sinks, [heads].

    Raises:
        NotSpreadError: queries and keys are not split alike.
    """
    query, key, value = whole(query), whole(key), whole(value)
    split = [x for x in (query, key, value) if is_split(x)]
    if not split:
        return (query, key, value, whole(sinks)), HeadsOfRank()
    for x in split:
        if x.split_dim != _HEADS or len(x.parts) > 1:
            raise NotSpreadError("attention reads heads that are split themselves", *split)
    if not is_split(query) or query.parts[0].replicate:
        raise NotSpreadError("the queries of attention are not split by heads", *split)
    for x in (key, value):
        if not is_split(x) and x.shape[_HEADS] > 1:
            raise NotSpreadError("keys or values of attention are not split by heads", *split)
    if is_split(key) and is_split(value) and not same_parts(key.parts, value.parts):
        raise NotSpreadError("keys and values of attention are split differently", *split)
    local = [x.local if is_split(x) else x for x in (query, key, value)]
    return (*local, _of_heads(sinks, query.parts)), HeadsOfRank(query)


def _of_heads(sinks: Any, parts: tuple[Part, ...]) -> Any:
    if not isinstance(sinks, Spread):
        return sinks
    if sinks.rule is None and sinks.planner is not None and sinks.weight is not None:
        sinks.planner.split(sinks, 0, "like", parts)
    if not is_split(sinks) or not same_parts(sinks.parts, parts):
        raise NotSpreadError("the sinks of attention are not split by heads", sinks)
    return sinks.local
