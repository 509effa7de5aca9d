"""Copies from a checkpoint's tensors into parameters that have another layout.

A ``Move`` says which elements of one tensor go where in one parameter: a slice, dimensions in
another order, and dimensions that are cut or joined on the way.  It is data, so that it can be
planned from the files' headers, narrowed to what a rank holds, and run one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoint import TensorInfo, open_checkpoint_file

MOST_BYTES = 2**28
"""Bytes of a slice that is read at once.  A tensor of all experts has several GB."""


class Axis(NamedTuple):
    """One loop of a copy: each of its ``length`` rounds goes ``source_step`` further along one
    dimension of the tensor and ``dest_step`` further along one dimension of the parameter."""

    length: int
    source_dim: int
    source_step: int
    dest_dim: int
    dest_step: int


class Move(NamedTuple):
    """The elements of a tensor that go to a parameter: all that ``axes``, nested in any order,
    reach from the two starts.  Of the axes in one dimension of the parameter, a round of one spans
    all rounds of those with smaller steps."""

    source: TensorInfo
    parameter: str
    source_start: tuple[int, ...]
    dest_start: tuple[int, ...]
    axes: tuple[Axis, ...]

    @property
    def numel(self) -> int:
        return prod(axis.length for axis in self.axes)

    @property
    def nbytes(self) -> int:
        """Bytes of the slice that is read: the smallest one that has all of the elements."""
        numel: int = prod(part.stop - part.start for part in self.read_index())
        return self.source.nbytes * numel // max(1, prod(self.source.shape))

    def read_index(self) -> tuple[slice, ...]:
        """The slice of the source that is read."""
        stops = [start + 1 for start in self.source_start]
        for axis in self.axes:
            stops[axis.source_dim] += (axis.length - 1) * axis.source_step
        return tuple(map(slice, self.source_start, stops))

    def part_of(self, parameter: Tensor) -> Tensor:
        """The elements of the parameter that are filled, with a dimension for each axis."""
        dims = [(axis.dest_dim, axis.dest_step) for axis in self.axes]
        return self._strided(parameter, self.dest_start, dims)

    def part_read(self, read: Tensor) -> Tensor:
        """The same elements of what was read, see ``read_index``."""
        dims = [(axis.source_dim, axis.source_step) for axis in self.axes]
        return self._strided(read, (0,) * read.ndim, dims)

    def _strided(
        self, tensor: Tensor, start: Sequence[int], dims: Iterable[tuple[int, int]]
    ) -> Tensor:
        strides = tensor.stride()
        offset = sum(first * stride for first, stride in zip(start, strides, strict=True))
        return tensor.as_strided(
            [axis.length for axis in self.axes],
            [step * strides[dim] for dim, step in dims],
            tensor.storage_offset() + offset,
        )


def whole(source: TensorInfo) -> tuple[Move, ...]:
    """The move of a tensor to a parameter like it; none of an empty one."""
    if 0 in source.shape:
        return ()
    start = (0,) * len(source.shape)
    axes = (Axis(n, dim, 1, dim, 1) for dim, n in enumerate(source.shape) if n > 1)
    return (Move(source, "", start, start, tuple(axes)),)


def narrowed(move: Move, dim: int, start: int, length: int) -> tuple[Move, ...]:
    """The moves that fill ``length`` rows of the parameter from ``start`` on, along ``dim``, for
    one that holds only these: mostly one, none where the move fills none of them.  Rows that were
    interleaved may need several."""
    return tuple(shifted(part, dim, -start) for part in _within(move, dim, start, start + length))


def shifted(move: Move, dim: int, by: int) -> Move:
    """The move to a parameter in which everything lies ``by`` further along ``dim``."""
    start = list(move.dest_start)
    start[dim] += by
    return move._replace(dest_start=tuple(start))


def _within(move: Move, dim: int, low: int, high: int) -> Iterator[Move]:
    """The parts of a move whose places along ``dim`` are in a range."""
    start = move.dest_start[dim]
    axes = sorted((a for a in move.axes if a.dest_dim == dim), key=lambda axis: axis.dest_step)
    if not axes:
        if low <= start < high:
            yield move
        return
    *inner, axis = axes
    extent = 1 + sum((a.length - 1) * a.dest_step for a in inner)
    step = axis.dest_step
    first, end = -((start - low) // step), (high - start - extent) // step + 1
    full = range(max(0, first), min(axis.length, end))
    if full:
        yield _rounds(move, axis, full)
    for number in sorted({(low - start) // step, (high - 1 - start) // step} - {*full}):
        if 0 <= number < axis.length:
            part = _rounds(move, axis, range(number, number + 1))
            yield from _within(part, dim, low, high)


def _rounds(move: Move, axis: Axis, rounds: range) -> Move:
    """The part of a move that some rounds of an axis make."""
    source, dest = list(move.source_start), list(move.dest_start)
    source[axis.source_dim] += rounds.start * axis.source_step
    dest[axis.dest_dim] += rounds.start * axis.dest_step
    shorter = (axis._replace(length=len(rounds)),) if len(rounds) > 1 else ()
    axes = tuple(a for old in move.axes for a in (shorter if old == axis else (old,)))
    return move._replace(source_start=tuple(source), dest_start=tuple(dest), axes=axes)


def permuted(move: Move, dims: Sequence[int]) -> Move:
    """The move to ``parameter.permute(dims)``."""
    place = {old: new for new, old in enumerate(dims)}
    axes = (axis._replace(dest_dim=place[axis.dest_dim]) for axis in move.axes)
    start = tuple(move.dest_start[dim] for dim in dims)
    return move._replace(dest_start=start, axes=_row_major(axes))


def _row_major(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Axes in the order in which a whole parameter lies in memory, so that the part that they fill
    is contiguous where it can be: copies between devices need no buffer for such a part."""
    return tuple(sorted(axes, key=lambda axis: (axis.dest_dim, -axis.dest_step)))


