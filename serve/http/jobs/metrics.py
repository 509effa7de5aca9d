"""``/metrics``: counts and latencies for Prometheus.

Series named ``vllm:`` mean what they mean there, so that its dashboards and benchmark tools work;
those named ``fusewright:`` are ours.  Latencies are counted a step at a time, in plain lists.
Several API processes over the same engines add up what each of them has counted.
"""

from __future__ import annotations

import time
import uuid
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import astuple
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ....engine.frontend.loop import CheckedRequest
from ....engine.messages.open_outputs import OpenOutputs, output_id
from ....engine.messages.requests import StepOutputs
from ....engine.process.client import EngineClient
from ....engine.process.wire import Counters
from . import draft_metrics

_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN_TOKENS_S = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_WHOLE_S = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(1 << n) for n in range(18))
TALLY = "tally"
"""The question with which an API process asks the others for their counts."""
PEERS_S = 5.0
"""Longest time that another API process may take to answer."""
_counter, _gauge = CounterMetricFamily, GaugeMetricFamily
_MORE_LABELS = {
    "fusewright:steps": ("step", "graph"),
    "fusewright:step_phase_seconds": ("phase",),
    "fusewright:step_read_bytes": ("step",),
    "fusewright:step_busy_seconds": ("step",),
    "fusewright:copy_ceiling_unknown": ("why",),
    "fusewright:mixed_steps": ("prompt_tokens",),
    **draft_metrics.LABELS,
}


