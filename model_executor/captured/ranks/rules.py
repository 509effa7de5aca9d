"""Ops on tensors that are spread over ranks become local ops on the parts that a rank holds.

A dimension that is split stays so through all that computes its places apart.  Products that sum
over it are summands of the whole result, which is summed over the ranks where it is read next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ...sharding import Part
from .spread import (
    POINTWISE,
    NotSpreadError,
    Spread,
    Weight,
    is_split,
    is_weight,
    local_size,
    name_of,
    reads_across,
    rule,
    same_parts,
    scaled,
    split_as,
    sum_over_ranks,
    summand,
    whole,
)

_ATEN, _FW = torch.ops.aten, torch.ops.fw
_MAX = 2**63 - 1


def _as_weight(made: Tensor, source: Spread, dims: Sequence[int | None]) -> Tensor:
    """A tensor that is made of a parameter alone, like ``source``."""
    assert source.weight is not None
    kept = Spread(made, made.shape, source.world)
    kept.weight, kept.planner = Weight(source.weight.name, tuple(dims)), source.planner
    return kept


def _locals(values: Any) -> Any:
    return tree_map(lambda x: x.local if is_split(x) else whole(x), values)


def _call(func: Any, given: dict[str, Any]) -> Any:
    return (
        func(**_locals(given)) if func._schema.arguments[0].name != "self" else _method(func, given)
    )


def _method(func: Any, given: dict[str, Any]) -> Any:
    values = _locals(given)
    return func(values.pop("self"), **values)


def _pointwise(func: Any, given: dict[str, Any]) -> Any:
    tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
    spreads = [x for x in tensors if isinstance(x, Spread)]
    split = [x for x in spreads if x.rule is not None]
    mutates = func._schema.is_mutable
    if not split:
        return _pointwise_whole(func, given, tensors)
    first = split[0]
    dim = first.split_dim - first.dim()
    for other in split[1:]:
        if other.split_dim - other.dim() != dim or not same_parts(first.parts, other.parts):
            raise NotSpreadError(f"{name_of(func)} of tensors that are split differently", *split)

    def local(x: Any) -> Any:
        if is_split(x):
            return x.local
        return _narrow(func, x, dim, split) if isinstance(x, Tensor) else x

    values = tree_map(local, given)
    made = _call(func, values)
    if mutates:
        return tensors[0]
    return split_as(made, dim, first.parts, *split)


def _narrow(func: Any, x: Any, dim: int, split: Sequence[Spread]) -> Any:
    """The part of ``x`` that a rank needs to compute with its parts of ``split``."""
    if x.dim() < -dim or x.shape[dim] == 1:
        return whole(x)
    parts = split[0].parts
    if is_weight(x) and x.planner.split(x, x.dim() + dim, "like", parts):
        return x.local
    x = whole(x)
    if x.stride(dim) == 0:  # the same at all places
        return x.narrow(dim, 0, sum(local_size(part, split[0].world) for part in parts))
    raise NotSpreadError(f"{name_of(func)} with a tensor that is not split", *split)


def _pointwise_whole(func: Any, given: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
    if func is _ATEN.add.Tensor and given["alpha"] == 1 and len(tensors) == 2:
        one, other = tensors
        if isinstance(one, Spread) and one.partial and is_weight(other):
            other.planner.once(other)  # type: ignore[attr-defined]
        if all(isinstance(x, Spread) and x.partial for x in tensors):
            return summand(func(one.local, other.local), one.world, one.planner)  # type: ignore[attr-defined]
    made = _call(func, given)
    source = tensors[0]
    if func._schema.is_mutable:
        if any(isinstance(x, Spread) and (x.partial or x.weight) for x in tensors[:1]):
            raise NotSpreadError(f"{name_of(func)} writes to what ranks share")
        return source
    if not isinstance(source, Spread) or source.weight is None or len(tensors) > 1:
        return made
    return _as_weight(made, source, source.weight.dims) if made.shape == source.shape else made


POINTWISE.append(_pointwise)
for _func in (
    _ATEN._to_copy.default,
    _ATEN.clone.default,
    _ATEN.detach.default,
    _ATEN.alias.default,
):
    rule(_func)(_pointwise)


@rule(_ATEN.to.dtype, _ATEN.contiguous.default, _ATEN.dropout.default)
def _cast(func: Any, given: dict[str, Any]) -> Any:
    x: Any = given.get("self", given.get("input"))
    if isinstance(x, Spread) and x.partial and given.get("dtype", x.dtype) == x.dtype:
        return x
    made = _call(func, given) if "self" in given else func(*_locals([*given.values()]))
    if is_split(x):
        return split_as(made, x.split_dim, x.parts, x)
    return _as_weight(made, x, x.weight.dims) if is_weight(x) else made


def _dims(x: Tensor, dims: Any) -> list[int]:
    many = [dims] if isinstance(dims, int) else list(dims or range(x.dim()))
    return [dim % x.dim() for dim in many]


@rule(
    _ATEN.mean.dim, _ATEN.sum.dim_IntList, _ATEN.amax.default, _ATEN.amin.default,
    _ATEN.linalg_vector_norm.default, _ATEN.var.correction,
)  # fmt: skip
def _reduce(func: Any, given: dict[str, Any]) -> Any:
    x = given["self"]
    dims, made = _dims(x, given["dim"]), _call(func, given)
    if not is_split(x):
        return made
    if x.split_dim not in dims:
        before = 0 if given["keepdim"] else sum(dim < x.split_dim for dim in dims)
        return split_as(made, x.split_dim - before, x.parts, x)
    kinds = {_ATEN.mean.dim: 1 / x.world, _ATEN.sum.dim_IntList: 1}
    if func not in kinds or any(part.replicate for part in x.parts):
        raise reads_across(func, x)
    total = sum_over_ranks(made)
    return total if kinds[func] == 1 else total * kinds[func]


@rule(_ATEN.softmax.int, _ATEN._softmax.default, _ATEN.glu.default, _ATEN.cumsum.default)
def _along(func: Any, given: dict[str, Any]) -> Any:
    x, dim = given["self"], given["dim"]
    made = _call(func, given)
    if not is_split(x):
        return made
    if x.split_dim == dim % x.dim():
        raise reads_across(func, x)
    return split_as(made, x.split_dim, x.parts, x)


@rule(_ATEN.layer_norm.default, _ATEN.native_layer_norm.default)
def _layer_norm(func: Any, given: dict[str, Any]) -> Any:
    x = given["input"]
    if not is_split(x):
        return func(*_locals([*given.values()]))
    if x.split_dim >= x.dim() - len(given["normalized_shape"]):
        raise reads_across(func, x)
    made = func(*_locals([*given.values()]))
    parts: Any = (x.split_dim, x.parts, x)
    if isinstance(made, Tensor):
        return split_as(made, *parts)
    return tuple(split_as(one, *parts) for one in made)


@rule(_ATEN.transpose.int, _ATEN.permute.default, _ATEN.t.default, _ATEN.unsqueeze.default)
def _move(func: Any, given: dict[str, Any]) -> Any:
    x = given["self"]
    made = _call(func, given)
    order: list[int | None] = list(range(x.dim()))
    if func is _ATEN.transpose.int:
        one, other = given["dim0"], given["dim1"]
        order[one], order[other] = order[other], order[one]
    elif func is _ATEN.permute.default:
        order = [dim % x.dim() for dim in given["dims"]]
    elif func is _ATEN.t.default:
        order.reverse()
    else:
        order.insert(given["dim"] % (x.dim() + 1), None)
    if is_split(x):
        return split_as(made, order.index(x.split_dim), x.parts, x)
    if not is_weight(x):
        return made
    return _as_weight(made, x, [None if dim is None else x.weight.dims[dim] for dim in order])


@rule(_ATEN.squeeze.dim, _ATEN.select.int)
def _less(func: Any, given: dict[str, Any]) -> Any:
    x, dim = given["self"], given["dim"] % given["self"].dim()
    made = _call(func, given)
    if not is_split(x):
        return made
    if x.split_dim == dim:
        raise reads_across(func, x)
    fewer = made.dim() < x.dim() and dim < x.split_dim
    return split_as(made, x.split_dim - fewer, x.parts, x)


@rule(_ATEN.expand.default)
def _expand(func: Any, given: dict[str, Any]) -> Any:
    x, sizes = given["self"], list(given["size"])
    if not is_split(x):
        return _call(func, given)
    sizes[x.split_dim - x.dim()] = -1
    return split_as(x.local.expand(sizes), x.split_dim - x.dim(), x.parts, x)


@rule(_ATEN.cat.default, _ATEN.stack.default)
def _join(func: Any, given: dict[str, Any]) -> Any:
    tensors = given["tensors"]
    split = [x for x in tensors if is_split(x)]
    if not split:
        return func([whole(x) for x in tensors], given["dim"])
    first, more = split[0], int(func is _ATEN.stack.default)
    dim = given["dim"] % (first.dim() + more)
    same = all(x.split_dim == first.split_dim and same_parts(x.parts, first.parts) for x in split)
    if not same or (not more and dim == first.split_dim):
        raise reads_across(func, *split)
    at = first.split_dim - first.dim()
    made = func([x.local if is_split(x) else _narrow(func, x, at, split) for x in tensors], dim)
    return split_as(made, first.split_dim + (more and dim <= first.split_dim), first.parts, *split)


def _pieces(func: Any, x: Spread, bounds: Sequence[tuple[int, int]]) -> list[tuple[Part, ...]]:
    """The parts that are between the places of each pair."""
    ends = [0]
    for part in x.parts:
        ends.append(ends[-1] + part.size)
    if not {end for pair in bounds for end in pair} <= {*ends}:
        if x.planner is not None:
            x.planner.cut(x, sorted({*ends} | {end for pair in bounds for end in pair}))
        raise NotSpreadError(f"{name_of(func)} cuts what is split", x)
    return [x.parts[ends.index(start) : ends.index(end)] for start, end in bounds]


@rule(_ATEN.split.Tensor, _ATEN.split_with_sizes.default)
def _split(func: Any, given: dict[str, Any]) -> Any:
    x, dim = given["self"], given["dim"] % given["self"].dim()
    if not is_split(x):
        return _call(func, given)
    if x.split_dim != dim:
        return [split_as(one, x.split_dim, x.parts, x) for one in _call(func, given)]
    sizes = given.get("split_sizes")
    if sizes is None:
        step, left = given["split_size"], x.shape[dim] % given["split_size"]
        sizes = [step] * (x.shape[dim] // step) + ([left] if left else [])
    bounds = [(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    pieces = _pieces(func, x, bounds)
    held = [sum(local_size(part, x.world) for part in parts) for parts in pieces]
    alike = held[0] if len({*held}) == 1 else held
    made = x.local.split(alike, dim)
    return [split_as(one, dim, parts, x) for one, parts in zip(made, pieces, strict=True)]


@rule(_ATEN.slice.Tensor)
def _slice(func: Any, given: dict[str, Any]) -> Any:
    x, dim, step = given["self"], given["dim"] % given["self"].dim(), given["step"]
    if not is_split(x):
        return _call(func, given)
    if x.split_dim != dim:
        return split_as(_call(func, given), x.split_dim, x.parts, x)
    size = x.shape[dim]
    start, stop = (0 if given["start"] is None else given["start"]), given["end"]
    stop = size if stop is None else min(stop, size)
    start, stop = start + size * (start < 0), stop + size * (stop < 0)
    if step == 1:
        (parts,) = _pieces(func, x, [(start, stop)])
        skipped = x.parts[: x.parts.index(parts[0])] if parts else ()
        first = sum(local_size(part, x.world) for part in skipped)
        length = sum(local_size(part, x.world) for part in parts)
        return split_as(func(x.local, dim, first, first + length), dim, parts, x)
    every = start < step and stop == size and len(x.parts) == 1 and not x.parts[0].replicate
    if not every or local_size(x.parts[0], x.world) % step:
        raise NotSpreadError(f"{name_of(func)} takes every {step}th place of what is split", x)
    parts = scaled(x.parts, lambda n: n // step)
    return split_as(func(x.local, dim, start, _MAX, step), dim, parts, x)


@rule(_ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default)
def _view(func: Any, given: dict[str, Any]) -> Any:
    x, sizes = given["self"], [*given["size" if "size" in given else "shape"]]
    if x.partial:
        return summand(func(x.local, sizes), x.world, x.planner)
    if not is_split(x):
        return func(whole(x), sizes)
    at, parts = _viewed(func, x, sizes)
    sizes[at] = sum(local_size(part, x.world) for part in parts)
    return split_as(func(x.local, sizes), at, parts, x)


def _viewed(func: Any, x: Spread, sizes: list[Any]) -> tuple[int, tuple[Part, ...]]:
    """The dimension of a view that is split, and its parts; fills in its size."""
    kept = x.split_dim + 1
    if [str(n) for n in sizes[:kept]] == [str(n) for n in x.shape[:kept]]:
        return x.split_dim, x.parts  # what is behind is viewed alone, which may be tokens
    size, right = int(x.shape[x.split_dim]), 1
    crosses = NotSpreadError(f"{name_of(func)} joins what is split with what is before it", x)
    for length in x.shape[kept:]:
        if not isinstance(length, int):
            raise crosses
        right *= length
    done = 1
    for at in reversed(range(len(sizes))):
        if not isinstance(sizes[at], int):
            raise crosses
        if sizes[at] == -1:
            sizes[at] = _left(x, sizes, at, crosses)
        before, done = done, done * sizes[at]
        if done < size * right or sizes[at] == 1:
            continue
        if done > size * right:
            raise crosses
        if before <= right:  # the dimension as it was, with others behind it
            behind = right // before
            return at, tuple(_times(part, behind) for part in x.parts)
        return at, _units(func, x, sizes[at])
    raise crosses


def _times(part: Part, by: int) -> Part:
    return Part(
        part.name, part.size * by, part.units * (1 if part.replicate else by), part.replicate
    )


def _left(x: Spread, sizes: Sequence[Any], at: int, crosses: NotSpreadError) -> int:
    """The size that a view leaves open; the other ones are the tensor's, or known."""
    numel, known = 1, 1
    symbols = 0
    for length in x.shape:
        numel, symbols = (
            (numel * length, symbols) if isinstance(length, int) else (numel, symbols + 1)
        )
    for place, length in enumerate(sizes):
        if place != at and isinstance(length, int):
            known *= length
        symbols -= place != at and not isinstance(length, int)
    if symbols or numel % known:
        raise crosses
    return numel // known


