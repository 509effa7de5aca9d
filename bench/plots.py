"""Describes as pictures what ``fusewright bench latency``, ``throughput``, ``serve``, ``growth``,
``fusewright tune serve`` and ``benchmarks.peers`` keep as JSON. ``charts.py`` draws them: the
machine that measures needs nothing that draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import Any

from ..config import UserError
from .charts import Cells, Line, Panel, Picture, number, save
from .limits.picture import panels as limit_panels
from .result_file import read_result

Record = dict[str, Any]
_MOST_DISTRIBUTIONS = 3
"""Rates of a server whose distributions are drawn: the lowest, the middle and the highest."""


def load(path: Path) -> Record:
    """A result as it was written.

    Raises:
        UserError: it cannot be read, or is no result of these benches.
    """

    def checked(record: Record) -> Record:
        _kind(record)
        return record

    return read_result(path, "bench latency`, `throughput`, `serve`, `growth` or `limits", checked)


def _kind(record: Record) -> str:
    if "context" in record and "requests" in record:
        return "growth"
    if "limits" in record:
        return "limits"
    if isinstance(record.get("tpot_ms"), dict):
        return "engines"
    row = record["rows"][0]
    if "max_num_seqs" in row:
        return "tuning"
    return "throughput" if "workload" in row else "latency" if row["batch"] else ""


def plot(results: Mapping[str, Record], path: Path) -> None:
    """Draw named results of one bench to ``path``, as PNG.

    Raises:
        UserError: as ``picture``; or nothing can draw here.
    """
    save(picture(results), path)


def picture(results: Mapping[str, Record]) -> Picture:
    """Named results of one bench: TPOT over batch size, throughput over latency beside the
    distribution of TTFT, a map of goodput over a server's limits, or what grows.

    Raises:
        UserError: they are of several benches.
    """
    kinds = sorted({_kind(record) for record in results.values()})
    if len(kinds) != 1:
        raise UserError(f"plot: results of {' and '.join(kinds)} do not share a picture")
    title, panels = _PANELS[kinds[0]](results)
    about = [_common(results, _model)]
    if kinds != ["limits"]:  # which say their GPUs, and need none
        about.append(_common(results, _device))
    facts = ", ".join(part for part in about if part)
    return Picture(f"{title}\n{facts}" if facts else title, panels, columns=2)


def _common(results: Mapping[str, Record], fact: Callable[[Record], str]) -> str:
    """A fact that is the same of all results, or ""."""
    facts = {fact(record) for record in results.values()}
    return facts.pop() if len(facts) == 1 else ""


def _model(record: Record) -> str:
    options = record.get("options") or record.get("asked", {}).get("options") or record
    return Path(str(options.get("model", ""))).name


def _device(record: Record) -> str:
    return str(record.get("environment", {}).get("device", ""))


def _latency(results: Mapping[str, Record]) -> tuple[str, list[Panel]]:
    lines = [
        Line(name, sorted((row["batch"], row["tpot_ms"]) for row in record["rows"]))
        for name, record in results.items()
    ]
    panel = Panel("", "batch size, requests", "time per output token, ms", lines, log="x")
    return "Time per output token by batch size", [panel]


def _throughput(results: Mapping[str, Record]) -> tuple[str, list[Panel]]:
    """Left a line for each workload of each server, a point for each rate; right how many of its
    requests had their first token after a time."""

    def label(name: str, row: Record) -> str:
        source = row.get("server", name)
        several = len(results) > 1 and source != name
        return ", ".join((*([name] if several else []), source, row["workload"]))

    speeds, waits = [], []
    for name, record in results.items():
        ordered = sorted(record["rows"], key=lambda row: row["request_rate"] or inf)
        for line in dict.fromkeys(label(name, row) for row in record["rows"]):
            rows = [row for row in ordered if label(name, row) == line]
            points = [(row["tpot_ms"]["mean"], row["output_tokens_per_s"]) for row in rows]
            speeds.append(Line(line, points, names=[_rate(row) for row in rows]))
            waits += [Line(line, _shares(row), _rate(row), marker="") for row in _spread(rows)]
    return "Throughput and time to first token", [
        Panel(
            "Throughput over latency, a point for each rate of requests",
            "mean time per output token, ms",
            "throughput, output tokens/s",
            speeds,
        ),
        Panel(
            "Distribution of the time to first token, a line for each rate",
            "time to first token, ms",
            "requests that have it by then, %",
            [line for line in waits if line.points],
            log="x",
            y_most=100,
        ),
    ]


def _rate(row: Record) -> str:
    rate = row["request_rate"]
    return "all at once" if rate is None else f"{number(rate)}/s"


def _spread(rows: list[Record]) -> list[Record]:
    if len(rows) <= _MOST_DISTRIBUTIONS:
        return rows
    return [rows[0], rows[len(rows) // 2], rows[-1]]


def _shares(row: Record) -> list[tuple[float, float]]:
    """(ms, share of requests in percent): as many as the result has kept."""
    kept = row.get("ttft_quantiles_ms")
    if kept:
        return [(max(ms, 1e-3), 100 * i / (len(kept) - 1)) for i, ms in enumerate(kept)]
    known = row.get("ttft_ms", {}).items()
    return [(max(ms, 1e-3), float(name[1:])) for name, ms in known if name.startswith("p")]


def _tuning(results: Mapping[str, Record]) -> tuple[str, list[Panel]]:
    """A map for each result: the goodput of each point's longest run."""
    panels = []
    for name, record in results.items():
        values: dict[tuple[str, str], float | str] = {}
        for row in sorted(record["rows"], key=lambda row: row["asked"]):
            if row["gpu_memory_utilization"] is None:
                place = (str(row["max_num_batched_tokens"]), str(row["max_num_seqs"]))
                values[place] = "failed" if "failed" in row else row["goodput_per_s"]
        rows, columns = (sorted({place[i] for place in values}, key=int) for i in (0, 1))
        best = record.get("best")
        cells = Cells(
            columns,
            rows,
            values,
            "goodput, requests/s",
            best and (str(best["max_num_batched_tokens"]), str(best["max_num_seqs"])),
        )
        limits = ", ".join(f"{k} {v:g} ms" for k, v in record["asked"]["limits_ms"].items())
        title = f"{name}: within {limits}" if len(results) > 1 else f"within {limits}"
        panels.append(
            Panel(
                title,
                "max_num_seqs, requests",
                "max_num_batched_tokens, tokens a step",
                cells=cells,
            )
        )
    return "Goodput by the scheduler's limits", panels


