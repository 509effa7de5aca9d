"""Claims about large bodies: they are parsed in a process of their own, whose death is a 400, and
have no more form than can be handled."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from fusewright.serve.http.endpoints.body import is_small
from fusewright.serve.http.endpoints.generation import is_little
from fusewright.serve.http.intake import reader as reader_module
from fusewright.serve.http.intake.errors import ApiError
from fusewright.serve.http.intake.protocol import ChatRequest, CompletionRequest
from fusewright.serve.http.intake.reader import BodyReader, too_much_form

from ..effort import calls
from .server_process import JSON, ServerProcess, send, wait_for

MANY = 70_000
TEXT = b'{"prompt": "' + b"[{:,}] " * 200_000 + b'"}'


@pytest.mark.parametrize(
    "data, expected",
    [
        (b"[" * (MANY) + b"]" * MANY, "lists and objects"),
        (b"[" + b"[1]," * MANY + b"1]", "lists and objects"),
        (b"[" + b"{}," * MANY + b"1]", "lists and objects"),
        (b"{" + b",".join(b'"k%d":1' % i for i in range(MANY)) + b"}", "fields"),
        (b"[" + b"1," * 2**20 + b"1]", "values"),
        (b"[" + b"1," * 1_000_000 + b"1]", ""),
        (TEXT, ""),
        (TEXT.replace(b"[", b'\\"'), ""),
        (TEXT + b"[" * MANY, "lists and objects"),
        (b'{"prompt": "' + b'\\"[' * MANY, ""),  # a text without an end: no JSON
        (b'"' + b"[" * MANY + b"\\", ""),
    ],
    ids=lambda value: f"{len(value)}-{value[:12]!r}" if isinstance(value, bytes) else None,
)
def test_form_is_counted_outside_of_texts(data: bytes, expected: str) -> None:
    message = too_much_form(data)
    assert (expected in message) if expected else not message


@pytest.mark.parametrize(
    "data, expected",
    [
        (b"[" * 4096, True),
        (b"1," * 32_000, True),
        (b"[1]," * 1024 + b" ", True),
        (b"[1]," * 2001, False),
        (b'"a":1,' * 2001, False),
        (b"{}," * 2001, False),
        (b"a" * 65537, False),
    ],
    ids=lambda value: f"{len(value)}-{value[:6]!r}" if isinstance(value, bytes) else None,
)
def test_what_takes_long_to_parse_is_not_small(data: bytes, expected: bool) -> None:
    assert is_small(bytearray(data)) is expected


def with_reader(work: Callable[[BodyReader], Awaitable[None]]) -> None:
    async def run() -> None:
        reader = BodyReader()
        try:
            await work(reader)
        finally:
            await reader.close()

    asyncio.run(run())


def test_a_reader_parses_refuses_and_survives_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The process that parses leaves the processors to all others, of which there may be many.
    monkeypatch.setattr(reader_module, "_PARSE_S", 300.0)

    async def refused(reader: BodyReader, data: bytes) -> str:
        with pytest.raises(ApiError) as error:
            async with reader.turn():
                await reader.parse(bytearray(data), CompletionRequest)
        assert error.value.status == 400
        return f"{error.value.param}: {error.value.message}"

    async def work(reader: BodyReader) -> None:
        text = '{"messages": [{"role": "user", "content": "%s"}]}' % ("é\\ud83d\\ude00" * 9)
        expected = [{"role": "user", "content": "é😀" * 9}]
        async with reader.turn():
            body = await reader.parse(bytearray(text.encode()), ChatRequest)
        assert body.messages == expected and body.model_fields_set == {"messages"}
        unknown = b'{"prompt": "1", "stream_options": {"x": 1}}'
        assert "no such field" in await refused(reader, unknown)
        async with reader.turn():
            body = await reader.parse(bytearray(b'{"messages": [], "x": [1]}'), ChatRequest)
        assert body.model_extra == {"x": [1]}
        assert "not JSON" in await refused(reader, b'{"prompt": ' + b"[" * 5000 + b"]" * 5000)
        assert "lists and objects" in await refused(reader, b"[" * MANY)
        process: Any = reader._process
        send(process.pid, signal.SIGSTOP)
        asking = asyncio.ensure_future(refused(reader, b'{"prompt": "1"}'))
        await asyncio.sleep(0.1)
        send(process.pid, signal.SIGKILL)
        assert "too much time or memory" in await asking
        async with reader.turn():
            again = await reader.parse(bytearray(b'{"prompt": "2"}'), CompletionRequest)
        assert again.prompt == "2"

    with_reader(work)


def test_others_are_served_while_a_large_body_is_parsed(
    server: ServerProcess, http: httpx.Client
) -> None:
    """The process that parses is stopped meanwhile: whatever else is served does not need it."""
    large = b'{"tokens": [' + b"40," * 100_000 + b"40]}"

    def sent() -> httpx.Response:
        with server.client(headers=http.headers) as client:
            return client.post("/detokenize", content=large, headers=JSON)

    first = sent()
    assert len(first.json()["prompt"]) >= 100_001
    (reader,) = server.children(".reader")
    answers: list[httpx.Response] = []
    send(reader, signal.SIGSTOP)
    try:
        thread = threading.Thread(target=lambda: answers.append(sent()))
        thread.start()
        for _ in range(3):
            good = http.post("/v1/completions", json={"prompt": "1+1=", "temperature": 0})
            assert good.json()["choices"][0]["text"] == "2"
            assert http.get("/health").status_code == 200
        assert not answers
    finally:
        send(reader, signal.SIGCONT)
    thread.join()
    assert answers[0].json() == first.json()
    send(reader, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{reader}").exists())
    assert sent().json() == first.json()


@pytest.mark.parametrize(
    ("values", "little"),
    [
        ([{"role": "user", "content": "x" * 700}], True),
        ([{"role": "user", "content": "x" * 1200}], False),
        ([{"role": "user", "content": [{"type": "text", "text": "1"}] * 5}], True),
        ([{"role": "user", "content": [{"type": "text", "text": "1"}] * 30_000}], False),
        ([{"role": "user", "content": None, "tool_calls": [{"arguments": "x" * 1200}]}], False),
        ({f"property {number}": {"type": "integer"} for number in range(3000)}, False),
        ((None, None, None), True),
    ],
)
def test_few_values_tell_whether_a_thread_works_on_them(values: Any, little: bool) -> None:
    """The event loop looks at few: 30,000 parts of a message took it 70 ms to measure."""
    assert is_little(values) is little
    assert calls(lambda: is_little(values)) < 1000
