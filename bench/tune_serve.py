"""Searches the scheduler's limits with which a server answers the most requests in time.

``search`` measures a grid of points in rounds.  A round keeps the best third of its points for the
next, which sends twice the requests (successive halving: Jamieson and Talwalkar, 2016).
``ServedPoints`` measures one: it starts a server and offers requests at falling rates.  As goodput
is never above the rate that is offered, it stops at the rate that could change nothing any more.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, inf
from statistics import mean
from typing import Any

from ..config import MachineError, UserError
from .http_load import load
from .http_server import serving
from .profile_options import ProfileOptions
from .workloads import Work, arrivals

KEPT_OF = 3
"""A round keeps one point of so many, and the last round has no more."""
_RATES = (0.85, 0.7, 0.55, 0.4, 0.25, 0.1)
"""Rates that are offered, as shares of the throughput of requests that come all at once."""
_WARM_UP = 64
_DELAY = 4
"""Steps before those that are profiled."""
MEMORY_SHARES = (0.92, 0.94, 0.96, 0.98)

Row = dict[str, Any]
"""A result of ``Run.to_json`` with goodput, beside its point and its rate; or ``failed``."""


@dataclass(frozen=True)
class Point:
    """Options of a server; None: as they are without the flag."""

    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float | None = None

    def options(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


Measure = Callable[[Point, int, float], Row]
"""(point, number of requests, goodput a second above which it is of interest) -> its best row."""


def grid(seqs: Sequence[int], tokens: Sequence[int], longest: int) -> list[Point]:
    """All points that differ in effect, of each kind the one with the fewest tokens.

    Each running request needs a token a step, and ``max_num_seqs`` requests have no more than
    ``max_num_seqs`` x ``longest`` tokens.
    """
    points: dict[tuple[int, int], Point] = {}
    for s, t in itertools.product(sorted(seqs), sorted(tokens)):
        if t >= s:
            points.setdefault((s, min(t, s * longest)), Point(s, t))
    return list(points.values())


def rounds(num_points: int, num_requests: int) -> list[tuple[int, int]]:
    """Points and requests of each round."""
    sizes = [num_points]
    while sizes[-1] > KEPT_OF:
        sizes.append(ceil(sizes[-1] / KEPT_OF))
    last = len(sizes) - 1
    return [(size, max(1, num_requests >> (last - number))) for number, size in enumerate(sizes)]


def goodput(row: Row) -> float:
    """Requests a second that kept all limits; none of a point that failed."""
    return float(row.get("goodput_per_s", 0.0))


def to_profile(best: Row, works: Sequence[Work]) -> list[ProfileOptions]:
    """What shows where the steps of the best point spend their time: the prefill of a prompt, and
    decodes of as many requests as were open on average (Little's law), all of mean length."""
    mean_open = best["requests_per_s"] * best["e2e_ms"]["mean"] / 1e3
    most = min(best["max_num_seqs"], len(works))
    decode = ProfileOptions(
        "decode",
        min(most, max(1, round(mean_open))),
        input_len=ceil(mean(len(work.prompt_token_ids) for work in works)),
        output_len=max(ceil(mean(work.output_len for work in works)), 3 + _DELAY),
        delay_iterations=_DELAY,
    )
    return [replace(decode, phase="prefill", batch_size=1), decode]


class Found:
    """Rows that were measured, in this run or in one that was interrupted.

    Args:
        rows: rows of an earlier run, which are not measured again.
        on_row: called with all rows, and with each that is measured or known.
    """

    def __init__(
        self, rows: Sequence[Row], measure: Measure, on_row: Callable[[list[Row], Row], None]
    ) -> None:
        self._rows = {_key(row): row for row in rows}
        self._measure, self._on_row = measure, on_row

    def row(self, point: Point, num_requests: int, floor: float) -> Row:
        """Measure a point, unless that was done before."""
        asked = {**asdict(point), "asked": num_requests}
        if (row := self._rows.get(_key(asked))) is None:
            try:
                row = {**asked, **self._measure(point, num_requests, floor)}
            except (MachineError, UserError) as error:
                row = {**asked, "failed": str(error)}
            self._rows[_key(asked)] = row
        self._on_row(list(self._rows.values()), row)
        return row


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*(row[name] for name in Point.__dataclass_fields__), row["asked"])


def search(points: Sequence[Point], num_requests: int, measured: Found) -> Row:
    """The row of the point with the most goodput.

    Raises:
        MachineError: no point could be measured.
    """
    left = list(points)
    for (_, asked), (keep, _) in itertools.pairwise([*rounds(len(points), num_requests), (1, 0)]):
        rows: list[Row] = []
        for point in left:
            best = heapq.nlargest(keep, map(goodput, rows))
            rows.append(measured.row(point, asked, best[-1] if len(best) == keep else 0.0))
        served = [pair for pair in zip(rows, left, strict=True) if "failed" not in pair[0]]
        if not served:
            raise MachineError(f"no point could be measured; the first: {rows[0]['failed']}")
        served.sort(key=lambda pair: goodput(pair[0]), reverse=True)
        left = [point for _, point in served[:keep]]
    return served[0][0]


def raise_memory(best: Row, num_requests: int, measured: Found) -> Row:
    """``best``, or its point with more GPU memory: upward until the server no longer starts."""
    point = Point(best["max_num_seqs"], best["max_num_batched_tokens"])
    for share in MEMORY_SHARES:
        more = replace(point, gpu_memory_utilization=share)
        row = measured.row(more, num_requests, goodput(best))
        if "failed" in row:
            break
        best = max(best, row, key=goodput)
    return best


class ServedPoints:
    """Measures a point with a server of its own.

    Args:
        options: engine options, beside those of the point.
        limits: latencies in ms that a good request keeps.
        rates: requests a second to offer, instead of those that the search chooses.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        works: Sequence[Work],
        limits: dict[str, float],
        rates: Sequence[float],
        burstiness: float,
    ) -> None:
        self._options, self._works, self._limits = dict(options), works, limits
        self._rates, self._burstiness = rates, burstiness

    @property
    def longest(self) -> int:
        return max(len(work.prompt_token_ids) + work.output_len for work in self._works)

    def __call__(self, point: Point, num_requests: int, floor: float) -> Row:
        works = self._works[:num_requests]
        with serving({**self._options, **point.options()}) as server:
            load(server.target, works[:_WARM_UP], [0.0] * len(works[:_WARM_UP]))

            def run(rate: float) -> Row:
                times = arrivals(len(works), rate, self._burstiness)
                row = load(server.target, works, times).to_json(self._limits)
                return {**row, "request_rate": None if rate == inf else round(rate, 3)}

            if self._rates:
                return max(map(run, self._rates), key=goodput)
            # A burst is no load that lasts: it only says how much the server can do.
            most = run(inf)["requests_per_s"]
            best = run(most)
            for share in _RATES:
                if most * share <= max(goodput(best), floor):
                    break
                best = max(best, run(most * share), key=goodput)
        return best
