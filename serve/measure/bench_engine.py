"""``fusewright bench latency | throughput | growth | prefix``: what a whole engine takes."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...config import UserError
from ...config.numbers import MOST_COUNT, MOST_REQUESTS, check_counts
from ..console.flags import Json, Model, Output, engine_flags, takes_fields
from ..console.options import load, no_result, to_measure
from ..console.table import table
from .measured import Comparison, check_outputs, fastest, keep, show_rows, show_times

if TYPE_CHECKING:
    from ...bench.workloads import Work
    from ...engine.engine import Engine
    from ...engine.llm import LLM

_PREFIX_LEN = 2000
_CONTEXTS = [128 << n for n in range(9)]


def _engine(options: dict[str, Any]) -> Any:
    """The ``LLM`` to measure: prompts are repeated, so prefixes are not cached unless asked for."""
    return load({"enable_prefix_caching": False, "gpu_memory_utilization": 0.85, **options})


def _compare(comparison: Comparison, output: Path | None, json_output: bool) -> None:
    """List what changed and end the command, if that is asked for."""
    from ...bench.compare import compare

    if comparison.compare is not None:
        no_result("--compare", output, json_output)
        raise comparison.exit(compare(*comparison.compare))


@engine_flags
@takes_fields(comparison=Comparison)
def latency(
    engine: dict[str, Any],
    model_argument: Model = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="Equal requests at a time.")] = None,
    input_len: Annotated[int, typer.Option(help="Prompt tokens.")] = 128,
    output_len: Annotated[int, typer.Option(help="Output tokens.")] = 129,
    repeats: Annotated[int, typer.Option(help="Runs, of which the best counts.")] = 2,
    output: Output = None,
    json_output: Json = False,
    plot: Annotated[Path | None, typer.Option(help="Plot TPOT over batch to this PNG.")] = None,
    *,
    comparison: Comparison,
) -> None:
    """Time per output token and to the first token, for batches of equal requests."""
    _compare(comparison, output, json_output)
    options = to_measure(engine, model_argument)
    check_counts(1, input_len=input_len, repeats=repeats)
    check_counts(2, output_len=output_len)  # the first is TTFT
    for batch in batch_size or ():
        check_counts(1, MOST_REQUESTS, batch_size=batch)
    check_outputs(output, plot)
    from ...bench.latency import measure_latency

    llm = _engine(options)
    rows = []
    for batch in batch_size or [1]:
        row = measure_latency(
            llm, batch, input_len=input_len, output_len=output_len, repeats=repeats
        )
        rows.append(row)
        typer.echo(
            f"batch {batch}: TPOT {row['tpot_ms']:.3f} ms, TTFT {row['ttft_ms']:.2f} ms",
            err=json_output,
        )
    keep(output, json_output, options, plot, rows=rows, engine=llm.report())


@engine_flags
@takes_fields(comparison=Comparison)
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
    repeats: Annotated[int, typer.Option(help="Runs of each, of which the best counts.")] = 1,
    output: Output = None,
    json_output: Json = False,
    plot: Annotated[
        Path | None, typer.Option(help="Plot throughput over latency of each rate to this PNG.")
    ] = None,
    frontends: Annotated[
        bool, typer.Option("--async", help="Compare AsyncLLM with one batch of LLM.generate.")
    ] = False,
    *,
    comparison: Comparison,
) -> None:
    """Requests and tokens a second over a mix of lengths, with percentiles of latency."""
    _compare(comparison, output, json_output)
    options = to_measure(engine, model_argument)
    check_counts(1, MOST_REQUESTS, num_prompts=num_prompts)
    check_counts(1, repeats=repeats)
    for rate in request_rate or ():
        if not rate > 0:
            raise UserError(f"request_rate={rate}: expected more than 0, or inf for all at once")
    if frontends and (request_rate or goodput or plot):
        given = "request-rate" if request_rate else "goodput" if goodput else "plot"
        raise UserError(f"--{given} says nothing of --async, which has all requests at once")
    check_outputs(output, plot)
    from ...bench.workloads import equal, fitting, mix

    names = workload or ["chat"]
    for name in names:
        mix(name, 1, 8)  # an unknown one is found before torch is imported
    from ...bench.serving import parse_limits, warm_up

    limits = parse_limits(goodput or [])
    llm = _engine(options)
    vocab_size = llm.engine.inputs.vocab_size
    max_model_len = llm.engine.inputs.max_model_len
    warm_up(llm.engine, fitting(equal(8, 64, 8, vocab_size), max_model_len)[0])
    rows, found = [], {}
    for name in names:
        works, scale = fitting(mix(name, num_prompts, vocab_size), max_model_len)
        if scale < 1:
            name = f"{name} x {scale:.3f}"
            typer.echo(
                f"{name}: all lengths are scaled, so that the longest request fits into "
                f"{max_model_len=}",
                err=json_output,
            )
        if frontends:
            typer.echo(f"{name}, {num_prompts} requests", err=json_output)
            found[name] = _frontends(llm, works, err=json_output)
            continue
        for rate in request_rate or [inf]:
            about = {"workload": name, "request_rate": None if rate == inf else rate}
            rows.append({**about, **_best_run(llm.engine, works, rate, repeats, limits)})
            _show_throughput(rows[-1], err=json_output)
    results: dict[str, Any] = {"frontends": found} if frontends else {"rows": rows}
    keep(output, json_output, options, plot, **results, engine=llm.report())


def _best_run(
    engine: Engine, works: Sequence[Work], rate: float, repeats: int, limits: dict[str, float]
) -> dict[str, Any]:
    """The fastest of ``repeats`` runs, and by what share the slowest took longer."""
    from ...bench.account import account, recorded
    from ...bench.serving import run

    tries = []
    for _ in range(repeats):
        with recorded(engine) as steps:
            tries.append((run(engine, works, rate), steps))
    row, steps = fastest(tries, limits)
    return {**row, "account": account(steps)}


def _frontends(llm: LLM, works: Sequence[Work], *, err: bool) -> list[dict[str, Any]]:
    from ...bench.cases import measure_frontends

    rows = measure_frontends(llm, works)
    show_rows(rows, err=err)
    return rows


def _show_throughput(row: dict[str, Any], *, err: bool) -> None:
    rate = row["request_rate"]
    offered = "" if rate is None else f", {rate:g} requests/s offered"
    typer.echo(f"{row['workload']}{offered}", err=err)
    show_times(row, err=err)
    typer.echo(
        f"{row['requests_per_s']:.2f} requests/s, {row['output_tokens_per_s']:.0f} output "
        f"tokens/s, {row['seconds']:.2f} s"
        + (f", goodput {row['goodput_per_s']:.2f} requests/s" if "goodput_per_s" in row else ""),
        err=err,
    )
    show_rows(row["account"], err=err)


@engine_flags
def growth(
    engine: dict[str, Any],
    model_argument: Model = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="1 and 64 if unset.")] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(help="Tokens; 128 to 32768 by doubling if unset and they fit."),
    ] = None,
    requests: Annotated[
        list[int] | None, typer.Option(help="1 to 512 by doubling if unset.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Decode steps of each point.")] = 24,
    output: Output = None,
    json_output: Json = False,
    plot: Annotated[Path | None, typer.Option(help="Plot both to this PNG.")] = None,
) -> None:
    """TPOT over context, against the bytes to read; step and its overhead over requests."""
    options = to_measure(engine, model_argument)
    check_counts(2, 10_000, steps=steps)
    batches, counts = batch_size or [1, 64], requests or [1 << n for n in range(10)]
    for name, values in (("batch_size", batches), ("context", context), ("requests", counts)):
        for value in values or ():
            check_counts(1, MOST_REQUESTS if name != "context" else MOST_COUNT, **{name: value})
    check_outputs(output, plot)
    from ...bench.cases import measure_growth

    seqs = max(*batches, *counts)
    llm = _engine({"enable_prefix_caching": True, "max_num_seqs": seqs, **options})
    contexts = context
    if contexts is None:
        longest = llm.engine.inputs.max_model_len - steps - 1
        contexts = [n for n in _CONTEXTS if n <= longest]
        if too_long := _CONTEXTS[len(contexts) :]:
            typer.echo(f"contexts of {too_long[0]} tokens and more do not fit", err=json_output)
    found = measure_growth(llm.engine, batches, contexts, counts, steps)
    for name in ("context", "requests"):
        if found[name]:
            show_rows(found[name], err=json_output, end="\n")
    if found["context"] and not found["has_limit"]:
        typer.echo("no limit by bytes: what this device can read is not measured", err=json_output)
    for row in found["skipped"]:
        what = ", ".join(f"{name} {value}" for name, value in row.items() if name != "why")
        typer.echo(f"skipped {what}: {row['why']}", err=json_output)
    keep(output, json_output, options, plot, **found, engine=llm.report())


@engine_flags
def prefix(
    engine: dict[str, Any],
    model_argument: Model = None,
    num_prompts: Annotated[int, typer.Option(help="Requests.")] = 64,
    prefix_len: Annotated[
        int | None, typer.Option(help="Tokens that all begin with; 2000 if unset and they fit.")
    ] = None,
    input_len: Annotated[int, typer.Option(help="Tokens of each behind them.")] = 32,
    output_len: Annotated[int, typer.Option(help="Output tokens.")] = 16,
    output: Output = None,
    json_output: Json = False,
) -> None:
    """First-token time of requests with one prefix, with and without prefix caching."""
    options = to_measure(engine, model_argument)
    check_counts(1, MOST_REQUESTS, num_prompts=num_prompts)
    check_counts(1, input_len=input_len, output_len=output_len)
    if prefix_len is not None:
        check_counts(1, prefix_len=prefix_len)
    check_outputs(output)
    from ...bench.cases import measure_prefix

    llm = _engine({"enable_prefix_caching": True, **options})
    if prefix_len is None:
        room = llm.engine.inputs.max_model_len - input_len - max(output_len, 2)
        prefix_len = min(_PREFIX_LEN, max(room, 1))
        if prefix_len < _PREFIX_LEN:
            typer.echo(f"a prefix of {prefix_len} tokens: more do not fit", err=json_output)
    found = measure_prefix(llm.engine, num_prompts, prefix_len, input_len, output_len)
    rows = [["prefix", "mean TTFT, ms", "p50", "p99", "output tokens/s"]]
    for row in found["rows"]:
        ttft = (row["ttft_ms"][name] for name in ("mean", "p50", "p99"))
        cells = [row["prefix"], *(f"{value:.2f}" for value in ttft)]
        rows.append([*cells, f"{row['output_tokens_per_s']:.0f}"])
    typer.echo(table(rows), err=json_output)
    typer.echo(
        f"first token {found['speedup']:.1f} times sooner; {found['identical']} of {num_prompts} "
        "outputs identical",
        err=json_output,
    )
    keep(output, json_output, options, **found, engine=llm.report())
