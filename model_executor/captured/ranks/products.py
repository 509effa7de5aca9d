"""Matrix products over ranks: by a weight whose outputs are split, or whose inputs are.

The first kind gives a split result.  The second kind gives summands of the whole one, which are
summed over the ranks where it is read next.
"""

from __future__ import annotations

from typing import Any

import torch

from .... import ops
from .spread import (
    NotSpreadError,
    Spread,
    is_split,
    is_weight,
    reads_across,
    rule,
    same_parts,
    split_as,
    summand,
    whole,
)

_ATEN, _FW = torch.ops.aten, torch.ops.fw


def _product(x: Any, weight: Any, bias: Any, outputs: int, multiply: Any) -> Any:
    """A matrix product of x and a weight, of which ``outputs`` is the dimension of the outputs.

    The bias belongs to each output: of a sum over ranks, one rank alone adds it.
    """
    inputs = outputs - 1 if outputs % weight.dim() == weight.dim() - 1 else outputs + 1
    x = whole(x)
    if is_weight(weight) and weight.planner is not None:
        if is_split(x) and x.split_dim == x.dim() - 1:
            weight.planner.split(weight, inputs, "row", x.parts)
        elif not is_split(x):
            weight.planner.split(weight, outputs, "column")
    if not is_split(weight):
        if is_split(x):
            raise NotSpreadError("a linear layer that is not split reads it", x)
        return multiply(x, whole(weight), whole(bias))
    if weight.split_dim == outputs % weight.dim():
        if is_split(x):
            raise NotSpreadError("a linear layer whose outputs are split reads it", x)
        if is_weight(bias):
            bias.planner.split(bias, bias.dim() - 1, "like", weight.parts)
        made = multiply(x, weight.local, _local(bias))
        return split_as(made, -1, weight.parts, weight)
    last = is_split(x) and x.split_dim == x.dim() - 1
    if not last or not same_parts(x.parts, weight.parts):
        raise NotSpreadError(
            "a linear layer reads what is split in another way", *_spreads(x), weight
        )
    if any(part.replicate for part in x.parts):
        raise NotSpreadError("a sum over ranks would have what several of them hold twice", x)
    if is_weight(bias):
        bias.planner.once(bias)
    made = multiply(x.local, weight.local, _local(bias))
    return summand(made, weight.world, weight.planner)


def _local(x: Any) -> Any:
    return x.local if isinstance(x, Spread) else x


def _spreads(*values: Any) -> list[Spread]:
    return [x for x in values if isinstance(x, Spread)]


@rule(_ATEN.linear.default)
def _linear(func: Any, given: dict[str, Any]) -> Any:
    return _product(given["input"], given["weight"], given["bias"], -2, func)


def _with_others(func: Any, given: dict[str, Any]) -> Any:
    """A layer of ours.  What a stored weight has beside it, a rank holds for its own part."""

    def multiply(x: Any, weight: Any, bias: Any) -> Any:
        return func(**{**given, "x": x, "weight": weight, "bias": bias})

    return _product(given["x"], given["weight"], given["bias"], -2, multiply)


@rule(_FW.linear.default)
def _our_linear(func: Any, given: dict[str, Any]) -> Any:
    return _with_others(func, given)


@rule(_ATEN.mm.default)
def _mm(func: Any, given: dict[str, Any]) -> Any:
    return _product(given["self"], given["mat2"], None, -1, lambda x, w, b: func(x, w))


@rule(_ATEN.addmm.default)
def _addmm(func: Any, given: dict[str, Any]) -> Any:
    if given["alpha"] != 1 or given["beta"] != 1:
        raise NotSpreadError("addmm with factors", *_spreads(*given.values()))
    return _product(given["mat1"], given["mat2"], given["self"], -1, lambda x, w, b: func(b, x, w))


@rule(_FW.expert_linear.default)
def _expert_linear(func: Any, given: dict[str, Any]) -> Any:
    return _with_others(func, given)


@rule(_FW.combine_experts.default)
def _combine(func: Any, given: dict[str, Any]) -> Any:
    rows, *others = given.values()
    if not isinstance(rows, Spread) or not rows.partial:
        if is_split(rows):
            raise reads_across(func, rows)
        return func(*map(whole, given.values()))
    made = func(rows.local, *map(whole, others))
    return summand(made, rows.world, rows.planner)


@rule(_ATEN.embedding.default)
def _embedding(func: Any, given: dict[str, Any]) -> Any:
    weight, ids = given["weight"], given["indices"]
    if is_weight(weight) and weight.planner is not None:
        weight.planner.split(weight, 0, "vocabulary")
    if not is_split(weight):
        return func(whole(weight), ids)
    if weight.split_dim or weight.first is None:
        raise NotSpreadError("the embedding's width is split", weight)
    rows = ops.embedding(ids.flatten(), weight.local, weight.first)
    return summand(rows.unflatten(0, ids.shape), weight.world, weight.planner)
