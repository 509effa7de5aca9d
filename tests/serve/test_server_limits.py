"""Claims about what a connection may send: every part of a message is bounded in bytes and in time,
whoever sends it and whether or not anybody reads it."""

from __future__ import annotations

import asyncio
import itertools
import re
import resource
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from fusewright.config import BusyError, UserError
from fusewright.serve.http import life
from fusewright.serve.http.intake import connections, limits
from fusewright.serve.http.intake.connections import Connections, limited_by_files
from fusewright.serve.http.intake.errors import api_error
from fusewright.serve.http.intake.limits import Uploads
from fusewright.serve.http.life import Endpoint, _Http

MAX_BODY = 100_000
POST, GET = (b"%s HTTP/1.1\r\nhost: x\r\n" % line for line in (b"POST /read", b"GET /unread"))
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
WAIT_S = 300

Talk = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the size of the body at /read, and without a look at it elsewhere; the answer at
    /wait does not end."""
    size, goes_on = 0, scope["path"] == "/read"
    while goes_on:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, goes_on = size + len(message["body"]), message["more_body"]
    names = b",".join(name for name, _ in scope["headers"])
    text = b"%d %s" % (size, names)
    head = [(b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    while scope["path"] == "/wait" and (await receive())["type"] != "http.disconnect":
        pass
    await send({"type": "http.response.body", "body": text, "more_body": False})


def talk(
    work: Callable[[Callable[[], Awaitable[Talk]], Uploads], Awaitable[None]],
    certificate: tuple[str, str] | None = None,
    most: int = 1000,
) -> None:
    """Run ``work`` with what connects to a server of ``app`` with ``most`` connections, and with
    the server's counts."""

    async def serve() -> None:
        (listening,) = Endpoint("127.0.0.1", 0).bind()
        uploads = Uploads(MAX_BODY)
        files = dict(zip(("ssl_certfile", "ssl_keyfile"), certificate or (), strict=False))
        config = uvicorn.Config(app, ws="none", lifespan="off", log_level="error", **files)
        server = _Http(config, uploads, Connections(most))
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        try:
            async with asyncio.timeout(WAIT_S):
                await work(
                    lambda: asyncio.open_connection(*listening.getsockname()[:2], limit=2**20),
                    uploads,
                )
                while uploads.held:  # whoever was cut off holds nothing
                    await asyncio.sleep(0.01)
        finally:
            server.should_exit = True
            await serving

    asyncio.run(serve())


async def answers(connection: Talk, pieces: Iterable[bytes], *, pause_s: float = 0) -> list[bytes]:
    """The status and the body of each answer, until the server closes the connection."""
    reader, writer = connection

    async def send() -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)

    sending = asyncio.ensure_future(send())
    try:
        received = bytearray()
        try:
            while piece := await reader.read(65536):
                received += piece
        except ConnectionError:
            pass
        return re.findall(rb"HTTP/1\.1 (\d+)", received)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()


@pytest.mark.parametrize(
    "first, piece, expected",
    [
        (POST + CHUNKED + b"0\r\n", b"a: b\r\n" * 1000, [b"431"]),
        (POST + CHUNKED + b"0\r\na: ", b"b" * 6000, [b"431"]),
        (POST + CHUNKED, b"1;" + b"x" * 6000 + b"\r\ny\r\n", [b"413"]),
        (POST + CHUNKED + b"1;", b"x" * 6000, [b"431"]),
        (POST + CHUNKED, b"1\r\nx\r\n" * 1000, [b"400"]),
        (POST + CHUNKED, b"1770\r\n" + b"x" * 6000 + b"\r\n", [b"413"]),
        (POST + b"content-length: 1000000\r\n\r\n", b"x" * 6000, [b"413"]),
        (GET + b"content-length: 1000000\r\n\r\n", b"x" * 6000, [b"200"]),
        (GET + b"content-length: 1000000\r\nupgrade: h2c\r\n\r\n", b"x" * 6000, [b"200"]),
        (GET, b"a: b\r\n" * 1000, [b"431"]),
        (GET + b"a: ", b"b" * 6000, [b"431"]),
        (b"", b"\r\n" * 3000, [b"431"]),
        (b"GET /", b"x" * 6000, [b"431"]),
    ],
    ids=[
        "small trailers",
        "one long trailer",
        "extensions of chunks",
        "one long extension",
        "small chunks",
        "chunks",
        "a declared body",
        "a body that nobody reads",
        "a body beside an upgrade",
        "many headers",
        "one long header",
        "blank lines",
        "a long URL",
    ],
)
def test_what_has_no_end_is_cut_off(first: bytes, piece: bytes, expected: list[bytes]) -> None:
    async def work(connect: Callable[[], Awaitable[Talk]], uploads: Uploads) -> None:
        endless = itertools.chain([first], itertools.repeat(piece))
        assert await answers(await connect(), endless) == expected

    talk(work)


