"""``fusewright serve``: OpenAI's API over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from ...config import MachineError, UserError
from ...config.numbers import check_counts, check_number
from ...engine.ranks.torchrun import join_torchrun
from ..console.failure import say
from ..console.flags import Model, engine_flags, strings
from ..console.options import checked, merge
from ..http.intake.hosts import checked_hosts

PARSERS = ("auto", "hermes", "llama3_json", "mistral", "qwen3_coder", "xlam")
_MOST_PROCESSES = 64
_EXTRA = ("fastapi", "uvicorn", "uvloop", "httptools", "zmq", "prometheus_client")

_AdminKeys = Annotated[
    list[str] | None,
    typer.Option(help="A key that may also abort the requests of all (repeatable)."),
]
_AdminKeyFile = Annotated[Path | None, typer.Option(help="File of such keys, one a line.")]
_Origins = Annotated[
    str | None, typer.Option(help="Origins whose web pages may ask, separated by commas; *: all.")
]
_Connections = Annotated[
    int, typer.Option(help="Connections that an API process keeps open; 503 beyond.")
]
_Hosts = Annotated[
    list[str] | None,
    typer.Option(
        help="Public host name of the server, or *.NAME (repeatable); others are refused then, as "
        "they are on a loopback address."
    ),
]


@engine_flags
def serve(
    engine: dict[str, Any],
    model_argument: Model = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key that requests must bring (repeatable).")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File of such keys, one a line; no process list shows them.")
    ] = None,
    admin_api_key: _AdminKeys = None,
    admin_api_key_file: _AdminKeyFile = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name of the model in requests (repeatable).")
    ] = None,
    api_server_count: Annotated[
        int, typer.Option(help="Processes that serve HTTP, over the same engines.")
    ] = 1,
    data_parallel_size: Annotated[
        int, typer.Option(help="Engines, with the whole model each, behind the same API.")
    ] = 1,
    max_waiting_requests: Annotated[
        int, typer.Option(help="Outputs that may wait; more are refused with 503.")
    ] = 16384,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that open requests have after SIGTERM.")
    ] = 60.0,
    stall_timeout: Annotated[
        float, typer.Option(help="Seconds without a step until /health says 503.")
    ] = 10.0,
    max_body_mb: Annotated[float, typer.Option(help="Largest body of a request, in MiB.")] = 8.0,
    limit_concurrency: _Connections = 16384,
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="Collector of OpenTelemetry traces: http://HOST:4318.")
    ] = None,
    allowed_origins: _Origins = None,
    allowed_host: _Hosts = None,
    tool_call_parser: Annotated[
        str, typer.Option(help=f"How the model calls tools: {', '.join(PARSERS)}.")
    ] = "auto",
    ssl_certfile: Annotated[Path | None, typer.Option(help="Certificate: serves HTTPS.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its private key.")] = None,
) -> None:
    """Serve OpenAI's API over HTTP, with the engine in a process of its own.

    SIGTERM or Ctrl-C lets open requests finish; a second one ends them with an answer.
    """
    asked = checked(merge(engine, model=model_argument), weights=True)
    join_torchrun(asked.tensor_parallel_size, asked.pipeline_parallel_size)
    check_counts(0, 65535, port=port)
    check_counts(0, max_waiting_requests=max_waiting_requests)
    counts = {"api_server_count": api_server_count, "data_parallel_size": data_parallel_size}
    check_counts(1, _MOST_PROCESSES, **counts)
    check_counts(1, limit_concurrency=limit_concurrency)
    check_number(stall_timeout=stall_timeout, max_body_mb=max_body_mb)
    if not shutdown_timeout >= 0:
        raise UserError(f"shutdown_timeout={shutdown_timeout}: expected 0 or more seconds")
    tool_format = _tool_format(tool_call_parser)
    certificate, private_key = _certificate(ssl_certfile, ssl_keyfile)
    keys = _keys("api_key", api_key or [], api_key_file)
    admin_keys = _keys("admin_api_key", admin_api_key or [], admin_api_key_file)
    life, state = _import()
    settings = state.Settings(
        model_names=tuple(served_model_name or [asked.model]),
        api_keys=keys,
        admin_keys=admin_keys,
        max_waiting=max_waiting_requests,
        shutdown_timeout_s=shutdown_timeout,
        stall_s=stall_timeout,
        max_body_bytes=int(max_body_mb * 2**20),
        max_connections=limit_concurrency,
        allowed_origins=strings(allowed_origins or ""),
        allowed_hosts=checked_hosts(allowed_host) if allowed_host else None,
        otlp_endpoint=_collector(otlp_endpoint),
        tool_format=tool_format,
    )
    endpoint = life.Endpoint(host, port, certificate, private_key)
    life.run_server(asked, settings, endpoint, say, api_server_count, data_parallel_size)


def _import() -> tuple[Any, Any]:
    """The modules that serve HTTP, which import packages that the engine does not need.

    Raises:
        MachineError: one of them is not installed.
    """
    try:
        from ..http import life
        from ..http.jobs import state
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        raise MachineError(
            f"the server needs the package {error.name}: pip install 'fusewright[serve]'"
        ) from error
    return life, state


def _tool_format(parser: str) -> str | None:
    """The format of a tool call parser; None: as the chat template shows.

    Raises:
        UserError: there is no such parser.
    """
    if parser not in PARSERS:
        raise UserError(f"tool_call_parser={parser!r}: expected one of {', '.join(PARSERS)}")
    return None if parser == "auto" else parser


def _collector(url: str | None) -> str | None:
    """The URL to which traces are sent.

    Raises:
        UserError: it is none.
        MachineError: the packages that send them are not installed.
    """
    if url is None:
        return None
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"otlp_endpoint={url!r}: expected http://HOST:PORT of a collector")
    try:
        from ..http.jobs import tracing  # noqa: F401
    except ModuleNotFoundError as error:
        raise MachineError(
            f"otlp_endpoint needs the package {error.name}: pip install 'fusewright[otlp]'"
        ) from error
    return url if parts.path.strip("/") else f"{url.rstrip('/')}/v1/traces"


def _certificate(file: Path | None, key: Path | None) -> tuple[str | None, str | None]:
    """Certificate and private key as their names.

    Raises:
        UserError: one is not there, or the key has no certificate.
    """
    for name, path in (("ssl_certfile", file), ("ssl_keyfile", key)):
        if path is not None and not path.is_file():
            raise UserError(f"{name}={path}: no such file; give a PEM file")
    if key is not None and file is None:
        raise UserError("ssl_keyfile needs ssl_certfile: give both, or one file with both")
    return str(file) if file else None, str(key) if key else None


def _keys(option: str, given: list[str], file: Path | None) -> tuple[str, ...]:
    """The API keys of an option's flags and file.

    Raises:
        UserError: the file has none or cannot be read, or a key is empty.
    """
    keys = list(given)
    if file is not None:
        try:
            lines = file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{option}_file={file}: cannot be read: {error}") from error
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise UserError(f"{option}_file={file}: holds no key; write one a line")
        keys += found
    if not all(key.strip() for key in keys):
        raise UserError(f"{option}='': expected a key that is not empty")
    return tuple(keys)