def _units(func: Any, x: Spread, units: int) -> tuple[Part, ...]:
    """The parts of a dimension that a view cuts into units, such as heads."""
    if len(x.parts) > 1:
        raise NotSpreadError(f"{name_of(func)} cuts parts that are split each", x)
    (part,) = x.parts
    if part.replicate and part.units == units:
        return (Part(part.name, units, units, replicate=True),)
    if part.replicate or units % x.world:
        if not part.replicate and x.planner is not None and x.world % units == 0:
            x.planner.repeat(x, units)
        raise NotSpreadError(f"{units} units do not spread over {x.world} ranks", x)
    return (Part(part.name, units, units),)


@rule(_ATEN.index.Tensor)
def _index(func: Any, given: dict[str, Any]) -> Any:
    x, indices = given["self"], given["indices"]
    known = len(indices) == 1 and not isinstance(indices[0], Spread)
    if is_split(x) and not (known and x.split_dim > 0):
        raise NotSpreadError("index reads what is split", x)
    if isinstance(x, Spread) and x.partial and known:
        return summand(func(x.local, indices), x.world, x.planner)
    made = func(x.local if is_split(x) else whole(x), [whole(i) for i in indices])
    more = made.dim() - x.dim()
    if is_split(x):
        return split_as(made, x.split_dim + more, x.parts, x)
    if not known or not is_weight(x):
        return made
    return _as_weight(made, x, [*[None] * (more + 1), *x.weight.dims[1:]])
