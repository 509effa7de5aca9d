"""Turns an error that a command lets through into one line on stderr and an exit code.

A standard stream that was closed before the start, or that fails later, is treated as any other
file that cannot be written: the command stops, and says so where it still can.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
import traceback
from typing import Any, NoReturn, TextIO

import typer

from ...config import MachineError, UserError, VerificationError

MISTAKE, FAILED, INTERRUPTED = 2, 1, 130
READER_GONE = 128 + signal.SIGPIPE
"""Whoever reads stdout has seen enough, as ``head`` has: no mistake, and nothing to say of it."""


def open_missing_streams() -> None:
    """Give a process without standard streams some that fail when they are used.

    The next file to be opened would otherwise take the number of the missing stream, and receive
    what native code prints.  Errors that nobody can read are dropped: stderr becomes /dev/null.
    """
    for number, name, broken in ((0, "stdin", os.O_WRONLY), (1, "stdout", os.O_RDONLY)):
        if getattr(sys, name) is None:
            setattr(sys, name, _open_at(number, broken, "r" if number == 0 else "w"))
    if sys.stderr is None:
        sys.stderr = _open_at(2, os.O_WRONLY, "w")


def _open_at(number: int, flags: int, mode: str) -> Any:
    try:
        os.fstat(number)
    except OSError:
        opened = os.open(os.devnull, flags)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)
        os.set_inheritable(number, True)
    return open(number, mode, encoding="utf-8", closefd=False)


def flush() -> None:
    """Write out what stdout holds, so that its failure is seen here and not by the interpreter.
    What stderr holds and cannot write is dropped: it has told all that it could."""
    sys.stdout.flush()
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        _discard(2, sys.stderr)


def report(error: BaseException, *, debug: bool) -> int:
    """Say what went wrong in one line, with ``debug`` after its traceback; return the exit code."""
    code, message = _explain(error)
    with contextlib.suppress(OSError, ValueError):
        if debug:
            traceback.print_exception(error, file=sys.stderr)
        if message:
            print("error:", " ".join(message.split()), file=sys.stderr)
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):  # ValueError: someone closed it
            _discard(number, stream)
    return code


def _explain(error: BaseException) -> tuple[int, str]:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, ""
    if isinstance(error, BrokenPipeError) and _reader_is_gone():
        return READER_GONE, ""
    if isinstance(error, MachineError):
        return FAILED, str(error)
    if isinstance(error, UserError):
        return MISTAKE, str(error)
    if isinstance(error, VerificationError):
        return FAILED, f"verification failed: {error}"
    if isinstance(error, OSError) and _was_printing(error):
        return FAILED, f"standard output {_words(error)}; what was left to print is lost"
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        return FAILED, f"{where}{error.strerror} (run with --debug for where it happened)"
    if isinstance(error, MemoryError):
        return FAILED, "out of memory (run with --debug for where it happened)"
    return FAILED, (
        f"internal error: {type(error).__name__}: {_first_line(error)}; run with --debug for the "
        "traceback; please report"
    )


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0][:400] if lines else "no message"


def _was_printing(error: OSError) -> bool:
    """Whether stdout failed: all that a command prints goes through ``typer.echo``."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is typer.echo.__code__ and not frame.f_locals.get("err"):
            return True
        if frame.f_code is flush.__code__:
            return True
    return False


def _reader_is_gone() -> bool:
    """Whether stdout is a pipe that nobody reads any more."""
    with contextlib.suppress(OSError, ValueError):
        poll = select.poll()
        poll.register(sys.stdout, select.POLLOUT)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    return False


def _words(error: OSError) -> str:
    if error.errno == errno.EBADF:
        return "is closed"
    return f"cannot be written: {error.strerror}"


def _discard(number: int, stream: TextIO) -> None:
    """Drop what the buffer of a failed stream still holds: else Python would complain about it at
    exit."""
    with contextlib.suppress(OSError, ValueError):
        if stream.fileno() != number:
            return
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, number)
        os.close(devnull)
        stream.flush()


def leave_dead_engine() -> NoReturn:
    """End the process at once: torch would free its graphs, find the device lost, and abort."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(MISTAKE)
