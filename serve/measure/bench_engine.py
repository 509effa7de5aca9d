"""``fusewright bench latency | throughput | growth | prefix``: what a whole engine takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...config import UserError
from ...config.numbers import MOST_COUNT, MOST_REQUESTS, check_counts
from ..console.flags import model_flags
from ..console.options import check_to_measure, load
from ..console.table import table
from .drafts import Acceptance, drafts_text, since, with_acceptance
from .measured import Comparison, Result, fastest, rows_table, times_table
from .workload import Runs, Workload

if TYPE_CHECKING:
    from ...bench.workloads import Work
    from ...engine.engine import Engine

_PREFIX_LEN = 2000
_CONTEXTS = [128 << n for n in range(9)]


def llm_to_measure(options: dict[str, Any]) -> Any:
    """The ``LLM`` to measure: prompts are repeated, so prefixes are not cached unless asked for."""
    return load({"enable_prefix_caching": False, "gpu_memory_utilization": 0.85, **options})


@dataclass(frozen=True)
class Equal:
    """Flags of batches of equal requests."""

    batch_size: Annotated[list[int] | None, typer.Option(help="Equal requests at a time.")] = None
    input_len: Annotated[int, typer.Option(help="Prompt tokens.")] = 128
    output_len: Annotated[int, typer.Option(help="Output tokens.")] = 129
    repeats: Annotated[int, typer.Option(help="Runs, of which the best counts.")] = 2

    def check(self) -> None:
        check_counts(1, input_len=self.input_len, repeats=self.repeats)
        check_counts(2, output_len=self.output_len)  # the first is TTFT
        for batch in self.batch_size or ():
            check_counts(1, MOST_REQUESTS, batch_size=batch)


@model_flags
def latency(
    engine: dict[str, Any],
    *,
    equal: Equal,
    acceptance: Acceptance = None,
    result: Result,
    plot: Annotated[Path | None, typer.Option(help="Plot TPOT over batch to this PNG.")] = None,
    comparison: Comparison,
) -> None:
    """Time per output token and to the first token, for batches of equal requests."""
    comparison.end_if_asked(result)
    engine = with_acceptance(engine, acceptance)
    check_to_measure(engine)
    equal.check()
    result.check(plot)
    from ...bench.latency import measure_latency
    from ...bench.limits.clocks import power_text

    llm = llm_to_measure(engine)
    rows = []
    before = llm.report()["drafts"]
    for batch in equal.batch_size or [1]:
        row = measure_latency(
            llm,
            batch,
            input_len=equal.input_len,
            output_len=equal.output_len,
            repeats=equal.repeats,
        )
        after = llm.report()["drafts"]
        drafts, before = since(after, before), after
        rows.append({**row, "drafts": drafts} if drafts else row)
        remark = power_text(row["run"].get("clocks", {}))
        times = f"TPOT {row['tpot_ms']:.3f} ms, TTFT {row['ttft_ms']:.2f} ms"
        result.say(f"batch {batch}: {times}{remark}")
        if drafts:
            result.say(drafts_text(drafts, row["tpot_ms"]))
    result.keep(engine, plot, rows=rows, engine=llm.report())


@model_flags
def throughput(
    engine: dict[str, Any],
    *,
    workload: Workload,
    runs: Runs,
    result: Result,
    plot: Annotated[
        Path | None, typer.Option(help="Plot throughput over latency, and TTFT, to this PNG.")
    ] = None,
    frontends: Annotated[
        bool, typer.Option("--async", help="Compare AsyncLLM with one batch of LLM.generate.")
    ] = False,
    comparison: Comparison,
) -> None:
    """Requests and tokens a second of a data set, with percentiles of latency.

    Requests come at once, or at --request-rate; `bench serve` uses HTTP.
    """
    comparison.end_if_asked(result)
    options = {**workload.implied, **engine}
    check_to_measure(options)
    if frontends and (workload.rates or runs.goodput or plot):
        flag = "request-rate" if workload.rates else "goodput" if runs.goodput else "plot"
        raise UserError(f"--{flag} says nothing of --async, which has all requests at once")
    result.check(plot)
    from ...bench.cases import measure_frontends
    from ...bench.serving import parse_limits, warm_up
    from ...bench.workloads import equal, fitting

    limits = parse_limits(runs.goodput or [])
    works = workload.works(options, result.say)
    llm = llm_to_measure(options)
    inputs = llm.engine.inputs
    warm_up(llm.engine, fitting(equal(8, 64, 8, inputs.vocab_size), inputs.max_model_len)[0])
    if frontends:
        compared = measure_frontends(llm, works)
        result.say(f"{workload.dataset}, {len(works)} requests\n{rows_table(compared)}")
        result.keep(options, plot, frontends=compared, engine=llm.report())
        return
    rows = []
    for rate in workload.rates or (inf,):
        row = _best_run(llm.engine, works, (rate, workload.burstiness), runs.repeats, limits)
        rows.append({**workload.about(rate), **row})
        result.say(_throughput_text(rows[-1]))
    result.keep(options, plot, rows=rows, engine=llm.report())


def _best_run(
    engine: Engine,
    works: Sequence[Work],
    rate: tuple[float, float],
    repeats: int,
    limits: dict[str, float],
) -> dict[str, Any]:
    """The fastest of ``repeats`` runs, and by what share the slowest took longer; ``rate`` is
    requests a second and burstiness."""
    from ...bench.account import account, recorded
    from ...bench.serving import run
    from ...bench.workloads import arrivals

    tries = []
    for number in range(repeats):
        times = arrivals(len(works), *rate, seed=number)
        with recorded(engine) as steps:
            tries.append((run(engine, works, times), steps))
    row, steps = fastest(tries, limits)
    return {**row, "account": account(steps)}


def _throughput_text(row: dict[str, Any]) -> str:
    from ...bench.limits.clocks import power_text

    rate = row["request_rate"]
    offered = "" if rate is None else f", {rate:g} requests/s offered"
    totals = (
        f"{row['requests_per_s']:.2f} requests/s, {row['output_tokens_per_s']:.0f} output "
        f"tokens/s, {row['seconds']:.2f} s"
    )
    if "goodput_per_s" in row:
        totals += f", goodput {row['goodput_per_s']:.2f} requests/s"
    totals += power_text(row.get("clocks", {}))
    heading = f"{row['workload']}{offered}"
    return "\n".join([heading, times_table(row), totals, rows_table(row["account"])])


@model_flags
def growth(
    engine: dict[str, Any],
    batch_size: Annotated[list[int] | None, typer.Option(help="1 and 64 if unset.")] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(help="Tokens; 128 to 32768 by doubling if unset and they fit."),
    ] = None,
    requests: Annotated[
        list[int] | None, typer.Option(help="1 to 512 by doubling if unset.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Decode steps of each point.")] = 24,
    *,
    result: Result,
    plot: Annotated[Path | None, typer.Option(help="Plot both to this PNG.")] = None,
) -> None:
    """TPOT over context, against the bytes to read; step and its overhead over requests."""
    check_to_measure(engine)
    check_counts(2, 10_000, steps=steps)
    batches, counts = batch_size or [1, 64], requests or [1 << n for n in range(10)]
    for name, values in (("batch_size", batches), ("context", context), ("requests", counts)):
        for value in values or ():
            check_counts(1, MOST_REQUESTS if name != "context" else MOST_COUNT, **{name: value})
    result.check(plot)
    from ...bench.cases import measure_growth

    seqs = max(*batches, *counts)
    llm = llm_to_measure({"enable_prefix_caching": True, "max_num_seqs": seqs, **engine})
    contexts = context
    if contexts is None:
        longest = llm.engine.inputs.max_model_len - steps - 1
        contexts = [n for n in _CONTEXTS if n <= longest]
        if too_long := _CONTEXTS[len(contexts) :]:
            result.say(f"contexts of {too_long[0]} tokens and more do not fit")
    growths = measure_growth(llm.engine, batches, contexts, counts, steps)
    for name in ("context", "requests"):
        if growths[name]:
            result.say(rows_table(growths[name]) + "\n")
    if growths["context"] and not growths["has_limit"]:
        result.say("no limit by bytes: what this device can read is not measured")
    for row in growths["skipped"]:
        what = ", ".join(f"{name} {value}" for name, value in row.items() if name != "why")
        result.say(f"skipped {what}: {row['why']}")
    result.keep(engine, plot, **growths, engine=llm.report())


@model_flags
def prefix(
    engine: dict[str, Any],
    num_prompts: Annotated[int, typer.Option(help="Requests.")] = 64,
    prefix_len: Annotated[
        int | None, typer.Option(help="Tokens that all begin with; 2000 if unset and they fit.")
    ] = None,
    input_len: Annotated[int, typer.Option(help="Tokens of each behind them.")] = 32,
    output_len: Annotated[int, typer.Option(help="Output tokens.")] = 16,
    *,
    result: Result,
) -> None:
    """First-token time of requests with one prefix, with and without prefix caching."""
    check_to_measure(engine)
    check_counts(1, MOST_REQUESTS, num_prompts=num_prompts)
    check_counts(1, input_len=input_len, output_len=output_len)
    if prefix_len is not None:
        check_counts(1, prefix_len=prefix_len)
    result.check()
    from ...bench.cases import measure_prefix

    llm = llm_to_measure({"enable_prefix_caching": True, **engine})
    if prefix_len is None:
        room = llm.engine.inputs.max_model_len - input_len - max(output_len, 2)
        prefix_len = min(_PREFIX_LEN, max(room, 1))
        if prefix_len < _PREFIX_LEN:
            result.say(f"a prefix of {prefix_len} tokens: more do not fit")
    measured = measure_prefix(llm.engine, num_prompts, prefix_len, input_len, output_len)
    rows = [["prefix", "mean TTFT, ms", "p50", "p99", "output tokens/s"]]
    for row in measured["rows"]:
        ttft = (row["ttft_ms"][name] for name in ("mean", "p50", "p99"))
        cells = [row["prefix"], *(f"{value:.2f}" for value in ttft)]
        rows.append([*cells, f"{row['output_tokens_per_s']:.0f}"])
    result.say(table(rows))
    result.say(
        f"first token {measured['speedup']:.1f} times sooner; {measured['identical']} of "
        f"{num_prompts} outputs identical"
    )
    result.keep(engine, **measured, engine=llm.report())