def _engines(results: Mapping[str, Record]) -> tuple[str, list[Panel]]:
    """A line for each engine, a point for each batch of equal requests of short context."""
    lines = []
    for name, record in results.items():
        tpot = {int(size): ms for size, ms in record["tpot_ms"].items() if ":" not in size}
        points = [(ms, batch * 1e3 / ms) for batch, ms in sorted(tpot.items())]
        lines.append(Line(name, points, names=[str(batch) for batch in sorted(tpot)]))
    panel = Panel(
        "a point for each batch of so many equal requests",
        "time per output token, ms",
        "throughput, output tokens/s",
        lines,
    )
    return "Throughput over latency", [panel]


_OF_STEP = {
    "step_us": "step",
    "graph_us": "its CUDA graph",
    "host_us": "CPU time in it",
    "overhead_us": "step less its graph",
}


def _growth(results: Mapping[str, Record]) -> tuple[str, list[Panel]]:
    """Left TPOT over context with its limit by bytes; right a step and its parts over requests."""
    left, right = [], []
    for name, growth in results.items():
        prefix = f"{name}, " if len(results) > 1 else ""
        for batch in dict.fromkeys(row["batch"] for row in growth["context"]):
            rows = [row for row in growth["context"] if row["batch"] == batch]
            label = f"{prefix}{batch} request{'s' * (batch > 1)}"
            left.append(Line(label, [(r["context"], r["tpot_ms"]) for r in rows]))
            limits = [(r["context"], r["limit_ms"]) for r in rows if "limit_ms" in r]
            if limits:
                left.append(Line(label, limits, "limit by bytes", marker=""))
        for figure, label in _OF_STEP.items():
            points = [(r["requests"], r[figure]) for r in growth["requests"] if figure in r]
            if points:
                right.append(Line(prefix + label, points))
    time, step = "time per output token, ms", "time, µs a step"
    panels = [
        Panel("By context", "context of each request, tokens", time, left, log="xy"),
        Panel("By requests", "batch size, requests", step, right, log="x"),
    ]
    return "Decode steps as context and requests grow", [p for p in panels if p.lines]


_PANELS: dict[str, Callable[[Mapping[str, Record]], tuple[str, list[Panel]]]] = {
    "latency": _latency,
    "throughput": _throughput,
    "tuning": _tuning,
    "growth": _growth,
    "engines": _engines,
    "limits": limit_panels,
}
