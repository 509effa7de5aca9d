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


def _writable(option: str, path: Path | None) -> None:
    if path is not None and not os.access(path.parent, os.W_OK):
        raise UserError(f"{option}={path}: cannot be written; give a file in another folder")


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
    _writable("output", output)
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


def _engine(options: dict[str, Any]) -> Any:
    """The engine to measure: prompts are repeated, so prefixes are not cached unless asked for."""
    from ..engine.llm import LLM

    return LLM(**{"enable_prefix_caching": False, "gpu_memory_utilization": 0.85, **options})


@app.command("latency", cls=GroupedHelp)
@engine_flags
def latency(
    engine: dict[str, Any],
    model_argument: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Same as --model.")
    ] = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="Equal requests at a time.")] = None,
    input_len: Annotated[int, typer.Option(help="Prompt tokens.")] = 128,
    output_len: Annotated[int, typer.Option(help="Output tokens.")] = 129,
    repeats: Annotated[int, typer.Option(help="Runs, of which the best counts.")] = 2,
    output: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot TPOT over batch to this PNG.")] = None,
) -> None:
    """Time per output token and to the first token, for batches of equal requests."""
    options = merge(engine, model=model_argument)
    for name, value in (("input_len", input_len), ("repeats", repeats)):
        if value < 1:
            raise UserError(f"{name}={value}: expected at least 1")
    if output_len < 2:
        raise UserError(f"output_len={output_len}: expected at least 2, the first is TTFT")
    _writable("json", output)
    _writable("plot", plot)
    from ..bench.environment import environment
    from ..bench.latency import measure_latency, plot_latency

    llm = _engine(options)
    rows = []
    for batch in batch_size or [1]:
        row = measure_latency(
            llm, batch, input_len=input_len, output_len=output_len, repeats=repeats
        )
        rows.append(row)
        typer.echo(f"batch {batch}: TPOT {row['tpot_ms']:.3f} ms, TTFT {row['ttft_ms']:.2f} ms")
    record = {"environment": environment(), "options": options, "rows": rows}
    if output is not None:
        output.write_text(json.dumps({**record, "engine": llm.report()}, indent=1) + "\n")
    if plot is not None:
        plot_latency({str(options.get("model", "abacus")): rows}, plot)


@app.command("throughput", cls=GroupedHelp)
@engine_flags
def throughput(
    engine: dict[str, Any],
    model_argument: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Same as --model.")
    ] = None,
    workload: Annotated[str, typer.Option(help="chat, prefill-heavy or decode-heavy.")] = "chat",
    num_prompts: Annotated[int, typer.Option(help="Requests.")] = 500,
    request_rate: Annotated[
        float | None, typer.Option(help="Requests a second; all at once if unset.")
    ] = None,
    goodput: Annotated[
        list[str] | None, typer.Option(help="Limits in ms that a good request keeps: ttft:500.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
) -> None:
    """Requests and tokens a second over a mix of lengths, with percentiles of latency."""
    options = merge(engine, model=model_argument)
    if num_prompts < 1 or (request_rate is not None and request_rate <= 0):
        raise UserError(
            f"num_prompts={num_prompts}, request_rate={request_rate}: expected more than 0"
        )
    _writable("json", output)
    from ..bench.environment import environment
    from ..bench.serving import parse_limits, run, warm_up
    from ..bench.workloads import equal, mix

    limits = parse_limits(goodput or [])
    mix(workload, 1, 8)  # an unknown name is found before the model is loaded
    llm = _engine(options)
    vocab_size = llm.engine.inputs.vocab_size
    warm_up(llm.engine, equal(8, 64, 8, vocab_size))
    result = run(llm.engine, mix(workload, num_prompts, vocab_size), request_rate).to_json(limits)
    rows = [["ms", "mean", "p50", "p90", "p99"]]
    for name in ("ttft", "tpot", "itl", "e2e"):
        rows.append([name, *(f"{value:.2f}" for value in result[f"{name}_ms"].values())])
    typer.echo(table(rows))
    typer.echo(
        f"{result['requests_per_s']:.2f} requests/s, {result['output_tokens_per_s']:.0f} output "
        f"tokens/s, {result['seconds']:.2f} s"
        + (f", goodput {result['goodput_per_s']:.2f} requests/s" if limits else "")
    )
    if output is not None:
        record = {"environment": environment(), "options": options, "workload": workload, **result}
        output.write_text(json.dumps({**record, "engine": llm.report()}, indent=1) + "\n")


@app.command("kernels")
def kernels(
    select: Annotated[
        str | None, typer.Option("-k", help="Only benchmarks that match, as for pytest -k.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Measure nothing: list what is slower in NEW than in OLD."),
    ] = None,
    threshold: Annotated[float, typer.Option(help="Slower by this share is a regression.")] = 0.05,
    render: Annotated[
        Path | None,
        typer.Option(help="Measure nothing: make docs/kernels.md and its plot of this result."),
    ] = None,
) -> None:
    """Time every kernel on real shapes, beside the best library; exit 1 on a regression."""
    from ..bench.kernels import figures

    if compare is not None:
        raise typer.Exit(_compare(*compare, threshold))
    if render is not None:
        environment, found = figures.load(render)
        page = Path("docs/kernels.md")
        page.parent.mkdir(exist_ok=True)
        page.write_text(figures.markdown(environment, found, "kernels.png"))
        figures.plot(found, page.with_suffix(".png"))
        typer.echo(f"wrote {page} and {page.with_suffix('.png')}")
        return
    from ..bench.kernels.run import run_benchmarks

    _writable("json", output)
    environment, found = run_benchmarks(select)
    if output is not None:
        figures.save(output, environment, found)
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
