"""Asks a server for completions at given times and stamps every event of every answer.

One connection for each open request, over asyncio streams: what a client package does beside that
would be measured too.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from ..config import UserError
from ..engine.process.awake import Awake
from .serving import RequestTimes, Run, measuring
from .workloads import Work

_T = TypeVar("_T")
_FIRST_TOKENS = 20
_PAUSE_S = 0.01
"""Seconds between two requests whose first token is timed: a lone request finds a device at
rest.  A server at rest for longer would capture graphs."""
_COUNTERS_S = 0.2
"""Time after which a server's counters are up to date, in seconds."""
_SUMS = {
    "queued_ms": "vllm:request_queue_time_seconds_sum",
    "engine_ms": "fusewright:step_busy_seconds_total",
    "api_ms": "vllm:time_to_first_token_seconds_sum",
}


@dataclass(frozen=True)
class HttpTarget:
    """The server that is measured, and how it is asked.

    Args:
        url: such as ``http://localhost:8000``.
        model: the name that requests carry.
        greedy: temperature 0, else 1.
    """

    url: str
    model: str
    api_key: str | None = None
    greedy: bool = True

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme != "http" or not parts.hostname:
            raise UserError(f"base_url={self.url!r}: expected http://HOST:PORT")

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return str(parts.hostname), parts.port or 80

    def body(self, work: Work) -> bytes:
        """A streamed completion of exactly the length asked for."""
        return msgspec.json.encode(
            {
                "model": self.model,
                "prompt": work.prompt_token_ids,
                "max_tokens": work.output_len,
                "temperature": 0 if self.greedy else 1,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )


@dataclass
class _Answer:
    """When an answer was due, when its events came, and how many tokens they had."""

    due: float
    num_prompt: int
    stamps: list[float] = field(default_factory=list)
    num_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw]
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Event).decode


def load(
    target: HttpTarget, works: Sequence[Work], times: Sequence[float], most_open: int | None = None
) -> Run:
    """Send each request at its time and read all answers.

    Args:
        most_open: requests that are open at once; others wait here, which counts as their time.

    Raises:
        UserError: the server cannot be reached, or answers with an error.
    """
    with measuring(len(works)) as advance:
        return _run_loop(_load(target, works, times, most_open, advance))


def _run_loop(work: Coroutine[Any, Any, _T]) -> _T:
    with suppress(ModuleNotFoundError):
        import uvloop

        return uvloop.run(work)
    return asyncio.run(work)


def first_tokens(target: HttpTarget, work: Work, count: int, pause_s: float) -> list[float]:
    """Times to the first token, in seconds, of requests one after another over one connection,
    with a pause before each.  This process does not sleep while it waits: what it would take to
    wake up is no part of what the server takes.

    Raises:
        UserError: the server answers with an error.
    """

    async def ask() -> list[float]:
        client, body, times = _Client(target), target.body(work), []
        awake = Awake(asyncio.get_running_loop())
        try:
            for _ in range(count):
                await asyncio.sleep(pause_s)
                awake.stay()
                answer = _Answer(time.perf_counter(), len(work.prompt_token_ids))
                await client.ask(body, answer)
                times.append(answer.stamps[0] - answer.due)
        finally:
            client.close()
        return times

    return _run_loop(ask())


def measure_first_token(target: HttpTarget, work: Work) -> dict[str, float]:
    """Times of a server's first token in milliseconds, over one connection.

    ``ttft_ms`` is the median that a client sees.  The others are means, each a part of the next:
    ``queued_ms`` from the API process until the engine has scheduled the prompt, ``engine_ms``
    from a prompt's launch to its result, ``api_ms`` from the API process until the token is back
    there.
    """
    first_tokens(target, work, 3, _PAUSE_S)
    before = _sums(target)
    times = first_tokens(target, work, _FIRST_TOKENS, _PAUSE_S)
    parts = {name: after - before[name] for name, after in _sums(target).items()}
    means = {name: round(seconds / _FIRST_TOKENS * 1e3, 3) for name, seconds in parts.items()}
    return {"ttft_ms": round(median(times) * 1e3, 3), **means}


def _sums(target: HttpTarget) -> dict[str, float]:
    time.sleep(_COUNTERS_S)
    text = get(target, "/metrics").decode()
    sums = dict.fromkeys(_SUMS, 0.0)
    for name, series in _SUMS.items():
        for labels, value in re.findall(rf"^{series}{{(.*)}} (\S+)$", text, re.MULTILINE):
            if 'step="decode"' not in labels:
                sums[name] += float(value)
    return sums


