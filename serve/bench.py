"""``fusewright bench``: what the stack takes, measured; one command a question."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import UserError
from .flags import engine_flags
from .help import GroupedHelp
from .options import merge
from .table import table

app = typer.Typer(rich_markup_mode=None, help="Measure what the stack takes.")


@app.callback()
def _group() -> None:
    """Keeps the sub-command's name although there is one."""


@app.command("startup", cls=GroupedHelp)
@engine_flags
def startup(
    engine: dict[str, Any],
    model_argument: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Same as --model.")
    ] = None,
    iterations: Annotated[int, typer.Option(help="Cold starts, and warm starts.")] = 3,
    output: Annotated[
        Path | None, typer.Option("--output", help="Write the result to this JSON file.")
    ] = None,
) -> None:
    """Seconds from process start to first token, cold and warm, by phase."""
    options = merge(engine, model=model_argument)
    if iterations < 1:
        raise UserError(f"iterations={iterations}: expected at least 1")
    if output is not None and not os.access(output.parent, os.W_OK):
        raise UserError(f"output={output}: cannot be written; give a file in another folder")
    from ..bench.environment import environment
    from ..bench.startup import measure_startup

    def say(kind: str, run: dict[str, Any]) -> None:
        typer.echo(f"{kind}: first token after {run['seconds']['first token']:.2f} s", err=True)

    result = measure_startup(options, iterations, say)
    names = dict.fromkeys(name for kind in ("cold", "warm") for name in result[kind]["mean_s"])
    rows = [["seconds", "cold", "spread", "warm", "spread"]]
    for name in names:
        cells = [
            f"{result[kind][what].get(name, 0.0):.2f}"
            for kind in ("cold", "warm")
            for what in ("mean_s", "spread_s")
        ]
        rows.append([name, *cells])
    typer.echo(table(rows))
    if output is not None:
        record = {"environment": environment(), "options": options, **result}
        output.write_text(json.dumps(record, indent=1) + "\n")
