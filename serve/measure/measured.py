"""Shared by the commands that measure: the check of output files before they begin, the record that
they keep afterwards, and the tables that they print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ...config import EngineOptions, UserError
from ...config.numbers import check_number
from ..console.flags import Json
from ..console.options import writable, write_result
from ..console.table import table

if TYPE_CHECKING:
    from ...bench.compare import Change
    from ...bench.serving import Run

_Beside = TypeVar("_Beside")


@dataclass(frozen=True)
class Result:
    """Flags of a command that measures: where its result goes."""

    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Write the result to FILE as JSON."),
    ] = None
    json_output: Json = False

    def say(self, text: str) -> None:
        """Print a text, to stderr if stdout has the result."""
        typer.echo(text, err=self.json_output)

    def check(self, picture: Path | None = None) -> None:
        """Refuse what could not be kept, before anything is measured."""
        writable("output", self.output)
        check_picture(picture)

    def refuse(self, flag: str) -> None:
        """Refuse ``--output`` and ``--json`` beside a flag with which nothing is measured.

        Raises:
            UserError: one of them is given.
        """
        if self.output is not None or self.json_output:
            option = "--json" if self.json_output else "--output"
            raise UserError(f"{option}: {flag} measures nothing, so there is no result; drop one")

    def keep(self, options: dict[str, Any], picture: Path | None = None, **results: Any) -> None:
        """Write or print what was measured, with the machine and the options, and draw it."""
        from ...bench.environment import environment

        record = {"environment": environment(), "options": options, **results}
        write_result(self.output, record, json_output=self.json_output)
        if picture is not None:
            from ...bench.plots import plot

            plot({str(options.get("model", EngineOptions().model)): record}, picture)


def check_picture(picture: Path | None) -> None:
    """Refuse a picture that could not be drawn, before anything is measured."""
    writable("plot", picture)
    if picture is not None:
        from ...bench.charts import check_drawing

        check_drawing()


def fastest(
    tries: Sequence[tuple[Run, _Beside]], limits: dict[str, float]
) -> tuple[dict[str, Any], _Beside]:
    """The row of the fastest run, with the share by which the slowest took longer; and what was
    noted beside that run."""
    run, beside = min(tries, key=lambda each: each[0].seconds)
    spread = round(max(each.seconds for each, _ in tries) / run.seconds - 1, 4)
    return {**run.to_json(limits), "n": len(tries), "spread": spread}, beside


def rows_table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a table with a column for each of their keys."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return table([keys, *([str(row.get(key, "")) for key in keys] for row in rows)])


def times_table(row: dict[str, Any]) -> str:
    rows = [["ms", "mean", "p50", "p90", "p99"]]
    for name in ("ttft", "tpot", "itl", "e2e"):
        rows.append([name, *(f"{value:.2f}" for value in row[f"{name}_ms"].values())])
    return table(rows)


@dataclass(frozen=True)
class Comparison:
    """Flags of a command that can compare two of its results in place of measuring.

    Raises:
        UserError: the threshold is no number above 0.
    """

    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="List what is slower in NEW than in OLD; nothing else."),
    ] = None
    threshold: Annotated[float, typer.Option(help="Slower by this share is a regression.")] = 0.05

    def __post_init__(self) -> None:
        check_number(threshold=self.threshold)

    def end_if_asked(self, result: Result) -> None:
        """List what changed and end the command, if two results are to be compared."""
        if self.compare is not None:
            from ...bench.compare import compare

            result.refuse("--compare")
            raise self.exit(compare(*self.compare))

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
