"""``fusewright models``: what becomes of models that the library has and this engine has not.

Exit codes of ``check``: 0 all are equal or refused; 1 one differs, or this program failed; 2 a
mistake.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...config import LEVELS, UserError
from ..console.flags import Verbose
from ..console.options import writable
from ..console.report import titled

if TYPE_CHECKING:
    from ...engine.check_model import ModelCheck

_SENTENCE = (
    "The logits of each model beside those of its own code, which are equal within tolerance: run "
    "eagerly, after the passes rewrote its graph, and by its adapter where it has one. Then which "
    "sites the passes matched, of those that they expect, and which ops no kernel of ours does."
)

app = typer.Typer(
    rich_markup_mode=None, help="Prove models of transformers against their own code."
)


@app.callback(invoke_without_command=True)
def _options(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


@app.command("check")
def check(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FOLDER|TYPE]...", help="Model folders, or types of transformers."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Check each type that has a causal language model.")
    ] = False,
    level: Annotated[
        str, typer.Option("-O", metavar="LEVEL", help="Level whose passes rewrite the graph.")
    ] = "2",
    jobs: Annotated[int, typer.Option("--jobs", help="Processes that check models.")] = 1,
    verbose: Verbose = False,
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all that was found here.")
    ] = None,
) -> None:
    """Compare small twins of models with their own code in transformers, in float32 on the CPU.

    A twin keeps every kind of layer, and has random weights.  A type has its default configuration.
    """
    if bool(models) == every:
        raise UserError("models check: name folders or model types, or give --all")
    if not level.isdigit() or int(level) not in LEVELS:
        raise UserError(f"-O{level}: expected one of 0 to {max(LEVELS)}")
    if jobs < 1:
        raise UserError(f"jobs={jobs}: expected 1 or more")
    writable("json", output)
    from ...engine.check_model import DIFFERS, FAILED, causal_types, check_models, version

    names = causal_types() if every else models or []
    with _progress(len(names)) as advance:
        checks = check_models(names, int(level), jobs, advance)
    if output is not None:
        record = {
            "library": version(),
            "level": int(level),
            "models": [each.to_json() for each in checks],
        }
        output.write_text(json.dumps(record, indent=1) + "\n")
    for line in _lines(checks, verbose):
        typer.echo(line)
    if any(each.outcome in (DIFFERS, FAILED) for each in checks):
        raise typer.Exit(1)


def _lines(checks: list[ModelCheck], verbose: bool) -> Iterator[str]:
    equal = [each for each in checks if each.outcome == "equal"]
    if equal:
        rows = [["model", "eager", "rewritten", "adapter", "sites matched", "left to a compiler"]]
        rows += [
            [
                each.name,
                *(_error(e, verbose) for e in (each.eager_error, each.error, each.adapter_error)),
                ", ".join(f"{kind} {a}/{b}" for kind, (a, b) in each.sites.items()),
                ", ".join(f"{op} {count}" for op, count in each.plain.items()) or "-",
            ]
            for each in equal
        ]
        yield titled(_SENTENCE, rows)
    yield from (f"{each.outcome}: {each.why}" for each in checks if each.outcome != "equal")
    if len(checks) > 1:
        yield f"{len(equal)} of {len(checks)} are equal"


def _error(value: float | None, verbose: bool) -> str:
    if value is None:
        return "-"
    return f"{value:.1e}" if verbose else "equal"


@contextmanager
def _progress(total: int) -> Iterator[Callable[[ModelCheck], None]]:
    """A bar on a terminal, and a line each model elsewhere."""
    if not sys.stderr.isatty():
        done: list[str] = []

        def say(each: ModelCheck) -> None:
            done.append(each.name)
            typer.echo(f"{len(done)}/{total}: {each.name} {each.outcome}", err=True)

        yield say
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.description}"),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda each: bar.update(task, advance=1, description=f"{each.name} {each.outcome}")
