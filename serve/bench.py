"""``fusewright bench``: what the stack takes, measured; one command a question."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from ..config import UserError
from ..config.numbers import check_counts, check_number
from .bench_engine import growth, latency, prefix, throughput
from .bench_passes import passes
from .flags import Json, Model, Output, engine_flags
from .help import GroupedHelp
from .options import no_result, to_measure, writable, write_result
from .table import table

app = typer.Typer(rich_markup_mode=None, help="Measure what the stack takes.")


for _command in (latency, throughput, growth, prefix, passes):
    app.command(_command.__name__, cls=GroupedHelp)(_command)


@app.command("startup", cls=GroupedHelp)
@engine_flags
def startup(
    engine: dict[str, Any],
    model_argument: Model = None,
    iterations: Annotated[int, typer.Option(help="Cold starts, and warm starts.")] = 3,
    output: Output = None,
    json_output: Json = False,
) -> None:
    """Seconds from process start to first token, cold and warm, by phase."""
    options = to_measure(engine, model_argument)
    check_counts(1, 1000, iterations=iterations)
    writable("output", output)
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
    typer.echo(table(rows), err=json_output)
    record = {"environment": environment(), "options": options, **result}
    write_result(output, record, json_output=json_output)


@app.command("plot")
def plot(
    picture: Annotated[Path, typer.Argument(help="PNG to write.")],
    results: Annotated[list[Path], typer.Argument(help="Results of one bench, a line each.")],
) -> None:
    """Draw results of latency, throughput or growth that were kept by --output."""
    writable("picture", picture)
    from ..bench import plots

    plots.plot({path.stem: plots.load(path) for path in results}, picture)


@app.command("kernels")
def kernels(
    select: Annotated[
        str | None, typer.Option("-k", help="Only benchmarks that match, as for pytest -k.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="Write each figure to this file, a line each.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Measure nothing: list what is slower in NEW than in OLD."),
    ] = None,
    threshold: Annotated[float, typer.Option(help="Slower by this share is a regression.")] = 0.05,
    render: Annotated[
        list[Path] | None,
        typer.Option(help="Measure nothing: make docs/kernels.md and its plot of these results."),
    ] = None,
) -> None:
    """Time every kernel on real shapes, beside the best library; exit 1 on a regression."""
    from ..bench.kernels import figures

    check_number(threshold=threshold)
    if compare is not None or render:
        no_result("--compare" if compare else "--render", output, False)
    if compare is not None:
        raise typer.Exit(_compare(*compare, threshold))
    if render:
        environment, found = figures.load_all(render)
        page = Path("docs/kernels.md")
        page.parent.mkdir(exist_ok=True)
        page.write_text(figures.markdown(environment, found, "kernels.png"))
        figures.plot(found, page.with_suffix(".png"))
        typer.echo(f"wrote {page} and {page.with_suffix('.png')}")
        return
    from ..bench.kernels.run import run_benchmarks

    writable("output", output)
    with TemporaryDirectory() as folder:
        _, found = run_benchmarks(select, output or Path(folder) / "figures.jsonl")
    rows = [["op", "work", "contender", "us", "GB/s", "TFLOP/s", "of ceiling"]]
    for f in found:
        rates = [f"{f.us:.2f}", f"{f.gb_s:.0f}", f"{f.tflop_s:.0f}", f"{f.share:.0%}"]
        rows.append([f.op, f.label, f.contender, *rates])
    typer.echo(table(rows))


def _compare(old: Path, new: Path, threshold: float) -> int:
    """Print what changed by more than ``threshold``; the exit code."""
    from ..bench.kernels import figures

    changes = figures.compare(figures.load(old)[1], figures.load(new)[1])
    if not changes:
        raise UserError(f"{old} and {new} measured nothing in common")
    slower = [change for change in changes if change.ratio > 1 + threshold]
    faster = [change for change in changes if change.ratio < 1 / (1 + threshold)]
    for word, some in (("slower", slower), ("faster", faster[::-1])):
        if some:
            rows = [[word, "work", "contender", "old us", "new us", "ratio"]]
            for c in some:
                times = [f"{c.old.us:.2f}", f"{c.new.us:.2f}", f"{c.ratio:.2f}"]
                rows.append([c.new.op, c.new.label, c.new.contender, *times])
            typer.echo(table(rows) + "\n")
    typer.echo(
        f"{len(changes)} in both: {len(slower)} slower, {len(faster)} faster by more than "
        f"{threshold:.0%}"
    )
    return int(bool(slower))
