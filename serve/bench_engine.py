"""``fusewright bench latency | throughput | growth | prefix``: what a whole engine takes."""

from __future__ import annotations

import json
from itertools import product
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import UserError
from .flags import engine_flags
from .options import merge, writable
from .table import table

Model = Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Same as --model.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the result here.")]
Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option(help="Measure nothing: list what is slower in NEW than in OLD."),
]
Threshold = Annotated[float, typer.Option(help="Slower by this share is a regression.")]


def _engine(options: dict[str, Any]) -> Any:
    """The engine to measure: prompts are repeated, so prefixes are not cached unless asked for."""
    from ..engine.llm import LLM

    return LLM(**{"enable_prefix_caching": False, "gpu_memory_utilization": 0.85, **options})


def _outputs(output: Path | None, picture: Path | None = None) -> None:
    """Refuse what could not be kept, before anything is measured."""
    writable("json", output)
    writable("plot", picture)
    if picture is not None:
        from ..bench.plots import check_drawing

        check_drawing()


def _write(
    path: Path | None, picture: Path | None, llm: Any, options: dict[str, Any], **found: Any
) -> None:
    from ..bench.environment import environment

    if path is not None:
        record = {"environment": environment(), "options": options, **found, "engine": llm.report()}
        path.write_text(json.dumps(record, indent=1) + "\n")
    if picture is not None:
        from ..bench.plots import plot

        plot({str(options.get("model", "abacus")): found}, picture)


def _check_counts(least: int, **given: int) -> None:
    for name, value in given.items():
        if value < least:
            raise UserError(f"{name}={value}: expected at least {least}")


def _compare(old: Path, new: Path, threshold: float) -> int:
    """Print what changed by more than ``threshold``; the exit code."""
    from ..bench.compare import compare

    changes = compare(old, new)
    slower = [change for change in changes if change.slower > 1 + threshold]
    faster = [change for change in changes if change.slower < 1 / (1 + threshold)]
    for word, some in (("slower", slower), ("faster", faster[::-1])):
        if some:
            rows = [[word, "figure", "old", "new", "ratio"]]
            for c in some:
                rows.append([c.work, c.figure, f"{c.old:.3f}", f"{c.new:.3f}", f"{c.slower:.2f}"])
            typer.echo(table(rows) + "\n")
    typer.echo(
        f"{len(changes)} in both: {len(slower)} slower, {len(faster)} faster by more than "
        f"{threshold:.0%}"
    )
    return int(bool(slower))


@engine_flags
def latency(
    engine: dict[str, Any],
    model_argument: Model = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="Equal requests at a time.")] = None,
    input_len: Annotated[int, typer.Option(help="Prompt tokens.")] = 128,
    output_len: Annotated[int, typer.Option(help="Output tokens.")] = 129,
    repeats: Annotated[int, typer.Option(help="Runs, of which the best counts.")] = 2,
    output: Json = None,
    plot: Annotated[Path | None, typer.Option(help="Plot TPOT over batch to this PNG.")] = None,
    compare: Compare = None,
    threshold: Threshold = 0.05,
) -> None:
    """Time per output token and to the first token, for batches of equal requests."""
    if compare is not None:
        raise typer.Exit(_compare(*compare, threshold))
    options = merge(engine, model=model_argument)
    _check_counts(1, input_len=input_len, repeats=repeats)
    if output_len < 2:
        raise UserError(f"output_len={output_len}: expected at least 2, the first is TTFT")
    _outputs(output, plot)
    from ..bench.latency import measure_latency

    llm = _engine(options)
    rows = []
    for batch in batch_size or [1]:
        row = measure_latency(
            llm, batch, input_len=input_len, output_len=output_len, repeats=repeats
        )
        rows.append(row)
        typer.echo(f"batch {batch}: TPOT {row['tpot_ms']:.3f} ms, TTFT {row['ttft_ms']:.2f} ms")
    _write(output, plot, llm, options, rows=rows)


@engine_flags
def throughput(
    engine: dict[str, Any],
    model_argument: Model = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(help="chat (if unset), prefill-heavy, decode-heavy. Several: a run each."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests.")] = 500,
    request_rate: Annotated[
        list[float] | None,
        typer.Option(help="Requests a second; all at once if unset or inf. Several: a run each."),
    ] = None,
    goodput: Annotated[
        list[str] | None, typer.Option(help="Limits in ms that a good request keeps: ttft:500.")
    ] = None,
    output: Json = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot throughput over latency of each rate to this PNG.")
    ] = None,
    frontends: Annotated[
        bool, typer.Option("--async", help="Compare AsyncLLM with one batch of LLM.generate.")
    ] = False,
    compare: Compare = None,
    threshold: Threshold = 0.05,
) -> None:
    """Requests and tokens a second over a mix of lengths, with percentiles of latency."""
    if compare is not None:
        raise typer.Exit(_compare(*compare, threshold))
    options = merge(engine, model=model_argument)
    _check_counts(1, num_prompts=num_prompts)
    if request_rate and min(request_rate) <= 0:
        raise UserError(f"request_rate={min(request_rate)}: expected more than 0")
    _outputs(output, plot)
    from ..bench.account import account, recorded
    from ..bench.serving import parse_limits, run, warm_up
    from ..bench.workloads import equal, mix

    limits, names = parse_limits(goodput or []), workload or ["chat"]
    for name in names:
        mix(name, 1, 8)  # an unknown one is found before the model is loaded
    llm = _engine(options)
    vocab_size = llm.engine.inputs.vocab_size
    warm_up(llm.engine, equal(8, 64, 8, vocab_size))
    if frontends:
        found = {name: _frontends(llm, name, num_prompts, vocab_size) for name in names}
        _write(output, None, llm, options, frontends=found)
        return
    rows = []
    for name, rate in product(names, request_rate or [inf]):
        works = mix(name, num_prompts, vocab_size)
        with recorded(llm.engine) as steps:
            measured = run(llm.engine, works, rate).to_json(limits)
        offered = None if rate == inf else rate
        about = {"workload": name, "request_rate": offered}
        rows.append({**about, **measured, "account": account(steps)})
        _show_throughput(rows[-1])
    _write(output, plot, llm, options, rows=rows)


