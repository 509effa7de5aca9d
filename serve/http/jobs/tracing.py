"""Spans of requests for OpenTelemetry, under vLLM's names, sent to a collector over HTTP.

A prompt has a span, from when it was queued to when its last output ended; a prompt that is aborted
has none.  A thread of OpenTelemetry's sends them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ....engine.frontend.loop import CheckedRequest
from ....engine.frontend.outputs import RequestOutput

_EXPORT_S = 3.0
"""Longest time that the collector may take, which is also how long it may hold up the end."""


@dataclass(frozen=True)
class _Begun:
    """A prompt whose outputs are generated; ``context`` is what the caller's span is part of."""

    name: str
    model: str
    context: Any
    request: CheckedRequest


class Tracing:
    """Makes a span of each prompt when it has finished.

    Args:
        endpoint: URL of the collector; without a path, OTLP's.
    """

    def __init__(self, endpoint: str) -> None:
        provider = TracerProvider(
            resource=Resource.create({"service.name": "fusewright"}), shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer, self.close = provider.get_tracer("fusewright"), provider.shutdown
        self._begun: dict[str, _Begun] = {}

    def begin(
        self, name: str, model: str, request: CheckedRequest, headers: Mapping[str, str]
    ) -> None:
        """Note a queued prompt, and what its caller said of a trace."""
        context = TraceContextTextMapPropagator().extract(headers)
        self._begun[request.request_id] = _Begun(name, model, context, request)

    def forget(self, request_ids: Iterable[str]) -> None:
        """No span is made of these prompts."""
        for request_id in request_ids:
            self._begun.pop(request_id, None)

    def end(self, output: RequestOutput) -> None:
        """Make the span of a prompt that has finished."""
        begun = self._begun.pop(output.request_id, None)
        if begun is None:
            return
        times = output.metrics
        # Spans are in the time of the calendar.
        epoch_s = time.time() - time.monotonic()
        span = self._tracer.start_span(
            "llm_request", begun.context, SpanKind.SERVER, start_time=_ns(epoch_s + times.arrival_s)
        )
        params = begun.request.request.sampling_params
        attributes: dict[str, Any] = {
            "gen_ai.request.id": begun.name,
            "gen_ai.response.model": begun.model,
            "gen_ai.request.n": begun.request.num_outputs,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
            "gen_ai.usage.completion_tokens": sum(len(c.token_ids) for c in output.outputs),
            "gen_ai.response.finish_reasons": [str(c.finish_reason) for c in output.outputs],
        }
        for name, start_s, end_s in (
            ("e2e", times.arrival_s, times.finished_s),
            ("time_in_queue", times.arrival_s, times.started_s),
            ("time_to_first_token", times.arrival_s, times.first_token_s),
            ("time_in_model_prefill", times.started_s, times.first_token_s),
            ("time_in_model_decode", times.first_token_s, times.finished_s),
            ("time_in_model_inference", times.started_s, times.finished_s),
        ):
            if start_s is not None and end_s is not None:
                attributes[f"gen_ai.latency.{name}"] = end_s - start_s
        span.set_attributes({k: v for k, v in attributes.items() if v is not None})
        if output.error is not None:
            span.set_status(StatusCode.ERROR, output.error)
        span.end(_ns(epoch_s + (times.finished_s or time.monotonic())))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
