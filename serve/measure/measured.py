"""Shared by the commands that measure: the check of output files before they begin, the record that
they keep afterwards, and the tables that they print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ...config import EngineOptions
from ...config.numbers import check_number
from ..console.options import writable, write_result
from ..console.table import table

if TYPE_CHECKING:
    from ...bench.compare import Change
    from ...bench.serving import Run

_Beside = TypeVar("_Beside")


def check_outputs(output: Path | None, picture: Path | None = None) -> None:
    """Refuse what could not be kept, before anything is measured."""
    writable("output", output)
    writable("plot", picture)
    if picture is not None:
        from ...bench.plots import check_drawing

        check_drawing()


def keep(
    output: Path | None,
    json_output: bool,
    options: dict[str, Any],
    picture: Path | None = None,
    **found: Any,
) -> None:
    """Write or print what was found, with the machine and the options, and draw it."""
    from ...bench.environment import environment

    record = {"environment": environment(), "options": options, **found}
    write_result(output, record, json_output=json_output)
    if picture is not None:
        from ...bench.plots import plot

        plot({str(options.get("model", EngineOptions().model)): record}, picture)


def fastest(
    tries: Sequence[tuple[Run, _Beside]], limits: dict[str, float]
) -> tuple[dict[str, Any], _Beside]:
    """The row of the fastest run, with the share by which the slowest took longer; and what was
    noted beside that run."""
    run, beside = min(tries, key=lambda each: each[0].seconds)
    spread = round(max(each.seconds for each, _ in tries) / run.seconds - 1, 4)
    return {**run.to_json(limits), "n": len(tries), "spread": spread}, beside


def show_rows(rows: Sequence[dict[str, Any]], *, err: bool, end: str = "") -> None:
    """Print rows as a table with a column for each of their keys."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[str(row.get(key, "")) for key in keys] for row in rows]
    typer.echo(table([keys, *cells]) + end, err=err)


def show_times(row: dict[str, Any], *, err: bool) -> None:
    """Print the means and percentiles of a run."""
    rows = [["ms", "mean", "p50", "p90", "p99"]]
    for name in ("ttft", "tpot", "itl", "e2e"):
        rows.append([name, *(f"{value:.2f}" for value in row[f"{name}_ms"].values())])
    typer.echo(table(rows), err=err)


@dataclass(frozen=True)
class Comparison:
    """Flags of a command that can compare two of its results in place of measuring.

    Raises:
        UserError: the threshold is no number above 0.
    """

    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Measure nothing: list what is slower in NEW than in OLD."),
    ] = None
    threshold: Annotated[float, typer.Option(help="Slower by this share is a regression.")] = 0.05

    def __post_init__(self) -> None:
        check_number(threshold=self.threshold)

    def exit(self, changes: Sequence[Change]) -> typer.Exit:
        """Print what changed by more than the threshold; what is returned ends the command."""
        slower = [change for change in changes if change.slower > 1 + self.threshold]
        faster = [change for change in changes if change.slower < 1 / (1 + self.threshold)]
        for word, some in (("slower", slower), ("faster", faster[::-1])):
            if some:
                rows = [[word, "figure", "old", "new", "ratio"]]
                for c in some:
                    rows.append(
                        [c.work, c.figure, f"{c.old:.3f}", f"{c.new:.3f}", f"{c.slower:.2f}"]
                    )
                typer.echo(table(rows) + "\n")
        typer.echo(
            f"{len(changes)} in both: {len(slower)} slower, {len(faster)} faster by more than "
            f"{self.threshold:.0%}"
        )
        return typer.Exit(int(bool(slower)))