def unsqueezed(move: Move, dim: int) -> Move:
    """The move to ``parameter.unsqueeze(dim)``."""
    start = (*move.dest_start[:dim], 0, *move.dest_start[dim:])
    axes = (a._replace(dest_dim=a.dest_dim + 1) if a.dest_dim >= dim else a for a in move.axes)
    return move._replace(dest_start=start, axes=tuple(axes))


def viewed(move: Move, shape: Sequence[int], new_shape: Sequence[int]) -> Move:
    """The move to ``parameter.reshape(new_shape)``.

    Raises:
        ValueError: it would be no single move.
    """
    strides, sizes = _strides(shape), _strides(new_shape)
    place = sum(map(int.__mul__, move.dest_start, strides))
    starts = []
    for stride in sizes:
        starts.append(place // stride)
        place %= stride
    axes: list[Axis] = []
    for axis in move.axes:
        axes += _cut(axis, axis.dest_step * strides[axis.dest_dim], starts, new_shape, sizes)
    last = list(starts)
    for axis in axes:
        last[axis.dest_dim] += (axis.length - 1) * axis.dest_step
    if any(map(int.__ge__, last, new_shape)):
        raise ValueError(f"{list(shape)} as {list(new_shape)} cuts a slice across its rows")
    return move._replace(dest_start=tuple(starts), axes=_joined(axes))


def _strides(shape: Sequence[int]) -> list[int]:
    return [prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _cut(
    axis: Axis, stride: int, starts: Sequence[int], shape: Sequence[int], strides: Sequence[int]
) -> Iterator[Axis]:
    """An axis, whose rounds are ``stride`` elements apart, as axes of the dimensions of a shape."""
    length, source_step = axis.length, axis.source_step
    for dim in reversed(range(len(shape))):
        above = strides[dim] * shape[dim]
        if stride >= above:
            continue
        step, rest = divmod(stride, strides[dim])
        if rest:
            break
        if starts[dim] + (length - 1) * step < shape[dim]:
            yield Axis(length, axis.source_dim, source_step, dim, step)
            return
        inside, rest = divmod(above, stride)
        if rest or length % inside:
            break
        if inside > 1:
            yield Axis(inside, axis.source_dim, source_step, dim, step)
        length, source_step, stride = length // inside, source_step * inside, above
        if length == 1:
            return
    raise ValueError(f"a reshape to {list(shape)} cuts rows of {axis.length} unevenly")


def _joined(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """The same loops with as few axes as possible."""
    done: list[Axis] = []
    for axis in sorted(axes, key=lambda a: (a.dest_dim, a.dest_step)):
        if done and axis == _next(done[-1], axis.length):
            done[-1] = done[-1]._replace(length=done[-1].length * axis.length)
        else:
            done.append(axis)
    return _row_major(done)


def _next(axis: Axis, length: int) -> Axis:
    """The axis that goes on where another ends."""
    steps = axis.source_step * axis.length, axis.dest_step * axis.length
    return Axis(length, axis.source_dim, steps[0], axis.dest_dim, steps[1])


def in_file_order(moves: Iterable[Move]) -> list[Move]:
    """The moves of one file together, and in it those to one parameter."""
    return sorted(moves, key=lambda move: (move.source.file, move.parameter))


def copy_moves(
    moves: Iterable[Move],
    tensors: Mapping[str, Tensor],
    advance: Callable[[int], Any] = lambda count: None,
    filled: Callable[[Move, Tensor], None] = lambda move, part: None,
) -> None:
    """Copy slices of tensors into parameters and cast them, ``MOST_BYTES`` of them at a time.

    Args:
        moves: the files are opened in their order, see ``in_file_order``.
        tensors: by the names of the parameters; they may be views of others, with any strides.
        advance: is told the bytes that were read, of each move at most ``Move.nbytes`` in all.
        filled: is told each move, and the part of the parameter that now holds it.

    Raises:
        UserError: a file is missing or damaged.
    """
    for file, of_file in groupby(moves, key=lambda move: move.source.file):
        with open_checkpoint_file(file) as opened, torch.no_grad():
            for move in of_file:
                parameter = tensors[move.parameter]
                for piece in _pieces(move):
                    piece.part_of(parameter).copy_(piece.part_read(_read(opened, piece)))
                    advance(piece.nbytes)
                filled(move, move.part_of(parameter))


def _read(opened: Any, move: Move) -> Tensor:
    """The slice of a move from its opened file."""
    index, name = move.read_index(), move.source.name
    tensor: Tensor = opened.get_slice(name)[index] if index else opened.get_tensor(name)
    return tensor


def _pieces(move: Move) -> Iterator[Move]:
    """A move as several that read less each: rows of its tensor."""
    if move.nbytes <= MOST_BYTES or not move.axes:
        yield move
        return
    axis = min(move.axes, key=lambda axis: (axis.source_dim, -axis.source_step))
    step = max(1, axis.length * MOST_BYTES // move.nbytes)
    for first in range(0, axis.length, step):
        yield _rounds(move, axis, range(first, min(first + step, axis.length)))
