"""Logs answers: those that are no success with their reason, and others if they are wanted.

Whoever asks decides how much there is to refuse, so in ten seconds no more than 200 refusals have
lines of their own; the others are counted.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....config.process.logs import LogStyle, facts
from ....engine.messages.requests import AddRequest

_log = logging.getLogger(__name__)
_WINDOW_S = 10.0
_MOST_LINES = 200
"""Lines of refusals in a window."""
_MOST_REASON = 300
"""Characters of a reason: it may repeat what was sent."""
_MOST_PATH = 200
_SAMPLING = ("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
_MOST_ID = 128
REASON = "fusewright.reason"
"""Where the scope of a request has the reason of its refusal, or of the end of its stream."""
GONE = "the client has closed its connection"


@dataclass(frozen=True)
class LogSettings:
    """What a server logs beside its start, its end and refusals.

    Attributes:
        style: how its processes log.
        answers: each answer has a line, but for good ones to the paths ``without``.
        requests: each request has a line when it is queued.
        stats_s: seconds between two lines of load; None: there are none.
    """

    style: LogStyle = field(default_factory=LogStyle)
    answers: bool = True
    without: tuple[str, ...] = ()
    requests: bool = False
    stats_s: float | None = 10.0


class AnswerLog:
    """Logs the answers of one API process."""

    def __init__(self, settings: LogSettings) -> None:
        self._access, self._without = settings.answers, frozenset(settings.without)
        self._requests = settings.requests
        self._began_s, self._num_lines, self._num_dropped = 0.0, 0, 0

    def write(
        self,
        what: str,
        path: str,
        status: int,
        *,
        client: str = "",
        reason: str = "",
        request_id: str = "",
        seconds: float | None = None,
    ) -> None:
        """Log one answer.

        Args:
            what: the method and the path of its request.
            path: that is asked for; "" if it is not known.
            reason: of an answer or a stream that is no success.
        """
        if reason == GONE or (not reason and status < 400):
            if not self._access or path in self._without:
                return
        elif not self._may_write():
            return
        level = logging.ERROR if status >= 500 and status != 503 else logging.INFO
        if status == 503 or (status < 400 and reason not in ("", GONE)):
            level = logging.WARNING
        said = {
            "client": client,
            "request": what[:_MOST_PATH],
            "status": status,
            "seconds": seconds,
            "request_id": request_id,
            "reason": reason[:_MOST_REASON],
        }
        said = {name: value for name, value in said.items() if value not in ("", None)}
        _log.log(level, "%s", _text(said), extra=facts(**said))

    def write_request(self, name: str, requests: Sequence[AddRequest]) -> None:
        """Log what a call asks for, if that is wanted, without a word of its text."""
        if not self._requests:
            return
        params, lengths = requests[0].sampling_params, [len(r.prompt_token_ids) for r in requests]
        asked = {key: getattr(params, key) for key in _SAMPLING}
        asked = {key: value for key, value in asked.items() if value is not None}
        _log.info(
            "request %s: prompts of %s tokens, %s",
            name,
            ", ".join(map(str, lengths)),
            ", ".join(f"{key}={value}" for key, value in asked.items()),
            extra=facts(request_id=name, prompt_tokens=lengths, **asked),
        )

    def _may_write(self) -> bool:
        now = time.monotonic()
        if now - self._began_s > _WINDOW_S:
            if self._num_dropped:
                _log.warning("%d more refusals have no line of their own", self._num_dropped)
            self._began_s, self._num_lines, self._num_dropped = now, 0, 0
        self._num_lines += 1
        self._num_dropped += self._num_lines > _MOST_LINES
        return self._num_lines <= _MOST_LINES


def _text(said: Mapping[str, Any]) -> str:
    text = f'{said.get("client", "-")} "{said["request"]}" {said["status"]}'
    if "seconds" in said:
        text += f" {said['seconds']:.3f} s"
    if "request_id" in said:
        text += f" {said['request_id']}"
    return f"{text}: {said['reason']}" if "reason" in said else text


def request_id_of(header: bytes) -> str:
    """The id of a request that is refused: its own ``x-request-id`` if that can be shown, or a new
    one."""
    text = header.decode("latin-1")
    return text if text.isascii() and text.isprintable() and 0 < len(text) <= _MOST_ID else _new()


def _new() -> str:
    return uuid.uuid4().hex
