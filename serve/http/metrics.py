"""``/metrics``: counts and latencies for Prometheus.

Series named ``vllm:`` mean what they mean there, so that its dashboards and benchmark tools work;
those named ``fusewright:`` are ours.  Latencies are counted a step at a time, in plain lists.
"""

from __future__ import annotations

import time
import uuid
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ...engine.frontend.loop import CheckedRequest
from ...engine.messages.requests import StepOutputs
from ...engine.process.client import EngineClient

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


class Histogram:
    """Counts values by upper bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str, labels: dict[str, str]) -> Metric:
        """The series as Prometheus reads them: each bucket holds those below it."""
        total, buckets = 0, []
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        family = HistogramMetricFamily(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


class _Open:
    """A running request: when it was queued, and when its last token came."""

    __slots__ = ("last_at", "num_prompt", "num_tokens", "queued_at")

    def __init__(self, queued_at: float, num_prompt: int) -> None:
        self.queued_at, self.num_prompt = queued_at, num_prompt
        self.last_at, self.num_tokens = 0.0, 0


class Metrics(Collector):
    """What has happened since the start.

    Args:
        model: the label ``model_name`` of all series.
        client: knows the engine's own counters.
    """

    def __init__(self, model: str, client: EngineClient) -> None:
        self._labels = {"model_name": model, "engine": "0"}
        self._client = client
        self._open: dict[str, _Open] = {}
        self._first, self._between = Histogram(_FIRST_TOKEN_S), Histogram(_BETWEEN_TOKENS_S)
        self._whole = Histogram(_WHOLE_S)
        self._prompt_len, self._output_len = Histogram(_TOKENS), Histogram(_TOKENS)
        self.finished: Counter[str] = Counter()
        """Outputs by why they ended."""
        self.num_prompt_tokens = self.num_output_tokens = 0
        self.refused = 0
        """Calls that were turned away because too many waited."""
        self.answers: Counter[tuple[str, int]] = Counter()
        """HTTP answers by path and status."""
        self.matched_sites: dict[str, int] = {}
        """Fused sites of each pass."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    @staticmethod
    def new_name() -> str:
        """A name that no other request has."""
        return uuid.uuid4().hex

    def on_submit(self, requests: Sequence[CheckedRequest]) -> None:
        """Note that requests are queued now."""
        now = time.monotonic()
        for request in requests:
            for each in request.requests:
                self._open[each.request_id] = _Open(now, len(each.prompt_token_ids))

    def on_close(self, requests: Sequence[CheckedRequest], *, aborted: bool) -> None:
        """Note that nobody follows these requests any more.  The core tells nothing of those that
        were aborted, or ended by a stop string."""
        now = time.monotonic()
        for request in requests:
            for each in request.requests:
                if not aborted:
                    self._end(each.request_id, "stop", now)
                elif self._open.pop(each.request_id, None) is not None:
                    self.finished["abort"] += 1

    def on_step(self, outputs: StepOutputs) -> None:
        """Count what a step has brought."""
        now = time.monotonic()
        if outputs.tokens is not None:
            for request_id in outputs.tokens.request_ids:
                request = self._open.get(request_id)
                if request is None:
                    continue
                if request.num_tokens:
                    self._between.add(now - request.last_at)
                else:
                    self._first.add(now - request.queued_at)
                    self.num_prompt_tokens += request.num_prompt
                request.last_at = now
                request.num_tokens += 1
                self.num_output_tokens += 1
        for finished in outputs.finished:
            self._end(finished.request_id, finished.reason, now)

    def _end(self, request_id: str, reason: str, now: float) -> None:
        request = self._open.pop(request_id, None)
        if request is not None:
            self.finished[reason] += 1
            self._whole.add(now - request.queued_at)
            self._prompt_len.add(request.num_prompt)
            self._output_len.add(request.num_tokens)

    def text(self) -> bytes:
        """All series, in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The series as they are now."""
        yield from self._latencies()
        yield self._counter("vllm:prompt_tokens", "Prompt tokens.", self.num_prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Output tokens.", self.num_output_tokens)
        ended = CounterMetricFamily(
            "vllm:request_success", "Outputs that ended.", labels=[*self._labels, "finished_reason"]
        )
        for reason, count in self.finished.items():
            ended.add_metric([*self._labels.values(), reason], count)
        yield ended
        yield from self._of_engine()
        yield from self._of_server()

    def _latencies(self) -> Iterator[Metric]:
        for histogram, name, text in (
            (self._first, "vllm:time_to_first_token_seconds", "Time to the first token."),
            (self._between, "vllm:inter_token_latency_seconds", "Time between two tokens."),
            (self._between, "vllm:time_per_output_token_seconds", "The same, by its older name."),
            (self._whole, "vllm:e2e_request_latency_seconds", "Time of a whole output."),
            (self._prompt_len, "vllm:request_prompt_tokens", "Prompt tokens of an output."),
            (self._output_len, "vllm:request_generation_tokens", "Tokens of an output."),
        ):
            yield histogram.family(name, text, self._labels)

    def _of_engine(self) -> Iterator[Metric]:
        counters = self._client.counters
        if counters is None:
            return
        core = counters.core
        used = 1 - core.num_free_kv_blocks / core.num_kv_blocks
        yield self._gauge("vllm:num_requests_running", "Outputs that run.", core.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Outputs that wait.", core.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used)
        for name, text, value in (
            ("vllm:prefix_cache_queries", "Tokens looked up.", core.num_prefix_tokens),
            ("vllm:prefix_cache_hits", "Tokens found in the cache.", core.num_prefix_hits),
            ("vllm:num_preemptions", "Preempted outputs.", core.num_preemptions),
            ("fusewright:step_seconds", "Time in steps.", counters.step_s),
            ("fusewright:rest_seconds", "Time without requests.", counters.rest_s),
        ):
            yield self._counter(name, text, value)
        steps = CounterMetricFamily(
            "fusewright:steps",
            "Steps by kind and by how they ran.",
            labels=[*self._labels, "step", "graph"],
        )
        for kind, count in counters.step_kinds.items():
            steps.add_metric([*self._labels.values(), *kind.split("/")], count)
        yield steps

    def _of_server(self) -> Iterator[Metric]:
        step, age_s = self._client.heartbeat.read()
        yield self._gauge("fusewright:heartbeat_age_seconds", "Since the engine moved.", age_s)
        yield self._gauge("fusewright:engine_step", "Steps since the start.", step)
        yield self._counter("fusewright:refused", "Calls refused under load.", self.refused)
        answers = CounterMetricFamily(
            "fusewright:http_requests", "Answers.", labels=[*self._labels, "path", "code"]
        )
        for (path, status), count in self.answers.items():
            answers.add_metric([*self._labels.values(), path, str(status)], count)
        yield answers
        sites = GaugeMetricFamily(
            "fusewright:fused_sites", "Matched sites of a pass.", labels=[*self._labels, "pass"]
        )
        for name, count in self.matched_sites.items():
            sites.add_metric([*self._labels.values(), name], count)
        yield sites

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


def matched_sites(report: dict[str, Any]) -> dict[str, int]:
    """Matches of each pass, from an engine's report."""
    return {each["name"]: each["matched"] for each in report["passes"]}
