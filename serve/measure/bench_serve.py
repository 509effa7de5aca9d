"""``fusewright bench serve``: what clients see of a server, and what the server costs."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...config import UserError
from ...config.numbers import check_counts
from ..console.flags import Json, Model, Output, engine_flags, takes_fields
from ..console.options import to_measure
from ..console.table import table
from .measured import check_outputs, fastest, keep, show_times
from .workload import GOODPUT_HELP, Workload

if TYPE_CHECKING:
    from ...bench.http_load import HttpTarget
    from ...bench.http_server import Server
    from ...bench.workloads import Work

_SINGLE_LEN = 1000
"""Prompt tokens of the request whose first token is timed."""


@engine_flags
@takes_fields(workload=Workload)
def serve(
    engine: dict[str, Any],
    model_argument: Model = None,
    *,
    base_url: Annotated[
        list[str] | None,
        typer.Option(
            help="A server that runs, or several; one of the engine options is started if unset."
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Model in requests; each server's first if unset.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Key of those servers.")] = None,
    workload: Workload,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Requests that are open at once.")
    ] = None,
    goodput: Annotated[list[str] | None, typer.Option(help=GOODPUT_HELP)] = None,
    repeats: Annotated[int, typer.Option(help="Runs of each, of which the best counts.")] = 1,
    offline: Annotated[
        bool, typer.Option("--offline", help="Compare with LLM.generate of the same requests.")
    ] = False,
    output: Output = None,
    json_output: Json = False,
    plot: Annotated[
        Path | None, typer.Option(help="Plot throughput over latency of each rate to this PNG.")
    ] = None,
) -> None:
    """Throughput and latencies of requests over HTTP; --offline: beside those of LLM.generate.

    Requests come all at once unless --request-rate is given.
    """
    options = to_measure({**workload.implied, **_warm(base_url), **engine}, model_argument)
    check_counts(1, repeats=repeats)
    if offline and (base_url or workload.rates):
        raise UserError("offline compares a server of its own, with all requests at once")
    check_outputs(output, plot)
    from ...bench.serving import parse_limits

    limits = parse_limits(goodput or [])
    works = workload.works(options)
    found: dict[str, Any] = {}
    single = works[0].__class__(_stretched(works, _SINGLE_LEN), 2)
    if offline:
        from ...bench.http_server import offline as without

        found["offline"] = without(options, works, single, max(repeats, 2))
    rows: list[dict[str, Any]] = []

    def measure(target: HttpTarget, server: Server | None) -> None:
        for rate in workload.rates or (inf,):
            row = _best(
                target, server, works, (rate, workload.burstiness), max_concurrency, repeats, limits
            )
            about = {"workload": workload.dataset, "request_rate": None if rate == inf else rate}
            if server is None:
                about["server"] = target.url
            rows.append({**about, **row})
            _show(rows[-1], err=json_output)
        if offline:
            found.update(_beside(found["offline"], rows[0], target, single))
            _show_beside(found, err=json_output)

    urls: list[str | None] = [*base_url] if base_url else [None]
    for url in urls:
        _with_server(options, url, served_model_name, api_key, measure)
    keep(output, json_output, options, plot, rows=rows, **found)


def _with_server(
    options: dict[str, Any],
    base_url: str | None,
    name: str | None,
    api_key: str | None,
    measure: Any,
) -> None:
    """Measure the server that runs, or one that is started for it."""
    from ...bench.http_load import HttpTarget, get_json

    if base_url is None:
        from ...bench.http_server import serving

        with serving(options) as server:
            measure(server.target, server)
        return
    target = HttpTarget(base_url.rstrip("/"), name or "", api_key)
    if name is None:
        listed = get_json(target, "/v1/models")
        target = HttpTarget(target.url, listed["data"][0]["id"], api_key)
    measure(target, None)


def _stretched(works: Sequence[Work], length: int) -> list[int]:
    """Tokens of several prompts, up to ``length`` or what the longest request has."""
    longest = max(len(work.prompt_token_ids) + work.output_len for work in works)
    ids = [token for work in works for token in work.prompt_token_ids]
    return ids[: min(length, max(1, longest - 2))]


def _best(
    target: HttpTarget,
    server: Server | None,
    works: Sequence[Work],
    arrival: tuple[float, float],
    most_open: int | None,
    repeats: int,
    limits: dict[str, float],
) -> dict[str, Any]:
    """The fastest run, after one that warms up."""
    from ...bench.http_load import arrivals, load

    load(target, works[: min(len(works), 64)], [0.0] * min(len(works), 64))
    tries = []
    for number in range(repeats):
        times = arrivals(len(works), *arrival, seed=number)
        before = server.cpu_s() if server else 0.0
        run = load(target, works, times, most_open)
        cpu_s = (server.cpu_s() if server else 0.0) - before
        tries.append((run, cpu_s / run.seconds))
    row, cores = fastest(tries, limits)
    if server is not None:
        row["api_process_cores"] = round(cores, 3)
    return row


def _warm(base_url: list[str] | None) -> dict[str, bool]:
    """Options of a server that is started: what it captures beside requests is no part of what it
    takes once it is warm."""
    return {} if base_url else {"lazy_capture": False}


def _beside(
    offline: dict[str, float], row: dict[str, Any], target: HttpTarget, single: Work
) -> dict[str, Any]:
    from ...bench.http_load import measure_first_token

    alone = measure_first_token(target, single)
    return {
        "of_offline": round(offline["seconds"] / row["seconds"], 4),
        "alone": alone,
        "added_ttft_ms": round(alone["ttft_ms"] - offline["ttft_ms"], 3),
    }


def _show_beside(found: dict[str, Any], *, err: bool) -> None:
    typer.echo(
        f"{found['of_offline']:.1%} of LLM.generate's throughput; a request alone has its first "
        f"token after {found['alone']['ttft_ms']:.2f} ms, {found['added_ttft_ms']:.2f} ms later",
        err=err,
    )
    rows = [["ms, a request alone", "first token", "in the API", "queued", "engine", "no pauses"]]
    for name, of in (("HTTP", found["alone"]), ("LLM.stream", found["offline"])):
        parts = ("ttft_ms", "api_ms", "queued_ms", "engine_ms", "ttft_hot_ms")
        rows.append([name, *(f"{of[part]:.2f}" if part in of else "" for part in parts)])
    typer.echo(table(rows), err=err)


def _show(row: dict[str, Any], *, err: bool) -> None:
    rate, server = row["request_rate"], row.get("server")
    offered = "all at once" if rate is None else f"{rate:g} requests/s offered"
    typer.echo(
        f"{f'{server}, ' if server else ''}{row['workload']}, {offered}: "
        f"{row['requests_per_s']:.2f} requests/s, {row['output_tokens_per_s']:.0f} output tokens/s",
        err=err,
    )
    show_times(row, err=err)
    if "goodput_per_s" in row:
        typer.echo(f"goodput {row['goodput_per_s']:.2f} requests/s", err=err)
    if "api_process_cores" in row:
        typer.echo(f"the API's process took {row['api_process_cores']:.2f} cores", err=err)
