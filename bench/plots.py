"""Draws what ``fusewright bench latency``, ``throughput``, ``serve``, ``growth``, ``fusewright tune
serve`` and ``benchmarks.peers`` keep as JSON: the machine that measures needs nothing that draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..config import UserError
from .result_file import read_result

Record = dict[str, Any]


def check_drawing() -> None:
    """Raises UserError: there is nothing to draw with."""
    if find_spec("matplotlib") is None:
        raise UserError(
            "plot: matplotlib is not installed here; install it, or keep the result by --output "
            "and run `fusewright bench plot` elsewhere"
        )


def load(path: Path) -> Record:
    """A result as it was written.

    Raises:
        UserError: it cannot be read, or is no result of these benches.
    """

    def checked(record: Record) -> Record:
        _kind(record)
        return record

    return read_result(path, "bench latency`, `throughput` or `growth", checked)


def _kind(record: Record) -> str:
    if "context" in record and "requests" in record:
        return "growth"
    if isinstance(record.get("tpot_ms"), dict):
        return "engines"
    row = record["rows"][0]
    if "max_num_seqs" in row:
        return "tuning"
    return "throughput" if "workload" in row else "latency" if row["batch"] else ""


def plot(results: Mapping[str, Record], path: Path) -> None:
    """Draw named results of one bench to ``path``: TPOT over batch, output tokens a second over
    the mean time a token, goodput over a setting, or what grows.

    Raises:
        UserError: they are of several benches; nothing can draw here.
    """
    check_drawing()
    kinds = sorted({_kind(record) for record in results.values()})
    if len(kinds) != 1:
        raise UserError(f"plot: results of {' and '.join(kinds)} do not share a picture")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    draw: Callable[[Any, Mapping[str, Record]], Sequence[Any]] = _DRAW[kinds[0]]
    width = 10 if draw is _growth else 6
    page = pyplot.figure(figsize=(width, 4), layout="constrained")
    for axis in draw(page, results):
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
    page.savefig(path)
    pyplot.close(page)


def _latency(page: Any, results: Mapping[str, Record]) -> Sequence[Any]:
    axis = page.subplots()
    for name, record in results.items():
        points = sorted((row["batch"], row["tpot_ms"]) for row in record["rows"])
        axis.plot(*zip(*points, strict=True), "o-", label=name)
    axis.set(xscale="log", xlabel="requests in a batch", ylabel="ms a token", ylim=(0, None))
    return [axis]


def _throughput(page: Any, results: Mapping[str, Record]) -> Sequence[Any]:
    """A line for each workload of each server of each result, a point for each rate of requests."""

    def kind(row: Record) -> tuple[str, ...]:
        return (row["server"], row["workload"]) if "server" in row else (row["workload"],)

    axis = page.subplots()
    for name, record in results.items():
        for label in dict.fromkeys(map(kind, record["rows"])):
            rows = [row for row in record["rows"] if kind(row) == label]
            points = [(row["tpot_ms"]["mean"], row["output_tokens_per_s"]) for row in rows]
            axis.plot(*zip(*points, strict=True), "o-", label=", ".join((name, *label)))
            for row, point in zip(rows, points, strict=True):
                rate = row["request_rate"]
                axis.annotate("all at once" if rate is None else f"{rate:g}/s", point, fontsize=7)
    axis.set(xlabel="ms a token, mean", ylabel="output tokens/s", xlim=(0, None), ylim=(0, None))
    return [axis]


def _tuning(page: Any, results: Mapping[str, Record]) -> Sequence[Any]:
    """A line for each ``max_num_batched_tokens``, a point for each ``max_num_seqs`` by its longest
    run, and a star for the best."""
    axis = page.subplots()
    for name, record in results.items():
        prefix = f"{name}, " if len(results) > 1 else ""
        last: dict[int, dict[int, Record]] = {}
        for row in sorted(record["rows"], key=lambda row: row["asked"]):
            if "failed" not in row and row["gpu_memory_utilization"] is None:
                last.setdefault(row["max_num_batched_tokens"], {})[row["max_num_seqs"]] = row
        for tokens, rows in sorted(last.items()):
            points = [(seqs, row["goodput_per_s"]) for seqs, row in sorted(rows.items())]
            axis.plot(*zip(*points, strict=True), "o-", label=f"{prefix}{tokens} tokens a step")
        if best := record.get("best"):
            axis.plot(
                best["max_num_seqs"], best["goodput_per_s"], "k*", markersize=12, label="best"
            )
    limits = ", ".join(f"{k} {v:g} ms" for k, v in record["asked"]["limits_ms"].items())
    axis.set(xscale="log", xlabel="max_num_seqs", ylabel="requests/s", title=f"within {limits}")
    ticks = sorted({seqs for rows in last.values() for seqs in rows})
    axis.set_xticks(ticks, map(str, ticks), minor=False)
    axis.set_xticks([], minor=True)
    axis.set_ylim(0, None)
    return [axis]


def _engines(page: Any, results: Mapping[str, Record]) -> Sequence[Any]:
    """A line for each engine, a point for each batch of equal requests of short context."""
    axis = page.subplots()
    for name, record in results.items():
        tpot = {int(size): ms for size, ms in record["tpot_ms"].items() if ":" not in size}
        points = [(ms, batch * 1e3 / ms) for batch, ms in tpot.items()]
        axis.plot(*zip(*points, strict=True), "o-", markersize=4, label=name)
    axis.set(xlabel="ms a token", ylabel="output tokens/s", xlim=(0, None), ylim=(0, None))
    return [axis]


def _growth(page: Any, results: Mapping[str, Record]) -> Sequence[Any]:
    """Left: TPOT over context with its limit by bytes; right: step and overhead over requests."""
    left, right = page.subplots(1, 2)
    for name, growth in results.items():
        prefix = f"{name}, " if len(results) > 1 else ""
        for batch in dict.fromkeys(row["batch"] for row in growth["context"]):
            rows = [row for row in growth["context"] if row["batch"] == batch]
            contexts, label = [row["context"] for row in rows], f"b={batch}"
            (line,) = left.plot(contexts, [r["tpot_ms"] for r in rows], "o-", label=prefix + label)
            limits = [row["limit_ms"] for row in rows if "limit_ms" in row]
            color = line.get_color()
            if limits:
                left.plot(contexts, limits, "--", color=color, label=f"{prefix}bytes, {label}")
        for figure, label in (
            ("step_us", "step"),
            ("graph_us", "its graph"),
            ("host_us", "CPU in it"),
            ("overhead_us", "step - graph"),
        ):
            points = [(r["requests"], r[figure]) for r in growth["requests"] if figure in r]
            if points:
                columns = zip(*points, strict=True)
                right.plot(*columns, "o-", markersize=3, label=prefix + label)
    left.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="ms a token")
    right.set(xscale="log", xlabel="requests", ylabel="us a step", ylim=(0, None))
    return [left, right]


_DRAW = {
    "latency": _latency,
    "throughput": _throughput,
    "tuning": _tuning,
    "growth": _growth,
    "engines": _engines,
}