class Histogram(Struct):
    """Counts values by upper bounds."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @classmethod
    def over(cls, bounds: tuple[float, ...]) -> Histogram:
        return cls(bounds, [0] * (len(bounds) + 1))

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def __add__(self, other: Histogram) -> Histogram:
        counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        return Histogram(self.bounds, counts, self.total + other.total)

    def family(self, name: str, text: str, labels: dict[str, str]) -> Metric:
        """The series as Prometheus reads them: each bucket holds those below it."""
        total, buckets = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        family = HistogramMetricFamily(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, self.total)
        return family


class Tally(Struct):
    """What an API process has counted.

    Attributes:
        finished: outputs by why they ended.
        refused: calls that were turned away because too many waited.
        answers: HTTP answers by "status path".
        open: outputs that were sent to an engine, or are still prepared, by its number.
    """

    queued: Histogram = field(default_factory=partial(Histogram.over, _WHOLE_S))
    first: Histogram = field(default_factory=partial(Histogram.over, _FIRST_TOKEN_S))
    between: Histogram = field(default_factory=partial(Histogram.over, _BETWEEN_TOKENS_S))
    whole: Histogram = field(default_factory=partial(Histogram.over, _WHOLE_S))
    prompt_len: Histogram = field(default_factory=partial(Histogram.over, _TOKENS))
    output_len: Histogram = field(default_factory=partial(Histogram.over, _TOKENS))
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    refused: int = 0
    finished: dict[str, int] = field(default_factory=Counter)
    answers: dict[str, int] = field(default_factory=Counter)
    open: dict[str, int] = field(default_factory=Counter)

    def __add__(self, other: Tally) -> Tally:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Tally(*(_added(mine, theirs) for mine, theirs in pairs))


def _added(mine: Any, theirs: Any) -> Any:
    return Counter(mine) + Counter(theirs) if isinstance(mine, dict) else mine + theirs


class _Asked:
    """A request that runs: when it was queued, and the tokens of its prompt."""

    __slots__ = ("num_prompt", "queued_at")

    def __init__(self, queued_at: float, num_prompt: int) -> None:
        self.queued_at, self.num_prompt = queued_at, num_prompt


class _Begun:
    """An output that has tokens: how many, and when the last of them came."""

    __slots__ = ("last_at", "num_tokens")

    def __init__(self) -> None:
        self.last_at, self.num_tokens = 0.0, 0


class Metrics(Collector):
    """What has happened since the start.

    Args:
        model: the label ``model_name`` of all series.
        client: knows the engines' own counters.
    """

    def __init__(self, model: str, client: EngineClient) -> None:
        self._labels = {"model_name": model, "engine": "0"}
        self._client = client
        self._open = OpenOutputs[_Asked]()
        self._begun: dict[str, _Begun] = {}
        self.num_preparing = 0
        """Outputs whose prompts are being encoded."""
        self.tally = Tally()
        self._shown = self.tally
        self.reports: list[dict[str, Any]] = []
        """What each engine has said of itself once it had started."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    @staticmethod
    def new_name() -> str:
        """A name that no other request has."""
        return uuid.uuid4().hex

    def on_submit(self, requests: Sequence[CheckedRequest], now: float) -> None:
        """Note that requests were queued at ``now``, by ``time.monotonic()``."""
        for each in requests:
            asked = _Asked(now, len(each.request.prompt_token_ids))
            self._open.add(each.request_id, asked, each.num_outputs)

    def on_close(self, requests: Sequence[CheckedRequest], *, aborted: bool) -> None:
        """Note that nobody follows these requests any more.  The core tells nothing of those that
        were aborted, or ended by a stop string."""
        now = time.monotonic()
        for each in requests:
            closed = self._open.close(each.request_id)
            if closed is None:
                continue
            asked, indices = closed
            for index in indices:
                begun = self._begun.pop(output_id(each.request_id, index, each.num_outputs), None)
                if not aborted:
                    self._end(asked, begun, "stop", now)
            if aborted:
                self.tally.finished["abort"] += len(indices)

    def on_step(self, outputs: StepOutputs) -> None:
        now, tally, begun = time.monotonic(), self.tally, self._begun
        for name, started_s in outputs.started.items():
            if (asked := self._open.get(name)) is not None:
                tally.queued.add(started_s - asked.queued_at)
        if outputs.tokens is not None:
            for name in outputs.tokens.request_ids:
                output = begun.get(name)
                if output is not None:
                    tally.between.add(now - output.last_at)
                elif (asked := self._open.get(name)) is not None:
                    output = begun[name] = _Begun()
                    tally.first.add(now - asked.queued_at)
                    tally.num_prompt_tokens += asked.num_prompt
                else:
                    continue
                output.last_at = now
                output.num_tokens += 1
                tally.num_output_tokens += 1
        for finished in outputs.finished:
            output = begun.pop(finished.request_id, None)
            if (closed := self._open.close(finished.request_id)) is not None:
                self._end(closed[0], output, finished.reason, now)

    def _end(self, asked: _Asked, output: _Begun | None, reason: str, now: float) -> None:
        tally = self.tally
        tally.finished[reason] += 1
        tally.whole.add(now - asked.queued_at)
        tally.prompt_len.add(asked.num_prompt)
        tally.output_len.add(0 if output is None else output.num_tokens)

    def count(self) -> Tally:
        open_at = {str(i): self._client.num_open_at(i) for i in range(len(self._client.replicas))}
        # The next request goes where the fewest are.
        open_at[min(open_at, key=open_at.__getitem__)] += self.num_preparing
        self.tally.open = Counter(open_at)
        return self.tally

    async def gather(self) -> bytes:
        """All series, in Prometheus' text format, over all API processes.

        Raises:
            TimeoutError: one has not answered in time.
        """
        self._shown = await self.total()
        return generate_latest(self._registry)

    async def total(self) -> Tally:
        """What all API processes have counted.

        Raises:
            TimeoutError: one has not answered in time.
        """
        facts = await self._client.peers.ask(TALLY, [], PEERS_S)
        return sum((msgspec.convert(each, Tally) for each in facts), self.count())

    def collect(self) -> Iterator[Metric]:
        tally = self._shown
        yield from self._latencies(tally)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens.", tally.num_prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Output tokens.", tally.num_output_tokens)
        ended = CounterMetricFamily(
            "vllm:request_success", "Outputs that ended.", labels=[*self._labels, "finished_reason"]
        )
        for reason, count in tally.finished.items():
            ended.add_metric([*self._labels.values(), reason], count)
        yield ended
        yield from self._of_engines()
        yield from self._of_server(tally)

    def _latencies(self, tally: Tally) -> Iterator[Metric]:
        for histogram, name, text in (
            (tally.queued, "vllm:request_queue_time_seconds", "Time until an output began."),
            (tally.first, "vllm:time_to_first_token_seconds", "Time to the first token."),
            (tally.between, "vllm:inter_token_latency_seconds", "Time between two tokens."),
            (tally.between, "vllm:time_per_output_token_seconds", "The same, by its older name."),
            (tally.whole, "vllm:e2e_request_latency_seconds", "Time of a whole output."),
            (tally.prompt_len, "vllm:request_prompt_tokens", "Prompt tokens of an output."),
            (tally.output_len, "vllm:request_generation_tokens", "Tokens of an output."),
        ):
            yield histogram.family(name, text, self._labels)

    def _of_engines(self) -> Iterator[Metric]:
        families: dict[str, Any] = {}
        for number, replica in enumerate(self._client.replicas):
            labels = {**self._labels, "engine": str(number)}
            step, age_s = replica.heartbeat.read()
            series = [
                (_gauge, "fusewright:heartbeat_age_seconds", "Since the engine moved.", age_s),
                (_gauge, "fusewright:engine_step", "Steps since the start.", step),
            ]
            if replica.counters is not None:
                series += _of_counters(replica.counters, self._shown.open.get(str(number), 0))
            if self.reports:
                series += ceilings(self.reports[number])
            for make, name, text, value in series:
                names = [*labels, *_MORE_LABELS.get(name, ())]
                family = families.setdefault(name, make(name, text, labels=names))
                for more, each in value.items() if isinstance(value, dict) else [((), value)]:
                    family.add_metric([*labels.values(), *more], each)
        yield from families.values()

    def _of_server(self, tally: Tally) -> Iterator[Metric]:
        yield self._counter("fusewright:refused", "Calls refused under load.", tally.refused)
        answers = CounterMetricFamily(
            "fusewright:http_requests", "Answers.", labels=[*self._labels, "path", "code"]
        )
        for name, count in tally.answers.items():
            status, _, path = name.partition(" ")
            answers.add_metric([*self._labels.values(), path, status], count)
        yield answers
        sites = GaugeMetricFamily(
            "fusewright:fused_sites", "Matched sites of a pass.", labels=[*self._labels, "pass"]
        )
        for each in self.reports[0]["passes"] if self.reports else ():
            sites.add_metric([*self._labels.values(), each["name"]], each["matched"])
        yield sites

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


