"""``fusewright explain``: what the stack would do, and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...config import LEVELS, PASSES, Level, UserError
from ...config.numbers import check_counts
from ..console.flags import Json, TargetSm, Verbose, model_flags
from ..console.options import checked, writable
from ..console.table import table
from .explain_text import difference_text, explanation

if TYPE_CHECKING:
    from ...compiler.inspect.explain import Explanation


@dataclass(frozen=True)
class Explained:
    """Flags of what is explained: a program, and the decode step whose launches are counted.

    Raises:
        UserError: a count is below 1.
    """

    target_sm: TargetSm = None
    stage: Annotated[
        int, typer.Option("--stage", help="Pipeline stage whose program is explained.")
    ] = 0
    batch: Annotated[int, typer.Option("--batch", help="Sequences of the decode step.")] = 1
    context: Annotated[int, typer.Option("--context", help="KV positions of each.")] = 128

    def __post_init__(self) -> None:
        check_counts(1, batch=self.batch, context=self.context)


@dataclass(frozen=True)
class Shown:
    """Flags of how the explanation is shown."""

    graphs: Annotated[
        bool, typer.Option("--graphs", help="Print the graph of a layer, before and after.")
    ] = False
    html: Annotated[Path | None, typer.Option(help="Write all of it to this HTML file.")] = None
    verbose: Verbose = False


@model_flags
def explain(
    engine: dict[str, Any],
    *,
    levels: Annotated[bool, typer.Option("--levels", help="Print the -O table.")] = False,
    of: Explained,
    require_all: Annotated[
        bool,
        typer.Option(
            "--require-all-fusions",
            help="Exit with code 2 when a pass missed a site, or none has one.",
        ),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="LEVEL", help="How another level, such as -O3, differs."),
    ] = None,
    shown: Shown,
    json_output: Json = False,
) -> None:
    """Explain what a model's compilation does, and what the levels turn on."""
    if levels:
        every_level = {f"-O{number}": asdict(level) for number, level in LEVELS.items()}
        typer.echo(json.dumps(every_level) if json_output else levels_table())
        return
    writable("html", shown.html)
    every = [checked(asked) for asked in (engine, *_other(engine, against))]
    from ...compiler.inspect.diff import differences
    from ...engine.explain import explain_model
    from .explain_html import page

    told = [
        explain_model(
            asked, target_sm=of.target_sm, num_seqs=of.batch, context=of.context, stage=of.stage
        )
        for asked in every
    ]
    label, facts = told[0]
    difference = differences(*map(_by_level, told)) if len(told) > 1 else None
    if shown.html is not None:
        _write(shown.html, page(label, facts, difference))
    if json_output:
        record = {"label": label, **facts.to_json()}
        typer.echo(json.dumps(record | ({"against": asdict(difference)} if difference else {})))
    elif difference is not None:
        typer.echo(difference_text(difference))
    else:
        typer.echo(explanation(label, facts, graphs=shown.graphs, verbose=shown.verbose))
    missed = [
        f"{entry['name']}: {miss['site']} ({miss['reason']})"
        for entry in facts.passes
        for miss in entry["missed"]
    ]
    if require_all and missed:
        raise UserError(f"require_all_fusions: {len(missed)} missed: {'; '.join(missed)}")
    if require_all:
        from ...passes import PassReport, check_any_expected

        check_any_expected(map(PassReport.from_json, facts.passes), label)


def _other(options: dict[str, Any], against: str | None) -> list[dict[str, Any]]:
    """A list with the options of the level to compare with, or an empty one."""
    if against is None:
        return []
    level = against.removeprefix("-").removeprefix("O")
    if not level.isdigit() or int(level) not in LEVELS:
        raise UserError(f"against={against}: expected a level, such as -O3")
    return [{**options, "optimization_level": int(level)}]


def _by_level(told: tuple[str, Explanation]) -> tuple[str, Explanation]:
    """An explanation named by its level alone: the rest is the same."""
    label, facts = told
    return next(part for part in label.split(", ") if part.startswith("-O")), facts


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"html={path}: {error.strerror}; give a file that can be written") from None
    typer.echo(f"wrote {path}", err=True)


def levels_table() -> str:
    """What each level is, and the ``-O`` table: a column a level, a line a switch or pass."""
    summaries = [[f"-O{number}", level.summary] for number, level in LEVELS.items()]
    rows = [["", *(f"-O{number}" for number in LEVELS)]]
    switches: dict[str, Callable[[Level], str]] = {
        "CUDA graphs": lambda level: level.cudagraph_mode.value,
        "trace": lambda level: _yes(level.trace),
        "hand kernels": lambda level: _yes(level.hand_kernels),
        "tuned": lambda level: _yes(level.tune),
    }
    for name, value in switches.items():
        rows.append([name, *map(value, LEVELS.values())])
    for name in PASSES:
        rows.append([name, *(_yes(name in level.passes) for level in LEVELS.values())])
    parts = [
        "The levels, from the least to the most that is done ahead of time:",
        table(summaries, heading=False),
    ]
    return "\n\n".join(
        [*parts, "What each level turns on, and the passes that it runs:", table(rows)]
    )


def _yes(on: bool) -> str:
    return "yes" if on else "-"