@pytest.mark.parametrize(
    "first, piece, expected",
    [
        (b"", b"", [b"408"]),
        (GET, b"a: b\r\n", [b"408"]),
        (b"", b"\r\n", [b"408"]),
        (GET + b"\r\n", b"\r\n", [b"200", b"408"]),
        (GET + b"\r\nGET", b"", [b"200", b"408"]),
        (GET + b"content-length: 1000\r\n\r\n", b"x", [b"200"]),
        (GET + CHUNKED + b"0\r\n", b"a: b\r\n", [b"200"]),
        (POST + b"content-length: 1000\r\n\r\n", b"x", [b"408"]),
        (POST + CHUNKED + b"0\r\n", b"a: b\r\n", [b"408"]),
        (POST + b"expect: 100-continue\r\ncontent-length: 9\r\n\r\n", b"", [b"100", b"408"]),
    ],
    ids=[
        "nothing",
        "headers",
        "blank lines",
        "blank lines behind a request",
        "a second request",
        "the body of a GET",
        "the trailers of a GET",
        "a body",
        "trailers",
        "a body that is waited for",
    ],
)
def test_what_trickles_in_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, first: bytes, piece: bytes, expected: list[bytes]
) -> None:
    monkeypatch.setattr(limits, "HEAD_S", 0.3)
    monkeypatch.setattr(limits, "BODY_S", 0.3)

    async def work(connect: Callable[[], Awaitable[Talk]], uploads: Uploads) -> None:
        endless = itertools.chain([first], itertools.repeat(piece))
        assert await answers(await connect(), endless, pause_s=0.05) == expected

    talk(work)


def test_a_trailer_is_no_header_and_a_body_in_pieces_is_read() -> None:
    async def work(connect: Callable[[], Awaitable[Talk]], uploads: Uploads) -> None:
        reader, writer = await connect()
        for byte in POST + CHUNKED + b"3;a=b\r\nabc\r\n2\r\nde\r\n0\r\nauthorization: x\r\n\r\n":
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        await reader.readuntil(b"\r\n\r\n")
        expected = b"5 host,transfer-encoding"
        assert await reader.readexactly(len(expected)) == expected
        writer.close()

    talk(work)


@pytest.mark.parametrize("count, answered", [(8, 8), (1000, 0)])
def test_few_requests_may_wait_on_a_connection(count: int, answered: int) -> None:
    async def work(connect: Callable[[], Awaitable[Talk]], uploads: Uploads) -> None:
        requests = [(GET + b"\r\n") * (count - 1) + GET + b"connection: close\r\n\r\n"]
        assert await answers(await connect(), requests) == [b"200"] * answered

    talk(work)


def test_the_oldest_unfinished_message_makes_room_for_others() -> None:
    """The connections together hold as much as 32 bodies; one that sends at once is served."""

    async def work(connect: Callable[[], Awaitable[Talk]], uploads: Uploads) -> None:
        held = []
        for _ in range(40):
            reader, writer = await connect()
            writer.write(POST + b"content-length: 95000\r\n\r\n" + b"x" * 90_000)
            await writer.drain()
            held.append((reader, writer))
        for _ in range(2):
            body = POST + b"connection: close\r\ncontent-length: 90000\r\n\r\n" + b"x" * 90_000
            assert await answers(await connect(), [body]) == [b"200"]
        assert uploads.held <= uploads.most
        assert await answers(held[0], []) == [b"503"]
        for connection in held[20:]:
            connection[1].write(b"x" * 5000)
        assert (await held[-1][0].readline()).startswith(b"HTTP/1.1 200 ")
        for _, writer in held:
            writer.close()

    talk(work)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl for a certificate")