def _frontends(llm: Any, workload: str, num_prompts: int, vocab_size: int) -> list[dict[str, Any]]:
    from ..bench.frontends import measure_frontends
    from ..bench.workloads import mix

    rows = measure_frontends(llm, mix(workload, num_prompts, vocab_size))
    cells = [[str(value) for value in row.values()] for row in rows]
    typer.echo(f"{workload}, {num_prompts} requests")
    typer.echo(table([list(rows[0]), *cells]))
    return rows


def _show_throughput(row: dict[str, Any]) -> None:
    rows = [["ms", "mean", "p50", "p90", "p99"]]
    for name in ("ttft", "tpot", "itl", "e2e"):
        rows.append([name, *(f"{value:.2f}" for value in row[f"{name}_ms"].values())])
    rate = row["request_rate"]
    typer.echo(row["workload"] + ("" if rate is None else f", {rate:g} requests/s offered"))
    typer.echo(table(rows))
    typer.echo(
        f"{row['requests_per_s']:.2f} requests/s, {row['output_tokens_per_s']:.0f} output "
        f"tokens/s, {row['seconds']:.2f} s"
        + (f", goodput {row['goodput_per_s']:.2f} requests/s" if "goodput_per_s" in row else "")
    )
    names = list(row["account"][0])
    typer.echo(table([names, *([str(value) for value in r.values()] for r in row["account"])]))


@engine_flags
def growth(
    engine: dict[str, Any],
    model_argument: Model = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="1 and 64 if unset.")] = None,
    context: Annotated[
        list[int] | None, typer.Option(help="Tokens; 128 to 32768 by doubling if unset.")
    ] = None,
    requests: Annotated[
        list[int] | None, typer.Option(help="1 to 512 by doubling if unset.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Decode steps of each point.")] = 24,
    output: Json = None,
    plot: Annotated[Path | None, typer.Option(help="Plot both to this PNG.")] = None,
) -> None:
    """TPOT over context, against the bytes to read; step and its overhead over requests."""
    options = merge(engine, model=model_argument)
    _check_counts(2, steps=steps)
    batches, counts = batch_size or [1, 64], requests or [1 << n for n in range(10)]
    contexts = context or [128 << n for n in range(9)]
    for name, values in (("batch_size", batches), ("context", contexts), ("requests", counts)):
        _check_counts(1, **{name: min(values)})
    _outputs(output, plot)
    from ..bench.growth import measure_growth

    seqs = max(*batches, *counts)
    llm = _engine({"enable_prefix_caching": True, "max_num_seqs": seqs, **options})
    found = measure_growth(llm.engine, batches, contexts, counts, steps)
    for name in ("context", "requests"):
        if found[name]:
            keys = list(dict.fromkeys(key for row in found[name] for key in row))
            cells = [[str(row.get(key, "")) for key in keys] for row in found[name]]
            typer.echo(table([keys, *cells]) + "\n")
    for row in found["skipped"]:
        what = ", ".join(f"{name} {value}" for name, value in row.items() if name != "why")
        typer.echo(f"skipped {what}: {row['why']}")
    _write(output, plot, llm, options, **found)


@engine_flags
def prefix(
    engine: dict[str, Any],
    model_argument: Model = None,
    num_prompts: Annotated[int, typer.Option(help="Requests.")] = 64,
    prefix_len: Annotated[int, typer.Option(help="Tokens that all begin with.")] = 2000,
    input_len: Annotated[int, typer.Option(help="Tokens of each behind them.")] = 32,
    output_len: Annotated[int, typer.Option(help="Output tokens.")] = 16,
    output: Json = None,
) -> None:
    """First-token time of requests with one prefix, with and without prefix caching."""
    options = merge(engine, model=model_argument)
    counts = {"num_prompts": num_prompts, "prefix_len": prefix_len, "input_len": input_len}
    _check_counts(1, **counts, output_len=output_len)
    _outputs(output)
    from ..bench.prefix import measure_prefix

    llm = _engine({"enable_prefix_caching": True, **options})
    found = measure_prefix(llm.engine, num_prompts, prefix_len, input_len, output_len)
    rows = [["prefix", "mean TTFT, ms", "p50", "p99", "output tokens/s"]]
    for row in found["rows"]:
        ttft = (row["ttft_ms"][name] for name in ("mean", "p50", "p99"))
        cells = [row["prefix"], *(f"{value:.2f}" for value in ttft)]
        rows.append([*cells, f"{row['output_tokens_per_s']:.0f}"])
    typer.echo(table(rows))
    typer.echo(
        f"first token {found['speedup']:.1f} times sooner; {found['identical']} of {num_prompts} "
        "outputs identical"
    )
    _write(output, None, llm, options, **found)
