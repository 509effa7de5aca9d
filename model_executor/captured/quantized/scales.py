"""Moves scales, zero points and packed integers as the weights move to which they belong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..moves import Axis, Move


def by_units(
    move: Move, units: tuple[int, int], sizes: Sequence[int], *, swapped: bool = False
) -> Move:
    """The move of a tensor that has one element for ``units`` (rows, columns) of a weight, where
    the weight itself moves by ``move``.

    Args:
        units: 0 for all rows, or columns.
        sizes: of the source, [rows, columns].
        swapped: columns are the first dimension of that tensor, at its source and in the layer.

    Raises:
        ValueError: an element would belong to numbers that part.
    """
    source, dest, axes = list(move.source_start), list(move.dest_start), list(move.axes)
    first = len(dest) - 2  # experts are counted ahead of rows and columns
    for dim, unit in enumerate(units):
        own = [axis for axis in axes if axis.source_dim == dim]
        if any(axis.dest_dim != dim + first for axis in own):
            raise ValueError("it is transposed")
        others = [axis for axis in axes if axis.source_dim != dim]
        if unit == 0:
            source[dim] = dest[dim + first] = 0
            axes = others
            continue
        if source[dim] % unit or dest[dim + first] % unit:
            raise ValueError(f"a part begins within {unit} that share one element")
        ends = source[dim] + 1 + sum((a.length - 1) * a.source_step for a in own) == sizes[dim]
        axes = others + list(_divided(own, unit, ends))
        source[dim] //= unit
        dest[dim + first] //= unit
    if swapped:
        source.reverse()
        dest[first:] = reversed(dest[first:])
        axes = [a._replace(source_dim=1 - a.source_dim, dest_dim=_other(a, first)) for a in axes]
    return move._replace(source_start=tuple(source), dest_start=tuple(dest), axes=tuple(axes))


def _other(axis: Axis, first: int) -> int:
    return axis.dest_dim if axis.dest_dim < first else 2 * first + 1 - axis.dest_dim


def _divided(axes: Sequence[Axis], unit: int, ends: bool) -> Iterator[Axis]:
    """The loops over elements that stand for ``unit`` numbers each; the last one may stand for
    fewer where the loops end with the weight."""
    for axis in axes:
        steps = axis.source_step, axis.dest_step
        if not any(step % unit for step in steps):
            yield axis._replace(source_step=steps[0] // unit, dest_step=steps[1] // unit)
            continue
        if steps != (1, 1) or (axis.length % unit and not (ends and len(axes) == 1)):
            raise ValueError(f"{unit} that share one element part")
        if (length := -(-axis.length // unit)) > 1:
            yield axis._replace(length=length)
