"""``fusewright bench``: what the stack takes, measured; one command a question."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from ...config.numbers import check_counts
from ..console.flags import model_flags, takes_fields
from ..console.help import GroupedHelp
from ..console.options import check_to_measure, writable
from ..console.table import table
from .bench_engine import growth, latency, prefix, throughput
from .bench_limits import limits
from .bench_passes import passes
from .bench_serve import serve
from .measured import Comparison, Result

app = typer.Typer(rich_markup_mode=None, help="Measure what the stack takes.")


for _command in (latency, throughput, serve, growth, prefix, passes, limits):
    app.command(_command.__name__, cls=GroupedHelp)(_command)


@app.command("startup", cls=GroupedHelp)
@model_flags
def startup(
    engine: dict[str, Any],
    iterations: Annotated[int, typer.Option(help="Cold starts, and warm starts.")] = 3,
    *,
    result: Result,
) -> None:
    """Seconds from process start to first token, cold and warm, by phase."""
    check_to_measure(engine)
    check_counts(1, 1000, iterations=iterations)
    result.check()
    from ...bench.startup import measure_startup

    def say(kind: str, run: dict[str, Any]) -> None:
        typer.echo(f"{kind}: first token after {run['seconds']['first token']:.2f} s", err=True)

    starts = measure_startup(engine, iterations, say)
    names = dict.fromkeys(name for kind in ("cold", "warm") for name in starts[kind]["mean_s"])
    rows = [["seconds", "cold", "spread", "warm", "spread"]]
    for name in names:
        cells = [
            f"{starts[kind][what].get(name, 0.0):.2f}"
            for kind in ("cold", "warm")
            for what in ("mean_s", "spread_s")
        ]
        rows.append([name, *cells])
    result.say(table(rows))
    result.keep(engine, **starts)


@app.command("plot")
def plot(
    picture: Annotated[Path, typer.Argument(help="PNG to write.")],
    results: Annotated[list[Path], typer.Argument(help="Results of one bench, a line each.")],
) -> None:
    """Draw results of latency, throughput, serve, growth, limits or tune serve."""
    writable("picture", picture)
    from ...bench import plots

    plots.plot({path.stem: plots.load(path) for path in results}, picture)


@app.command("kernels")
@takes_fields
def kernels(
    select: Annotated[
        str | None, typer.Option("-k", help="Only benchmarks that match, as for pytest -k.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="Write each figure to this file, a line each.")
    ] = None,
    *,
    comparison: Comparison,
) -> None:
    """Time every kernel on real shapes, beside the best library; exit 1 on a regression."""
    if comparison.compare is not None:
        from ...bench.kernels.figures import compare

        Result(output).refuse("--compare")
        raise comparison.exit(compare(*comparison.compare))
    from ...bench.kernels.run import run_benchmarks

    writable("output", output)
    with TemporaryDirectory() as folder:
        _, figures = run_benchmarks(select, output or Path(folder) / "figures.jsonl")
    rows = [["op", "work", "contender", "us", "GB/s", "TFLOP/s", "of ceiling"]]
    for f in figures:
        rates = [f"{f.us:.2f}", f"{f.gb_s:.0f}", f"{f.tflop_s:.0f}", f"{f.share:.0%}"]
        rows.append([f.op, f.label, f.contender, *rates])
    typer.echo(table(rows))
