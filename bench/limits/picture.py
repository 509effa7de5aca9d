"""Draws what bounds each step of a model, from results of ``bench limits``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..charts import Line, Panel

Record = dict[str, Any]

_BOUNDS = {"bytes_ms": "all bytes", "arithmetic_ms": "all arithmetic", "limit_ms": "limit"}
_LEAST_SHARE = 0.02
"""Families below this share of the limit of every step are not drawn."""


def panels(results: Mapping[str, Record]) -> tuple[str, list[Panel]]:
    """For each GPU of each result: what bounds its decode steps and its prefill steps, and dashed
    the largest parts of the limit."""
    drawn = []
    for name, record in results.items():
        for gpu in record["limits"]:
            about = f"{name}, {gpu['gpu']}" if len(results) > 1 else gpu["gpu"]
            for kind, counted in (("decode", "requests"), ("prefill", "tokens")):
                steps = [s for s in gpu["steps"] if (s["query_len"] == 1) == (kind == "decode")]
                if steps:
                    drawn.append(_panel(f"{about}: {kind} steps", counted, steps))
    return "Limits of a step by bytes and by arithmetic", drawn


def _panel(title: str, counted: str, steps: Sequence[Record]) -> Panel:
    def line(label: str, values: Iterable[float | None], style: str = "") -> Line:
        counts = (step["num_tokens"] for step in steps)
        points = [(n, ms) for n, ms in zip(counts, values, strict=True) if ms is not None]
        return Line(label, points, style, marker="" if style else "o")

    lines = [line("measured", (step.get("measured_ms") for step in steps))]
    lines += [line(label, (step[key] for step in steps)) for key, label in _BOUNDS.items()]
    for name in steps[0]["families"]:
        parts = [step["families"][name]["ms"] for step in steps]
        limits = [step["limit_ms"] for step in steps]
        if any(ms > _LEAST_SHARE * limit for ms, limit in zip(parts, limits, strict=True)):
            lines.append(line(name, parts, "part of the limit"))
    x, y = f"size of a step, {counted}", "time of a step, ms"
    return Panel(title, x, y, [each for each in lines if each.points], log="x")
