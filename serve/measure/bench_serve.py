"""``fusewright bench serve``: what clients see of a server, and what the server costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...config import UserError
from ..console.flags import model_flags
from ..console.options import check_to_measure
from ..console.table import table
from .drafts import Acceptance, drafts_text, since, with_acceptance
from .measured import Result, fastest, times_table
from .workload import Runs, Workload

if TYPE_CHECKING:
    from ...bench.http_load import HttpTarget
    from ...bench.http_server import Server
    from ...bench.workloads import Work

_SINGLE_LEN = 1000
"""Prompt tokens of the request whose first token is timed."""


@dataclass(frozen=True)
class Servers:
    """Flags of the servers that are measured, and of who asks them."""

    base_url: Annotated[
        list[str] | None,
        typer.Option(
            help="A server that runs, or several; one of the engine options is started if unset."
        ),
    ] = None
    served_model_name: Annotated[
        str | None, typer.Option(help="Model in requests; each server's first if unset.")
    ] = None
    api_key: Annotated[str | None, typer.Option(help="Key of those servers.")] = None
    max_concurrency: Annotated[int | None, typer.Option(help="Requests that are open at once.")] = (
        None
    )

    def targets(self, options: dict[str, Any]) -> Iterator[tuple[HttpTarget, Server | None]]:
        """Each server that runs, or one that is started with ``options`` and ends with the
        iteration."""
        from ...bench.http_load import HttpTarget, get_json

        if not self.base_url:
            from ...bench.http_server import serving

            with serving(options) as server:
                yield server.target, server
            return
        for url in self.base_url:
            name = self.served_model_name
            target = HttpTarget(url.rstrip("/"), name or "", self.api_key)
            if name is None:
                listed = get_json(target, "/v1/models")
                target = HttpTarget(target.url, listed["data"][0]["id"], self.api_key)
            yield target, None


@model_flags
def serve(
    engine: dict[str, Any],
    *,
    servers: Servers,
    workload: Workload,
    runs: Runs,
    offline: Annotated[
        bool, typer.Option("--offline", help="Compare with LLM.generate of the same requests.")
    ] = False,
    acceptance: Acceptance = None,
    result: Result,
    plot: Annotated[
        Path | None, typer.Option(help="Plot throughput over latency, and TTFT, to this PNG.")
    ] = None,
) -> None:
    """Throughput and latencies of requests over HTTP; --offline: beside those of LLM.generate.

    Requests come at once, or at --request-rate; `bench throughput` uses no HTTP.
    """
    # What a server captures beside requests is no part of what it takes once it is warm.
    warm = {} if servers.base_url else {"lazy_capture": False}
    if acceptance is not None and servers.base_url:
        raise UserError("acceptance: is of a server that is started; leave base_url out")
    engine = with_acceptance(engine, acceptance)
    options = {**workload.implied, **warm, **engine}
    check_to_measure(options)
    if offline and (servers.base_url or workload.rates):
        raise UserError("offline compares a server of its own, with all requests at once")
    if servers.base_url and "model" not in engine:
        raise UserError(
            "base_url: name the model that the server has too, as the argument MODEL: its "
            "vocabulary and longest request decide the requests"
        )
    result.check(plot)
    from ...bench.serving import parse_limits
    from ...bench.workloads import arrivals

    limits = parse_limits(runs.goodput or [])
    works = workload.works(options, result.say)
    compared: dict[str, Any] = {}
    single = works[0].__class__(_stretched(works, _SINGLE_LEN), 2)
    if offline:
        from ...bench.http_server import offline as without

        compared["offline"] = without(options, works, single, max(runs.repeats, 2))
    rows: list[dict[str, Any]] = []
    for target, server in servers.targets(options):
        for rate in workload.rates or (inf,):
            about = workload.about(rate)
            if server is None:
                about["server"] = target.url
            times = [
                arrivals(len(works), rate, workload.burstiness, seed=number)
                for number in range(runs.repeats)
            ]
            before = _drafts(target, server)
            row = _best((target, server), works, times, servers.max_concurrency, limits)
            drafts = since(_drafts(target, server), before)
            rows.append({**about, **row} | ({"drafts": drafts} if drafts else {}))
            result.say(_text(rows[-1]))
            if drafts:
                result.say(drafts_text(drafts))
        if offline:
            compared |= _beside(compared["offline"], rows[0], target, single)
            result.say(_beside_text(compared))
    result.keep(options, plot, rows=rows, **compared)


def _drafts(target: HttpTarget, server: Server | None) -> dict[str, Any] | None:
    """What a server that was started reports of its drafts."""
    from ...bench.http_load import get_json

    if server is None:
        return None
    report: dict[str, Any] | None = get_json(target, "/server_info")["engines"][0]["drafts"]
    return report


def _stretched(works: Sequence[Work], length: int) -> list[int]:
    """Tokens of several prompts, up to ``length`` or what the longest request has."""
    longest = max(len(work.prompt_token_ids) + work.output_len for work in works)
    ids = [token for work in works for token in work.prompt_token_ids]
    return ids[: min(length, max(1, longest - 2))]


def _best(
    asked: tuple[HttpTarget, Server | None],
    works: Sequence[Work],
    times: Sequence[Sequence[float]],
    max_concurrency: int | None,
    limits: dict[str, float],
) -> dict[str, Any]:
    """The fastest run, after one that warms up; ``times`` are those of the requests of each."""
    from ...bench.http_load import load

    target, server = asked
    load(target, works[:64], [0.0] * len(works[:64]))
    tries = []
    for each in times:
        before = server.cpu_s() if server else 0.0
        run = load(target, works, each, max_concurrency)
        cpu_s = (server.cpu_s() if server else 0.0) - before
        tries.append((run, cpu_s / run.seconds))
    row, cores = fastest(tries, limits)
    if server is not None:
        row["api_process_cores"] = round(cores, 3)
    return row


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


def _beside_text(compared: dict[str, Any]) -> str:
    alone = compared["alone"]
    rows = [["ms, a request alone", "first token", "in the API", "queued", "engine", "no pauses"]]
    for name, of in (("HTTP", alone), ("LLM.stream", compared["offline"])):
        parts = ("ttft_ms", "api_ms", "queued_ms", "engine_ms", "ttft_hot_ms")
        rows.append([name, *(f"{of[part]:.2f}" if part in of else "" for part in parts)])
    return (
        f"{compared['of_offline']:.1%} of LLM.generate's throughput; a request alone has its first "
        f"token after {alone['ttft_ms']:.2f} ms, {compared['added_ttft_ms']:.2f} ms later\n"
        + table(rows)
    )


def _text(row: dict[str, Any]) -> str:
    rate, server = row["request_rate"], row.get("server")
    offered = "all at once" if rate is None else f"{rate:g} requests/s offered"
    heading = (
        f"{f'{server}, ' if server else ''}{row['workload']}, {offered}: "
        f"{row['requests_per_s']:.2f} requests/s, {row['output_tokens_per_s']:.0f} output tokens/s"
    )
    lines = [heading, times_table(row)]
    if "goodput_per_s" in row:
        lines.append(f"goodput {row['goodput_per_s']:.2f} requests/s")
    if "api_process_cores" in row:
        lines.append(f"the API's process took {row['api_process_cores']:.2f} cores")
    return "\n".join(lines)
