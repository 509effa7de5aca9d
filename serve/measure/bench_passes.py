"""``fusewright bench passes``: the table of what each pass gains, and its gates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ...bench.result_file import read_result
from ...config import UserError, gates
from ...config.numbers import MOST_REQUESTS, check_counts
from ..console.flags import model_flags
from ..console.options import check_to_measure
from ..console.table import table
from .measured import Result


@model_flags
def passes(
    engine: dict[str, Any],
    names: Annotated[
        list[str] | None, typer.Option("--pass", help="Only this pass; repeatable.")
    ] = None,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(help="Sequences of a decode step; if unset 1, 64, 256, on a CPU 1, 8."),
    ] = None,
    input_len: Annotated[
        int | None, typer.Option(help="Tokens of the prompt; 2048 if unset and they fit.")
    ] = None,
    *,
    result: Result,
    update_gates: Annotated[
        bool, typer.Option("--update-gates", help="Put the figures into config/gates.json.")
    ] = False,
    read: Annotated[
        Path | None,
        typer.Option(
            help="Measure nothing: take the figures that --output wrote, elsewhere perhaps."
        ),
    ] = None,
) -> None:
    """What each pass gains in the whole model: a step with it against one without."""
    check_to_measure(engine)
    if read is not None:
        result.refuse("--read")
        measured = written(read)
        typer.echo(passes_table(measured))
        if update_gates:
            gates.update(measured)
        return
    for value in batch_size or ():
        check_counts(1, MOST_REQUESTS, batch_size=value)
    if input_len is not None:
        check_counts(1, input_len=input_len)
    result.check()
    from ...bench.passes import BATCHES, CPU_BATCHES, Steps, fitting_prefill, measure_passes
    from ...engine.worker.hardware import detect_hardware

    on_cpu = detect_hardware(engine.get("device", "auto")).device == "cpu"
    if update_gates and on_cpu:
        raise UserError(
            "--update-gates: figures of a CPU decide nothing; drop it, or measure a GPU"
        )

    if input_len is None:
        input_len = fitting_prefill(engine)
        if input_len < Steps.prefill:
            result.say(f"a prompt of {input_len} tokens: more do not fit")
    batches = tuple(batch_size or (CPU_BATCHES if on_cpu else BATCHES))
    steps = Steps(batches=batches, prefill=input_len)
    passes_measured = measure_passes(engine, names or (), steps=steps, say=result.say)
    measured = passes_measured["rows"]
    if measured:
        result.say(passes_table(measured))
    rows = [{**asdict(m), "ratios": m.ratios} for m in measured]
    configurations = [asdict(c) for c in passes_measured["configurations"]]
    result.keep(engine, rows=rows, configurations=configurations)
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

    return read_result(path, "bench passes", rows)


def passes_table(measured: Sequence[gates.Measured]) -> str:
    """A line a pass: ms with it and without, the difference, its noise, and on a GPU what its gate
    makes of them: on a CPU other work disturbs each round by more than a pass gains."""
    rows = [["pass", *(f"{work}: on, off ms" for work in measured[0].on_ms), "at its gate"]]
    for m in measured:
        cells = [
            f"{m.on_ms[w]:.3f}, {m.off_ms[w]:.3f} ({r - 1:+.2%} ± {m.noise[w]:.2%})"
            for w, r in m.ratios.items()
        ]
        verdict = "off" if gates.verdict(m) else "on"
        rows.append([m.name, *cells, verdict if m.sm else "no verdict: a CPU"])
    return table(rows)