def _of_counters(counters: Counters, num_open: int) -> list[tuple[Any, str, str, Any]]:
    """(kind, name, text, value) of the series of an engine; a dict has a value a label.

    Args:
        num_open: outputs that the API processes wait for: some may be on their way to the engine.
    """
    core = counters.core
    num_waiting = max(core.num_waiting + counters.num_backlog, num_open - core.num_running)
    used = 1 - core.num_free_kv_blocks / core.num_kv_blocks
    kinds = {tuple(kind.split("/")): count for kind, count in counters.step_kinds.items()}
    phases, busy_s, read_bytes = (
        {(label,): value for label, value in sums.items()}
        for sums in (core.phase_s, core.busy_s, core.read_bytes)
    )
    chunks = {(str(size),): count for size, count in core.chunk_sizes.items()}
    over = core.num_over_bound
    return [
        (_gauge, "vllm:num_requests_running", "Outputs that run.", core.num_running),
        (_gauge, "vllm:num_requests_waiting", "Outputs that wait.", num_waiting),
        (_gauge, "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used),
        (_counter, "vllm:prefix_cache_queries", "Tokens looked up.", core.num_prefix_tokens),
        (_counter, "vllm:prefix_cache_hits", "Tokens found in the cache.", core.num_prefix_hits),
        (_counter, "vllm:num_preemptions", "Preempted outputs.", core.num_preemptions),
        (_counter, "fusewright:step_seconds", "Time in steps.", counters.step_s),
        (_counter, "fusewright:step_phase_seconds", "Time in steps by phase.", phases),
        (_counter, "fusewright:step_busy_seconds", "Time that steps took.", busy_s),
        (_counter, "fusewright:step_read_bytes", "Bytes that steps had to read.", read_bytes),
        (_counter, "fusewright:mixed_steps", "Steps of decodes and prompts by size.", chunks),
        (_counter, "fusewright:steps_over_bound", "Of these, longer than --max-step-ms.", over),
        (_counter, "fusewright:idle_seconds", "Time without a step in flight.", core.idle_s),
        (_counter, "fusewright:rest_seconds", "Time without requests.", counters.rest_s),
        (_counter, "fusewright:steps", "Steps by kind and by how they ran.", kinds),
        *draft_metrics.of_drafts(core.drafts),
    ]


def ceilings(report: dict[str, Any]) -> list[tuple[Any, str, str, Any]]:
    """The series of what an engine's device can copy, as of ``_of_counters``: its measured rate, or
    why there is none."""
    rate, hardware = report["reads"]["copy_tb_s"], report["hardware"]
    why = f"no device table has the copy rate of {hardware}"
    return [
        (
            _gauge,
            "fusewright:copy_ceiling_bytes_per_second",
            "Measured copy rate of the device.",
            {(): rate * 1e12} if rate else {},
        ),
        (
            _gauge,
            "fusewright:copy_ceiling_unknown",
            "1 where the rate is not measured.",
            {} if rate else {(why,): 1},
        ),
    ]