def test_a_tls_handshake_without_end_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(life, "HEAD_S", 0.3)
    files = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"),
            *("-out", files[0], "-keyout", files[1]),
        ],
        check=True,
        capture_output=True,
    )

    async def work(connect: Callable[[], Awaitable[Talk]], uploads: Uploads) -> None:
        hello = bytes.fromhex("16030100f8010000f40303")  # the begin of 248 bytes
        for first in (b"", hello):
            assert await answers(await connect(), [first]) == []

    talk(work, files)


@pytest.mark.parametrize(
    "first, expected",
    [
        (POST + b"content-length: 900000\r\n\r\n", [b"413"]),
        (POST + CHUNKED + b"dbba0\r\n", [b"413"]),
        (GET + b"content-length: 900000\r\n\r\n", [b"200"]),
        (b"\0\r\n\r\n", [b"400"]),
    ],
    ids=["a declared body", "chunks", "a body that nobody reads", "no HTTP"],
)
def test_a_client_that_is_still_sending_reads_its_refusal(
    monkeypatch: pytest.MonkeyPatch, first: bytes, expected: list[bytes]
) -> None:
    """One that reads only behind its last byte, as most do: a reset would lose the answer."""
    monkeypatch.setattr(connections, "QUIET_S", float(WAIT_S))  # a machine may pause

    async def work(connect: Callable[[], Awaitable[Talk]], uploads: Uploads) -> None:
        reader, writer = await connect()
        writer.write(first)
        for _ in range(9):
            writer.write(b"x" * 100_000)
            await writer.drain()
            await asyncio.sleep(0.02)
        assert re.findall(rb"HTTP/1\.1 (\d+)", await reader.read()) == expected
        writer.close()

    talk(work)


def test_a_client_that_never_stops_sending_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """By bytes, else by time."""
    monkeypatch.setattr(connections, "LINGER_S", 0.3)
    monkeypatch.setattr(connections, "QUIET_S", 0.2)

    async def work(connect: Callable[[], Awaitable[Talk]], uploads: Uploads) -> None:
        for piece, pause_s in ((b"x" * 100_000, 0.0), (b"x", 0.02)):
            _, writer = await connect()
            writer.write(POST + b"content-length: 10000000\r\n\r\n" + b"x" * 200_000)
            with pytest.raises(ConnectionError):
                while True:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(pause_s)

    talk(work)


def test_idle_connections_make_room_and_those_beyond_the_limit_are_told() -> None:
    async def work(connect: Callable[[], Awaitable[Talk]], uploads: Uploads) -> None:
        idle, partial = await connect(), await connect()
        partial[1].write(POST + b"content-length: 9\r\n\r\nx")
        await asyncio.sleep(0.05)
        busy = []
        for _ in range(3):  # answers that go on
            busy.append(await connect())
            busy[-1][1].write(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await busy[-1][0].readline()).startswith(b"HTTP/1.1 200 ")
        assert await idle[0].read() == b""
        assert await answers(partial, []) == [b"503"]
        assert await answers(await connect(), [GET + b"\r\n"]) == [b"503"]
        assert await answers(await connect(), []) == [b"503"]
        busy[0][1].close()
        once = [GET + b"connection: close\r\n\r\n"]
        while await answers(await connect(), once) != [b"200"]:
            await asyncio.sleep(0.05)  # the server has not seen yet that a client is gone
        for _, writer in busy:
            writer.close()

    talk(work, most=3)


def test_as_many_connections_as_files_may_be_open() -> None:
    assert limited_by_files(10) == 10
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        assert limited_by_files(2**40) < hard


def test_what_may_succeed_later_is_a_503_that_says_when() -> None:
    """As a grammar while many others are compiled; a grammar that is bad is a 400."""
    answer = api_error(BusyError("grammar: 64 others are being compiled; send it again later"))
    assert (answer.status, answer.code) == (503, "overloaded")
    assert answer.headers == {"retry-after": "1"}
    assert api_error(UserError("grammar: no text satisfies it")).status == 400
