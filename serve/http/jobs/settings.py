"""``Settings``: what a server was told to do."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..intake.answer_log import LogSettings


@dataclass(frozen=True)
class Settings:
    """The options of ``fusewright serve``.

    Attributes:
        model_names: names under which the model is served; the first is shown.
        api_keys: one of them must come with every request; none: all may ask.
        admin_keys: API keys that may also end the requests of all.
        max_waiting: outputs that may wait behind those that run; more are refused.
        stall_s: seconds without a heartbeat of the engine until it counts as stalled.
        max_body_bytes: largest body of a request.
        max_connections: the most that an API process keeps open.
        allowed_origins: sites whose pages may ask from a browser (CORS).
        allowed_hosts: names in ``Host`` beside those that no public DNS holds; None: any.
        tool_format: how the model writes calls of tools; None: as its chat template shows.
        thinking: how the model marks its thinking: auto, none, or a name of the parsers' table.
        otlp_endpoint: URL of the collector of traces; None: nothing is traced.
        strict_fields: refuse requests with fields that are not known.
        trust_request_chat_template: requests may bring chat templates, which are programs.
        log: what the processes log, and how.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    max_waiting: int = 16384
    shutdown_timeout_s: float = 60.0
    stall_s: float = 10.0
    max_body_bytes: int = 8 * 2**20
    max_connections: int = 16384
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    tool_format: str | None = None
    thinking: str = "auto"
    otlp_endpoint: str | None = None
    log: LogSettings = field(default_factory=LogSettings)
    strict_fields: bool = False
    trust_request_chat_template: bool = False
