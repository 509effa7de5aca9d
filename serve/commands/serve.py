"""``fusewright serve``: OpenAI's API over HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from ...config import MachineError, UserError
from ...config.numbers import check_counts, check_number
from ...config.process.logs import LEVELS, VARIABLE, LogStyle, level_of_environment
from ...engine.ranks.torchrun import join_torchrun
from ..console.flags import model_flags, strings
from ..console.options import checked
from ..http.intake.hosts import checked_hosts

PARSERS = (
    *("auto", "deepseek_v3", "deepseek_v31", "glm45", "gpt_oss", "hermes", "llama3_json"),
    *("mistral", "openai", "qwen3_coder", "xlam"),
)
REASONING = (
    *("auto", "none", "deepseek_r1", "deepseek_v3", "glm45", "granite", "mistral", "olmo3"),
    *("openai_gptoss", "gpt_oss", "qwen3", "seed_oss"),
)
_FORMATS = ("text", "json")
_MOST_PROCESSES = 64
_EXTRA = ("fastapi", "uvicorn", "uvloop", "httptools", "zmq", "prometheus_client")


@dataclass(frozen=True)
class Address:
    """Flags of where the server listens, and its certificate.

    Raises:
        UserError: the port is out of range, a file is not there, or a key has no certificate.
    """

    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8000
    ssl_certfile: Annotated[Path | None, typer.Option(help="Certificate: serves HTTPS.")] = None
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its private key.")] = None

    def __post_init__(self) -> None:
        check_counts(0, 65535, port=self.port)
        files = {"ssl_certfile": self.ssl_certfile, "ssl_keyfile": self.ssl_keyfile}
        for name, path in files.items():
            if path is not None and not path.is_file():
                raise UserError(f"{name}={path}: no such file; give a PEM file")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise UserError("ssl_keyfile needs ssl_certfile: give both, or one file with both")


@dataclass(frozen=True)
class Access:
    """Flags of who may ask."""

    api_key: Annotated[
        list[str] | None, typer.Option(help="A key that requests must bring (repeatable).")
    ] = None
    api_key_file: Annotated[
        Path | None, typer.Option(help="File of such keys, one a line; no process list shows them.")
    ] = None
    admin_api_key: Annotated[
        list[str] | None,
        typer.Option(help="A key that may also abort the requests of all (repeatable)."),
    ] = None
    admin_api_key_file: Annotated[
        Path | None, typer.Option(help="File of such keys, one a line.")
    ] = None
    allowed_origins: Annotated[
        str | None,
        typer.Option(help="Origins whose web pages may ask, separated by commas; *: all."),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Public host name of the server, or *.NAME (repeatable); others are refused then, "
            "as they are on a loopback address."
        ),
    ] = None
    trust_request_chat_template: Annotated[
        bool,
        typer.Option(
            "--trust-request-chat-template",
            help="Requests may bring chat templates: programs, which may run without end.",
        ),
    ] = False


@dataclass(frozen=True)
class Limits:
    """Flags of processes, and of what the server takes and waits for.

    Raises:
        UserError: a number is out of its range.
    """

    api_server_count: Annotated[
        int, typer.Option(help="Processes that serve HTTP, over the same engines.")
    ] = 1
    data_parallel_size: Annotated[
        int, typer.Option(help="Engines, with the whole model each, behind the same API.")
    ] = 1
    max_waiting_requests: Annotated[
        int, typer.Option(help="Outputs that may wait; more are refused with 503.")
    ] = 16384
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that open requests have after SIGTERM.")
    ] = 60.0
    stall_timeout: Annotated[
        float, typer.Option(help="Seconds without a step until /health says 503.")
    ] = 10.0
    max_body_mb: Annotated[float, typer.Option(help="Largest body of a request, in MiB.")] = 8.0
    limit_concurrency: Annotated[
        int, typer.Option(help="Connections that an API process keeps open; 503 beyond.")
    ] = 16384
    strict_fields: Annotated[
        bool, typer.Option(help="Refuse requests with fields that are not known.")
    ] = False

    def __post_init__(self) -> None:
        check_counts(0, max_waiting_requests=self.max_waiting_requests)
        processes = {n: getattr(self, n) for n in ("api_server_count", "data_parallel_size")}
        check_counts(1, _MOST_PROCESSES, **processes)
        check_counts(1, limit_concurrency=self.limit_concurrency)
        check_number(stall_timeout=self.stall_timeout, max_body_mb=self.max_body_mb)
        if not self.shutdown_timeout >= 0:
            raise UserError(f"shutdown_timeout={self.shutdown_timeout}: expected 0 or more seconds")


@dataclass(frozen=True)
class Log:
    """Flags of the log, which goes to stderr.

    Raises:
        UserError: a level, a form or a number is none.
    """

    log_level: Annotated[
        str | None,
        typer.Option(
            help=f"Least that is logged: {', '.join(LEVELS)}. [default: info, or {VARIABLE}]",
            show_default=False,
        ),
    ] = None
    log_format: Annotated[str, typer.Option(help=f"Form of a line: {', '.join(_FORMATS)}.")] = (
        _FORMATS[0]
    )
    enable_log_requests: Annotated[
        bool,
        typer.Option(
            "--enable-log-requests/--disable-log-requests",
            help="Log sizes and sampling of each request, never its text.",
        ),
    ] = False
    disable_log_stats: Annotated[
        bool, typer.Option("--disable-log-stats", help="No lines of load.")
    ] = False
    log_stats_interval: Annotated[
        float, typer.Option(help="Seconds between two lines of load, while anything runs.")
    ] = 10.0
    disable_uvicorn_access_log: Annotated[
        bool, typer.Option("--disable-uvicorn-access-log", help="No lines of successful answers.")
    ] = False
    disable_access_log_for_endpoints: Annotated[
        str, typer.Option(help="Paths without such lines, separated by commas.")
    ] = "/health,/live,/load,/metrics,/ping,/version,/"

    def __post_init__(self) -> None:
        named = {"log_level": (*LEVELS, None), "log_format": _FORMATS}
        for name, known in named.items():
            if (value := getattr(self, name)) not in known:
                expected = ", ".join(filter(None, known))
                raise UserError(f"{name}={value!r}: expected one of {expected}")
        check_number(log_stats_interval=self.log_stats_interval)

    def style(self) -> LogStyle:
        level = self.log_level or level_of_environment() or "info"
        return LogStyle(level, json=self.log_format == "json")


@dataclass(frozen=True)
class Formats:
    """Flags of how the model writes what is no plain text.

    Raises:
        UserError: a format is unknown.
    """

    reasoning_parser: Annotated[
        str, typer.Option(help=f"How the model marks its thinking: {', '.join(REASONING)}.")
    ] = "auto"
    tool_call_parser: Annotated[
        str, typer.Option(help=f"How the model calls tools: {', '.join(PARSERS)}.")
    ] = "auto"

    def __post_init__(self) -> None:
        known = {"tool_call_parser": PARSERS, "reasoning_parser": REASONING}
        for option, names in known.items():
            if (name := getattr(self, option)) not in names:
                raise UserError(f"{option}={name!r}: expected one of {', '.join(names)}")


@model_flags
def serve(
    engine: dict[str, Any],
    *,
    address: Address,
    access: Access,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name of the model in requests (repeatable).")
    ] = None,
    limits: Limits,
    log: Log,
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="Collector of OpenTelemetry traces: http://HOST:4318.")
    ] = None,
    formats: Formats,
) -> None:
    """Serve OpenAI's and Anthropic's API over HTTP, with the engine in a process of its own.

    SIGTERM or Ctrl-C lets open requests finish; a second one ends them with an answer.
    """
    options = checked(engine, weights=True)
    join_torchrun(options.tensor_parallel_size, options.pipeline_parallel_size)
    keys = _keys("api_key", access.api_key or [], access.api_key_file)
    admin_keys = _keys("admin_api_key", access.admin_api_key or [], access.admin_api_key_file)
    life, server_settings = _import()
    from ...model_executor.hf_config import served_name  # options were checked with it

    settings = server_settings.Settings(
        model_names=tuple(served_model_name or [served_name(options.model)]),
        api_keys=keys,
        admin_keys=admin_keys,
        max_waiting=limits.max_waiting_requests,
        shutdown_timeout_s=limits.shutdown_timeout,
        stall_s=limits.stall_timeout,
        max_body_bytes=int(limits.max_body_mb * 2**20),
        max_connections=limits.limit_concurrency,
        allowed_origins=strings(access.allowed_origins or ""),
        allowed_hosts=checked_hosts(access.allowed_host) if access.allowed_host else None,
        otlp_endpoint=_collector(otlp_endpoint),
        strict_fields=limits.strict_fields,
        thinking=formats.reasoning_parser,
        trust_request_chat_template=access.trust_request_chat_template,
        tool_format=None if formats.tool_call_parser == "auto" else formats.tool_call_parser,
        log=server_settings.LogSettings(
            style=log.style(),
            answers=not log.disable_uvicorn_access_log,
            without=strings(log.disable_access_log_for_endpoints),
            requests=log.enable_log_requests,
            stats_s=None if log.disable_log_stats else log.log_stats_interval,
        ),
    )
    certificate, key = (str(f) if f else None for f in (address.ssl_certfile, address.ssl_keyfile))
    endpoint = life.Endpoint(address.host, address.port, certificate, key)
    counts = limits.api_server_count, limits.data_parallel_size
    life.run_server(options, settings, endpoint, *counts)


def _import() -> tuple[Any, Any]:
    """The modules that serve HTTP, which import packages that the engine does not need."""
    try:
        from ..http import life
        from ..http.jobs import settings
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        raise MachineError(
            f"the server needs the package {error.name}: pip install 'fusewright[serve]'"
        ) from error
    return life, settings


def _collector(url: str | None) -> str | None:
    """The URL to which traces are sent."""
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


def _keys(option: str, flags: list[str], file: Path | None) -> tuple[str, ...]:
    """The API keys of an option's flags and file."""
    keys = list(flags)
    if file is not None:
        try:
            lines = file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{option}_file={file}: cannot be read: {error}") from error
        of_file = [line.strip() for line in lines if line.strip()]
        if not of_file:
            raise UserError(f"{option}_file={file}: holds no key; write one a line")
        keys += of_file
    if not all(key.strip() for key in keys):
        raise UserError(f"{option}='': expected a key that is not empty")
    return tuple(keys)