async def _load(
    target: HttpTarget,
    works: Sequence[Work],
    times: Sequence[float],
    most_open: int | None,
    advance: Callable[[int], None],
) -> Run:
    client = _Client(target)
    room = asyncio.Semaphore(most_open or len(works))
    bodies = [target.body(work) for work in works]
    start = time.perf_counter()

    async def ask(index: int) -> _Answer:
        due = start + times[index]
        if (left := due - time.perf_counter()) > 0:
            await asyncio.sleep(left)
        answer = _Answer(due, len(works[index].prompt_token_ids))
        async with room:
            await client.ask(bodies[index], answer)
        advance(1)
        return answer

    tasks = [asyncio.ensure_future(ask(index)) for index in range(len(works))]
    try:
        answers = await asyncio.gather(*tasks)
    except OSError as error:
        raise UserError(f"base_url={target.url}: {error}; is the server there?") from error
    finally:
        for task in tasks:
            task.cancel()
        client.close()
    return _run(time.perf_counter() - start, answers)


def _run(seconds: float, answers: Sequence[_Answer]) -> Run:
    run = Run(seconds, sum(a.num_prompt for a in answers), sum(a.num_tokens for a in answers))
    for answer in answers:
        stamps = answer.stamps
        gaps = [(b - a) * 1e3 for a, b in itertools.pairwise(stamps)]
        run.gaps.extend(gaps)
        after_first = max(1, answer.num_tokens - 1)
        run.requests.append(
            RequestTimes(
                ttft=(stamps[0] - answer.due) * 1e3,
                tpot=(stamps[-1] - stamps[0]) * 1e3 / after_first,
                e2e=(stamps[-1] - answer.due) * 1e3,
                itl=max(gaps, default=0.0),
            )
        )
    return run


class _Client:
    """Connections that are kept between requests."""

    def __init__(self, target: HttpTarget) -> None:
        self._target = target
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        key = f"authorization: Bearer {target.api_key}\r\n" if target.api_key else ""
        self._head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {urlsplit(target.url).netloc}\r\n{key}"
            "content-type: application/json\r\ncontent-length: "
        ).encode()

    async def ask(self, body: bytes, answer: _Answer) -> None:
        """Send a request and stamp the events of its answer."""
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection(*self._target.address)
        writer.write(self._head + str(len(body)).encode() + b"\r\n\r\n" + body)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise UserError(await _refusal(reader, writer, head))
        while size := int(await reader.readuntil(b"\r\n"), 16):
            piece = await reader.readexactly(size + 2)
            now = time.perf_counter()
            for event in _events(piece):
                if event.choices:
                    answer.stamps.append(now)
                if event.usage is not None:
                    answer.num_tokens = event.usage.completion_tokens
        await reader.readexactly(2)
        if not answer.stamps:
            raise UserError("the server has answered without a token")
        self._idle.append((reader, writer))

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


def _events(piece: bytes) -> Iterator[_Event]:
    for line in piece.split(b"\n"):
        if line.startswith(b"data: {"):
            try:
                yield _decode(line[6:])
            except msgspec.ValidationError:
                shown = line[6:206].decode("utf-8", "replace")
                raise UserError(f"the server has failed a request: {shown}") from None


async def _refusal(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> str:
    status = head.split(b"\r\n", 1)[0].decode("latin-1")
    with suppress(TimeoutError):
        text = await asyncio.wait_for(reader.read(500), 1)
        status += f": {text.decode('utf-8', 'replace')}"
    writer.close()
    return f"the server has refused a request: {status}"


def get_json(target: HttpTarget, path: str) -> Any:
    return msgspec.json.decode(get(target, path))


def get(target: HttpTarget, path: str) -> bytes:
    """Return the body of the answer to a ``GET``.

    Raises:
        UserError: the server is not there, or answers with an error.
    """
    import urllib.request
    from urllib.error import URLError

    request = urllib.request.Request(target.url.rstrip("/") + path)
    if target.api_key:
        request.add_header("authorization", f"Bearer {target.api_key}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=30) as answer:
            body: bytes = answer.read()
            return body
    except (URLError, OSError) as error:
        raise UserError(f"base_url={target.url}: {path}: {error}; is a server there?") from error
