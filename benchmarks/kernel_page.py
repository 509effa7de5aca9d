"""The page of the kernel benchmarks: tables of our fastest against the fastest library, a plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..bench.charts import Line, Panel, Picture
from ..bench.kernels.figures import BF16_TFLOP_S, COPY_TB_S, Figure, load
from ..config import UserError


def load_all(paths: Iterable[Path]) -> tuple[dict[str, Any], list[Figure]]:
    """Load results for different ops as one; their commits and commands are joined.

    Raises:
        UserError: as ``load``; or they are of different machines or versions.
    """
    environments, joined = [], list[Figure]()
    for path in paths:
        environment, figures = load(path)
        environments.append(environment)
        joined += figures
    for name in ("device", "torch", "triton"):
        if len(values := {environment[name] for environment in environments}) > 1:
            raise UserError(f"results of different {name}: {', '.join(sorted(values))}")
    runs = [f"commit {e['commit']}: `{e['command']}`" for e in environments]
    return {**environments[0], "runs": "; ".join(runs)}, joined


def by_work(figures: Iterable[Figure]) -> dict[tuple[str, str], list[Figure]]:
    works: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures:
        works.setdefault((figure.op, figure.label), []).append(figure)
    return works


def best(figures: Sequence[Figure], *, library: bool) -> Figure | None:
    return min((f for f in figures if f.library is library), key=lambda f: f.us, default=None)


_LIMIT = "least time by bytes or FLOPs, µs"
_HEAD = """\
# Kernels, measured

{device}, torch {torch}, Triton {triton}; {runs}.
Median microseconds of a call inside a CUDA graph; inputs rotated past L2, but those of few tokens
stay in it, as in a model. The ceiling is {copy} TB/s (copy) or {bf16} TFLOP/s (bf16; twice that for
FP8), whichever the work meets first; bytes and FLOPs are the ops' own. Ratio: our time over the
library's, below 1 is faster.

![share of the ceiling]({plot})"""


def markdown(environment: Mapping[str, Any], figures: Sequence[Figure], plot: str) -> str:
    """A page: one table an op, our fastest against the fastest library."""
    about = {key: environment[key] for key in ("device", "torch", "triton", "runs")}
    head = _HEAD.format(**about, copy=COPY_TB_S, bf16=round(BF16_TFLOP_S), plot=plot)
    lines = [head]
    works = by_work(figures)
    for op in dict.fromkeys(op for op, _ in works):
        lines += ["", f"## {op}", ""]
        lines.append("| work | ours | us | GB/s | TFLOP/s | of ceiling | library | us | ratio |")
        lines.append("|---|---|---|---|---|---|---|---|---|")
        lines += [_row(label, group) for (name, label), group in works.items() if name == op]
    return "\n".join(lines) + "\n"


def summary(figures: Sequence[Figure]) -> list[list[str]]:
    """A heading, and a row an op: the least and the largest share of the ceiling that our fastest
    kernel reaches, and its time over the fastest library's."""
    works = by_work(figures)
    heads = ["op", "works", "least of ceiling", "most of ceiling", "against a library", "ahead"]
    rows = [[*heads, "mean ratio", "worst ratio"]]
    for op in dict.fromkeys(op for op, _ in works):
        groups = [group for (name, _), group in works.items() if name == op]
        ours = [figure for group in groups if (figure := best(group, library=False))]
        pairs = [(best(g, library=False), best(g, library=True)) for g in groups]
        ratios = {a.label: a.us / b.us for a, b in pairs if a and b}
        least, most = (pick(ours, key=lambda f: f.share) for pick in (min, max))
        cells = [f"{f.share:.0%} ({f.label})" for f in (least, most)]
        row = [op, str(len(ours)), *cells, str(len(ratios) or "-"), *["-"] * 3]
        if ratios:
            worst = max(ratios, key=lambda label: ratios[label])
            mean = statistics.geometric_mean(ratios.values())
            ahead = sum(ratio < 1 for ratio in ratios.values())
            row[5:] = [str(ahead), f"{mean:.2f}", f"{ratios[worst]:.2f} ({worst})"]
        rows.append(row)
    return rows


def _row(label: str, group: Sequence[Figure]) -> str:
    ours, library = best(group, library=False), best(group, library=True)
    cells = [label, *["-"] * 8]
    if ours:
        rates = [f"{ours.us:.2f}", f"{ours.gb_s:.0f}", f"{ours.tflop_s:.0f}", f"{ours.share:.0%}"]
        cells[1:6] = [ours.contender, *rates]
    if library:
        cells[6:8] = [library.contender, f"{library.us:.2f}"]
    if ours and library:
        cells[8] = f"{ours.us / library.us:.2f}"
    return f"| {' | '.join(cells)} |"


def picture(figures: Sequence[Figure]) -> Picture:
    """Share of the ceiling over the least time that the work's bytes or FLOPs take, one panel an
    op: our fastest and the fastest library."""
    works = by_work(figures)
    panels = []
    for name in dict.fromkeys(op for op, _ in works):
        groups = [group for (op, _), group in works.items() if op == name]
        lines = [
            Line(label, points, marker=mark, joined=False)
            for library, label, mark in ((False, "fusewright", "o"), (True, "fastest library", "x"))
            if (points := list(_points(groups, library=library)))
        ]
        panels.append(Panel(name, _LIMIT, "share of the ceiling, %", lines, log="x", y_most=105))
    return Picture("Kernels: how near each comes to the GPU's ceiling", panels, columns=3)


def _points(groups: Iterable[Sequence[Figure]], *, library: bool) -> Iterator[tuple[float, float]]:
    for group in groups:
        if figure := best(group, library=library):
            yield figure.us * figure.share, 100 * figure.share
