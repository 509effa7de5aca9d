"""Where the log of this package goes, and how its lines look.

All of it is of the logger ``fusewright``.  A program of ours, such as the server, calls
``write_log``.  ``LLM`` calls ``write_log_by_default``, which leaves the log to a program that has
set up logging itself.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..errors import UserError

LEVELS = ("debug", "info", "warning", "error", "critical")
VARIABLE = "FUSEWRIGHT_LOGGING_LEVEL"
PROGRESS = "fusewright.progress"
"""The logger of long work."""
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
"""No character of a client's text may end the line or drive a terminal."""
_quiet = False


@dataclass(frozen=True)
class LogStyle:
    """How the log of a process looks.

    Attributes:
        level: the least of ``LEVELS`` that is written.
        json: each line is a JSON object.
        process: tells the processes of one server apart; "" where there is one of its kind.
    """

    level: str = "info"
    json: bool = False
    process: str = ""


def level_of_environment() -> str | None:
    """The level that ``FUSEWRIGHT_LOGGING_LEVEL`` asks for; None if it is not set.

    Raises:
        UserError: it is no level.
    """
    level = os.environ.get(VARIABLE, "").lower()
    if level and level not in LEVELS:
        raise UserError(f"{VARIABLE}={os.environ[VARIABLE]}: expected one of {', '.join(LEVELS)}")
    return level or None


def write_log(style: LogStyle, name: str = "fusewright") -> None:
    """Write the log of a logger to stderr in a style."""
    logger = logging.getLogger(name)
    _remove_handler(logger)
    _remove_handler(logging.getLogger(PROGRESS))
    written = StderrHandler()
    written.setFormatter(_Json(style) if style.json else _Text(style))
    logger.addHandler(written)
    logger.setLevel(style.level.upper())
    logger.propagate = False


def _remove_handler(logger: logging.Logger) -> None:
    """Undo ``write_log``."""
    for handler in list(logger.handlers):
        if isinstance(handler, StderrHandler):
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)
            logger.propagate = True


def write_log_by_default() -> None:
    """Write the log to stderr, from INFO on or as ``FUSEWRIGHT_LOGGING_LEVEL`` says, unless the
    program has set up logging or is a command that speaks for itself.

    Raises:
        UserError: the variable is no level.
    """
    logger, asked = logging.getLogger("fusewright"), level_of_environment()
    if logger.handlers or logging.getLogger().handlers:
        if asked is not None:
            logger.setLevel(asked.upper())
    elif asked is not None or not _quiet:
        level = logging.getLevelName(logger.level).lower() if logger.level else "info"
        write_log(LogStyle(asked or level))


def be_quiet() -> None:
    """Have ``write_log_by_default`` write nothing unless the environment asks for it: a command
    says itself what it does, and Python shows its warnings.  Of the log only the progress of long
    work is written, which has no bars where stderr is no terminal."""
    global _quiet
    _quiet = True
    _remove_handler(logging.getLogger("fusewright"))
    progress = logging.getLogger(PROGRESS)
    if not any(isinstance(handler, StderrHandler) for handler in progress.handlers):
        progress.addHandler(StderrHandler())
        progress.setLevel(logging.INFO)


def facts(**values: Any) -> dict[str, Mapping[str, Any]]:
    """Make the ``extra`` of a call of a logger, whose values are fields of JSON lines."""
    return {"facts": values}


class StderrHandler(logging.Handler):
    """Writes lines to ``sys.stderr``.  A line that nobody takes there is dropped: what serves
    others neither ends nor waits because the reader of a pipe does."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):
            if sys.stderr is not None and _takes(sys.stderr):
                sys.stderr.write(self.format(record) + "\n")
                sys.stderr.flush()


def _takes(stream: Any) -> bool:
    try:
        number = stream.fileno()
    except (OSError, ValueError, AttributeError):  # a notebook's
        return True
    return bool(select.select([], [number], [], 0)[1])


class _Text(logging.Formatter):
    """``INFO 11-28 07:05:50 message``, as in vLLM; a traceback has lines of its own."""

    def __init__(self, style: LogStyle) -> None:
        process = f"[{style.process}] " if style.process else ""
        super().__init__(f"%(levelname)s %(asctime)s {process}%(message)s", "%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging's name
        record.message = record.message.translate(_ESCAPES)
        return super().formatMessage(record)


class _Json(logging.Formatter):
    """One object a line: time, level, message, and the facts of the record."""

    def __init__(self, style: LogStyle) -> None:
        super().__init__()
        self._process = {"process": style.process} if style.process else {}

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            **self._process,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
