"""Claims about traces: a collector gets a span of each prompt, as part of its caller's trace."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from .server_process import LONG, ServerProcess, wait_for

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A collector's address, and the spans that it got."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_address[1]}", spans
        served.shutdown()


def values(span: Any) -> dict[str, Any]:
    """The attributes of a span."""
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }


def test_every_prompt_that_finishes_has_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with collector() as (url, spans):
        server = ServerProcess("--otlp-endpoint", url).wait_ready()
        try:
            before_ns = time.time_ns()
            with server.client(headers={"traceparent": f"00-{TRACE}-{PARENT}-01"}) as client:
                body: dict[str, Any] = {"prompt": ["37+58=", "1+1="], "temperature": 0.01, "n": 2}
                answer = client.post("/v1/completions", json={**body, "max_tokens": 8}).json()
            with server.client() as client:
                messages = [{"role": "user", "content": "2+2="}]
                client.post("/v1/chat/completions", json={"messages": messages, "temperature": 0})
                with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as cut:
                    next(cut.iter_lines())
                aborted = 'vllm:request_success_total{engine="0",finished_reason="abort"'
                wait_for(lambda: aborted in client.get("/metrics").text)
                assert server.metric("vllm:request_queue_time_seconds_count") == 6
            assert server.stop() == 0
            after_ns = time.time_ns()
        finally:
            server.kill()
    first, second, chat = sorted(spans, key=lambda span: span.start_time_unix_nano)
    for span in (first, second):
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert values(span)["gen_ai.request.id"] == answer["id"]
        assert values(span)["gen_ai.request.n"] == 2
        assert values(span)["gen_ai.request.max_tokens"] == 8
    assert (chat.trace_id.hex() != TRACE, chat.parent_span_id) == (True, b"")
    prompts = [values(span)["gen_ai.usage.prompt_tokens"] for span in (first, second)]
    outputs = [values(span)["gen_ai.usage.completion_tokens"] for span in (first, second)]
    assert sum(prompts) == answer["usage"]["prompt_tokens"]
    assert sum(outputs) == answer["usage"]["completion_tokens"]
    for span in spans:
        found = values(span)
        assert (span.name, found["gen_ai.response.model"]) == ("llm_request", "abacus")
        reasons = [each.string_value for each in found["gen_ai.response.finish_reasons"].values]
        assert set(reasons) == {"stop"}
        times = {key: v for key, v in found.items() if key.startswith("gen_ai.latency.")}
        queue, first_token, prefill, decode, inference, whole = (
            times[f"gen_ai.latency.{name}"]
            for name in (
                *("time_in_queue", "time_to_first_token", "time_in_model_prefill"),
                *("time_in_model_decode", "time_in_model_inference", "e2e"),
            )
        )
        assert min(times.values()) >= 0
        assert queue + prefill == pytest.approx(first_token)
        assert prefill + decode == pytest.approx(inference)
        assert first_token + decode == pytest.approx(whole)
        assert before_ns <= span.start_time_unix_nano <= span.end_time_unix_nano <= after_ns


def test_an_address_that_is_no_collector_is_refused() -> None:
    server = ServerProcess("--otlp-endpoint", "localhost:4318")
    assert server.ended() == 2
    message = "error: otlp_endpoint='localhost:4318': expected http://HOST:PORT of a collector"
    assert server.lines == [message]
