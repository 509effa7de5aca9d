"""A tensor without data that knows which elements of which checkpoint tensors it holds.

The conversions of ``transformers`` run on such tensors as on real ones.  What comes out says how to
copy the checkpoint's tensors, whatever operations the conversion is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import TensorInfo
from .moves import Move, narrowed, permuted, shifted, unsqueezed, viewed, whole

_aten = torch.ops.aten


class InexpressibleError(ValueError):
    """An operation that computes new numbers, or moves them in a way that no ``Move`` describes."""


class TracedTensor(Tensor):
    """``moves`` fill it; its elements are in no memory."""

    moves: tuple[Move, ...]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, moves: tuple[Move, ...]
    ) -> TracedTensor:
        size, device = torch.Size(shape), torch.device("meta")
        tensor = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        tensor.moves = moves
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        rule = _RULES.get(func)
        if rule is None:
            raise InexpressibleError(f"{func} is no copy of slices")
        return rule(*args, **(kwargs or {}))


def traced(source: TensorInfo, dtype: torch.dtype) -> TracedTensor:
    """A tensor of a checkpoint."""
    return TracedTensor(source.shape, dtype, whole(source))


def _view(x: TracedTensor, shape: Sequence[int]) -> TracedTensor:
    shape = list(shape)
    if -1 in shape:
        known = -prod(shape)
        shape[shape.index(-1)] = x.numel() // known if known else 0
    try:
        moves = tuple(viewed(move, x.shape, shape) for move in x.moves)
    except ValueError as error:
        raise InexpressibleError(str(error)) from error
    return TracedTensor(shape, x.dtype, moves)


def _permute(x: TracedTensor, dims: Sequence[int]) -> TracedTensor:
    dims = [dim % x.ndim for dim in dims]
    moves = tuple(permuted(move, dims) for move in x.moves)
    return TracedTensor([x.shape[dim] for dim in dims], x.dtype, moves)


def _transpose(x: TracedTensor, dim0: int, dim1: int) -> TracedTensor:
    dims = list(range(x.ndim))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _permute(x, dims)


def _slice(
    x: TracedTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> TracedTensor:
    if step != 1:
        raise InexpressibleError(f"a slice of step {step}")
    dim %= x.ndim
    first, stop, _ = slice(start, end).indices(x.shape[dim])
    return _narrow(x, dim, first, max(0, stop - first))


def _narrow(x: TracedTensor, dim: int, start: int, length: int) -> TracedTensor:
    shape = list(x.shape)
    shape[dim] = length
    moves = (part for move in x.moves for part in narrowed(move, dim, start, length))
    return TracedTensor(shape, x.dtype, tuple(moves))


def _split(x: TracedTensor, size: int, dim: int = 0) -> list[TracedTensor]:
    total = x.shape[dim]
    return _split_sizes(x, [min(size, total - first) for first in range(0, total, size)], dim)


def _split_sizes(x: TracedTensor, sizes: Sequence[int], dim: int = 0) -> list[TracedTensor]:
    dim %= x.ndim
    if sum(sizes) != x.shape[dim]:
        raise ValueError(f"parts of {list(sizes)} rows do not make {x.shape[dim]}")
    return [_narrow(x, dim, first, size) for first, size in _places(sizes)]


def _places(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = 0
    for size in sizes:
        yield first, size
        first += size


def _unbind(x: TracedTensor, dim: int = 0) -> list[TracedTensor]:
    return [_select(x, dim, index) for index in range(x.shape[dim])]


def _select(x: TracedTensor, dim: int, index: int) -> TracedTensor:
    dim %= x.ndim
    return _squeeze(_narrow(x, dim, index % x.shape[dim], 1), dim)


def _squeeze(x: TracedTensor, dim: int) -> TracedTensor:
    dim %= x.ndim
    shape = list(x.shape)
    return _view(x, shape[:dim] + shape[dim + 1 :]) if shape[dim] == 1 else x


def _unsqueeze(x: TracedTensor, dim: int) -> TracedTensor:
    shape = list(x.shape)
    dim %= x.ndim + 1
    shape.insert(dim, 1)
    return TracedTensor(shape, x.dtype, tuple(unsqueezed(move, dim) for move in x.moves))


def _cat(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    first = tensors[0]
    dim %= first.ndim
    for x in tensors:
        if {n for d, n in enumerate(x.shape) if d != dim and n != first.shape[d]}:
            raise ValueError(f"shapes {list(first.shape)} and {list(x.shape)} do not join")
    places = _places([x.shape[dim] for x in tensors])
    moves = (
        shifted(move, dim, start)
        for x, (start, _) in zip(tensors, places, strict=True)
        for move in x.moves
    )
    shape = list(first.shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    return TracedTensor(shape, first.dtype, tuple(moves))


def _stack(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    shape = list(tensors[0].shape)
    dim %= len(shape) + 1
    for x in tensors:
        if list(x.shape) != shape:
            raise ValueError(f"shapes {shape} and {list(x.shape)} do not stack")
    # In one go: experts are many.
    moves = (
        shifted(unsqueezed(move, dim), dim, place)
        for place, x in enumerate(tensors)
        for move in x.moves
    )
    shape.insert(dim, len(tensors))
    return TracedTensor(shape, tensors[0].dtype, tuple(moves))


def _same(x: TracedTensor, memory_format: torch.memory_format | None = None) -> TracedTensor:
    return TracedTensor(x.shape, x.dtype, x.moves)


_RULES: dict[Any, Callable[..., Any]] = {
    _aten.alias.default: _same,
    _aten.cat.default: _cat,
    _aten.clone.default: _same,
    _aten.detach.default: _same,
    _aten.permute.default: _permute,
    _aten.select.int: _select,
    _aten.slice.Tensor: _slice,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_sizes,
    _aten.squeeze.dim: _squeeze,
    _aten.stack.default: _stack,
    _aten.t.default: lambda x: _transpose(x, 0, x.ndim - 1),
    _aten.transpose.int: _transpose,
    _aten.unbind.int: _unbind,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
}
