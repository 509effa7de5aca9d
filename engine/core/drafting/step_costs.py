"""``StepCosts`` says how long a step of so many rows takes: measured where steps have run, and
interpolated elsewhere.

A prior gives the shape of the curve, and each measurement a factor between the prior and the truth.
Clocks are not read here: whoever runs steps tells their times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

_WEIGHT = 0.1
"""Weight of a new time in the running average of its bucket."""
_MOST_RISE = 2.0
"""A longer time than this many averages counts as so much: it held a capture or a pause."""
_STALE_AFTER = 2000
"""Steps behind which a bucket that was not visited counts as unmeasured for lower bounds."""
_NEAR = 0.7
"""Share of a longer time that a shorter one must have to be near it."""
Prior = Callable[[int], float]


def knee(rows: int) -> Prior:
    """A prior: flat while reading the weights takes longer than computing, linear behind ``rows``
    rows."""
    return lambda count: max(1.0, count / rows)


def bucket_of(rows: int) -> int:
    """The bucket of a number of rows: exact up to 8, then eight to each power of two, so that the
    rows of a bucket differ by an eighth at most.  Returns the largest number of rows in it."""
    if rows <= 8:
        return max(rows, 1)
    step = 1 << ((rows - 1).bit_length() - 4)
    return -(-rows // step) * step


@dataclass
class _Cell:
    """The running average of one bucket, in seconds."""

    seconds: float
    count: int = 1
    seen_at: int = 0


class StepCosts:
    """Times of steps by the number of drafts that they make (``depth``) and by rows.

    Args:
        prior: relative time of a step by its rows; it never falls.
        draft_share: time to draft a token for all sequences, by the time of a step of one row,
            until it is measured; 0 for drafters that run beside the step.
    """

    def __init__(self, prior: Prior, draft_share: float = 0.0) -> None:
        self._prior, self._share = prior, draft_share
        self._cells: dict[int, dict[int, _Cell]] = {}
        self._num_steps = 0
        self._curves: dict[int, list[tuple[int, float]]] = {}

    def observe(self, rows: int, depth: int, seconds: float) -> None:
        """A step of ``rows`` rows has taken ``seconds``, with the drafting of ``depth`` tokens.
        The first time of a bucket may hold the capture of its graph: the second replaces it if it
        is shorter."""
        depth = depth if self._share else 0
        self._num_steps += 1
        cells = self._cells.setdefault(depth, {})
        cell = cells.get(bucket := bucket_of(rows))
        if cell is None:
            cell = cells[bucket] = _Cell(seconds)
        elif cell.count == 1:
            cell.seconds = min(cell.seconds, seconds)
            cell.count = 2
        else:
            weight = max(_WEIGHT, 1 / cell.count)
            cell.seconds += weight * (min(seconds, _MOST_RISE * cell.seconds) - cell.seconds)
            cell.count += 1
        cell.seen_at = self._num_steps
        self._curves.pop(depth, None)

    def estimate(self, rows: float, depth: int = 0) -> float:
        """Seconds of a step; relative to a step of one row if none has run."""
        depth = depth if self._share else 0
        near = self._nearest(depth)
        if near is None:
            return self._prior_of(rows) + depth * self._share
        curve = self._curve(near)
        seconds = _between(curve, rows) * self._prior_of(rows)
        if near == depth:
            return seconds
        # What a draft takes more or less, by the shortest step of the nearest depth.
        base = curve[0][1] * self._prior_of(curve[0][0]) / (1 + near * self._share)
        return max(seconds + (depth - near) * self._share * base, 0.1 * seconds)

    def least(self, rows: float, depth: int = 0) -> float:
        """The least that a step of so many rows can take: the time of a measured step of no more
        rows, since time does not fall with them; 0 if there is none."""
        depth = depth if self._share else 0
        oldest = self._num_steps - _STALE_AFTER
        below = [
            cell.seconds
            for bucket, cell in self._cells.get(depth, {}).items()
            if bucket <= rows and cell.seen_at >= oldest
        ]
        return min(max(below, default=0.0), self.estimate(rows, depth))

    def is_measured(self, rows: float, depth: int = 0) -> bool:
        """Whether steps of this bucket have run lately."""
        depth = depth if self._share else 0
        cell = self._cells.get(depth, {}).get(bucket_of(round(rows)))
        return (
            cell is not None and cell.count > 1 and (cell.seen_at >= self._num_steps - _STALE_AFTER)
        )

    def is_known(self, rows: float, depth: int = 0) -> bool:
        """Whether measured times of no more and of no fewer rows are near each other, so that the
        time of ``rows`` lies between them."""
        depth = depth if self._share else 0
        if self.is_measured(rows, depth):
            return True
        oldest = self._num_steps - _STALE_AFTER
        cells = self._cells.get(depth, {}).items()
        above = [c.seconds for b, c in cells if b >= rows and c.seen_at >= oldest]
        return bool(above) and self.least(rows, depth) >= _NEAR * min(above)

    def table(self) -> list[dict[str, float]]:
        """Plain data: what was measured, by depth and rows."""
        return [
            {"drafts": depth, "rows": bucket, "seconds": cell.seconds, "steps": cell.count}
            for depth, cells in sorted(self._cells.items())
            for bucket, cell in sorted(cells.items())
        ]

    def _prior_of(self, rows: float) -> float:
        return self._prior(max(round(rows), 1))

    def _nearest(self, depth: int) -> int | None:
        return min(self._cells, key=lambda d: abs(d - depth)) if self._cells else None

    def _curve(self, depth: int) -> list[tuple[int, float]]:
        """(rows, measured over prior) of a depth's buckets, whose times do not fall with the rows:
        neighbors that do are averaged (pool adjacent violators)."""
        curve = self._curves.get(depth)
        if curve is None:
            pools: list[tuple[float, float, list[int]]] = []
            for bucket, cell in sorted(self._cells[depth].items()):
                weight = float(min(cell.count, 20))
                pool = (cell.seconds * weight, weight, [bucket])
                while pools and pools[-1][0] / pools[-1][1] > pool[0] / pool[1]:
                    before = pools.pop()
                    pool = (before[0] + pool[0], before[1] + pool[1], before[2] + pool[2])
                pools.append(pool)
            curve = [
                (bucket, total / weight / self._prior(bucket))
                for total, weight, buckets in pools
                for bucket in buckets
            ]
            self._curves[depth] = curve
        return curve


def _between(curve: list[tuple[int, float]], rows: float) -> float:
    """The factor at ``rows``: linear between two points, constant beyond them."""
    after = bisect_left(curve, (rows,))
    if after == len(curve):
        return curve[-1][1]
    if after == 0:
        return curve[0][1]
    (low, first), (high, last) = curve[after - 1], curve[after]
    return first + (last - first) * (rows - low) / (high - low)
