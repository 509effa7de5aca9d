"""``fusewright run-batch``: the requests of an OpenAI batch file, and a file of their answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ...config import MachineError, UserError
from ..console.flags import model_flags
from ..console.options import checked, writable
from .ask import Server

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_AT_ONCE = 256
"""Requests that are open at once: as many as a step takes by default."""


@model_flags
def run_batch(
    engine: dict[str, Any],
    *,
    input_file: Annotated[
        Path,
        typer.Option(
            "-i",
            "--input-file",
            help='{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", '
            '"body": {…}} a line',
        ),
    ],
    output_file: Annotated[
        Path, typer.Option("-o", "--output-file", help="an answer a line, in the same order")
    ],
    url: Annotated[
        str | None, typer.Option(help="ask this server, http://HOST:PORT, and start none")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="the key that the server asks for")] = None,
) -> None:
    """Answer the requests of an OpenAI batch file, by a server that is started for them."""
    requests = read_requests(input_file)
    writable("output_file", output_file)
    with _server(engine, requests, url, api_key) as server:
        failed = 0
        with output_file.open("w") as written, ThreadPoolExecutor(_AT_ONCE) as pool:
            for number, answer in enumerate(pool.map(partial(_ask, server), requests)):
                record = {"id": f"batch_req_{number}", **answer}
                written.write(json.dumps(record, ensure_ascii=False) + "\n")
                failed += answer["error"] is not None or answer["response"]["status_code"] != 200
    typer.echo(f"{len(requests)} requests, {failed} of them failed: {output_file}", err=True)


def read_requests(file: Path) -> list[Mapping[str, Any]]:
    """The requests of a batch file.

    Raises:
        UserError: it cannot be read, or a line is no request; nothing is asked then.
    """
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"input_file={file}: cannot be read: {error}") from error
    requests, ids = [], set[str]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not JSON: {error}") from None
        match record:
            case {"custom_id": str(name), "url": str(url), "body": dict(body)}:
                pass
            case _:
                raise UserError(f"{where}: expected an object with custom_id, url and body")
        if url not in URLS:
            raise UserError(f"{where}: url={url!r}: expected one of {', '.join(URLS)}")
        if record.get("method", "POST") != "POST":
            raise UserError(f"{where}: method={record['method']!r}: expected POST")
        if body.get("stream"):
            raise UserError(f"{where}: stream: an answer of a batch is one line; leave it out")
        if name in ids:
            raise UserError(f"{where}: custom_id={name!r} is that of an earlier line")
        ids.add(name)
        requests.append(record)
    if not requests:
        raise UserError(f"input_file={file}: holds no request")
    return requests


@contextmanager
def _server(
    engine: dict[str, Any],
    requests: Sequence[Mapping[str, Any]],
    url: str | None,
    api_key: str | None,
) -> Iterator[Server]:
    if url is not None:
        if engine:
            flag = "--" + next(iter(engine)).replace("_", "-")
            raise UserError(f"{flag}: the server of --url has its own options; leave it out")
        yield Server(url, api_key)
        return
    if api_key is not None:
        raise UserError("--api-key: without --url the server is this command's own; leave it out")
    options = checked(engine, weights=True)
    from ...bench.http_server import serving
    from ...model_executor.hf_config import served_name

    named = (request["body"].get("model") for request in requests)
    names = dict.fromkeys([served_name(options.model), *(n for n in named if isinstance(n, str))])
    flags = [word for name in names for word in ("--served-model-name", name)]
    with serving(engine, flags) as server:
        yield Server(server.target.url)


def _ask(server: Server, request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request, without its id in the batch."""
    answer: dict[str, Any] = {"custom_id": request["custom_id"], "response": None, "error": None}
    try:
        status, body = server.post(request["url"], request["body"])
    except MachineError as error:
        return {**answer, "error": {"code": "no_answer", "message": str(error)}}
    name = body.get("id") if isinstance(body, dict) else None
    response = {"status_code": status, "request_id": name, "body": body}
    return {**answer, "response": response}
