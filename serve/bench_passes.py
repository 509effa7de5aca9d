"""``fusewright bench passes``: the table of what each pass gains, and its gates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..bench.result_file import read_result
from ..config import OPT_IN, UserError, gates
from .flags import engine_flags
from .options import merge, writable
from .table import table


@engine_flags
def passes(
    engine: dict[str, Any],
    model_argument: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Same as --model.")
    ] = None,
    names: Annotated[
        list[str] | None, typer.Option("--pass", help="Only this pass; repeatable.")
    ] = None,
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Sequences of a decode step; 1, 64, 256 if unset.")
    ] = None,
    prefill: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 2048,
    output: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    update_gates: Annotated[
        bool, typer.Option("--update-gates", help="Put the figures into config/gates.json.")
    ] = False,
    read: Annotated[
        Path | None,
        typer.Option(
            help="Measure nothing: take the figures that --json wrote, elsewhere perhaps."
        ),
    ] = None,
) -> None:
    """What each pass gains in the whole model: a step with it against one without."""
    options = merge(engine, model=model_argument)
    if read is not None:
        measured = written(read)
        typer.echo(passes_table(measured))
        if update_gates:
            gates.update(measured)
        return
    for name, values in (("batch_size", batch_size or [1]), ("prefill", [prefill])):
        if min(values) < 1:
            raise UserError(f"{name}={min(values)}: expected at least 1")
    writable("json", output)
    from ..bench.environment import environment
    from ..bench.passes import BATCHES, Steps, measure_passes

    steps = Steps(batches=tuple(batch_size or BATCHES), prefill=prefill)
    found = measure_passes(options, names or (), steps=steps, say=typer.echo)
    measured = found["rows"]
    if measured:
        typer.echo(passes_table(measured))
    if output is not None:
        record = {
            "environment": environment(),
            "options": options,
            "rows": [{**asdict(m), "ratios": m.ratios} for m in measured],
            "configurations": [asdict(c) for c in found["configurations"]],
        }
        output.write_text(json.dumps(record, indent=1) + "\n")
    if update_gates:
        gates.update(measured)


def written(path: Path) -> list[gates.Measured]:
    """The rows of a result.

    Raises:
        UserError: the file cannot be read, or is another.
    """

    def rows(record: dict[str, Any]) -> list[gates.Measured]:
        if not record["rows"]:
            raise ValueError("no rows")
        for row in record["rows"]:
            del row["ratios"]
        return [gates.Measured(**{**row, "source": path.name}) for row in record["rows"]]

    return read_result(path, "passes", rows)


def passes_table(measured: Sequence[gates.Measured]) -> str:
    """A line a pass: ms with it and without, the difference and its noise."""
    rows = [["pass", *(f"{work}: on, off ms" for work in measured[0].on_ms), "at its gate"]]
    for m in measured:
        cells = [
            f"{m.on_ms[w]:.3f}, {m.off_ms[w]:.3f} ({r - 1:+.2%} ± {m.noise[w]:.2%})"
            for w, r in m.ratios.items()
        ]
        off = gates.verdict(m, opt_in=m.name in OPT_IN)
        rows.append([m.name, *cells, "off" if off else "on"])
    return table(rows)
