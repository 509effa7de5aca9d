"""Starts Python processes that have imported torch already, for tests of what a process does.

Seven tenths of what the processes of the tests do is to import torch and Inductor, one after the
other the same.  Within ``warm_starts()``, ``subprocess`` asks a warm parent instead: a process that
has imported what others have written, nothing of ours, and has run nothing but their hashes of
their own sources.  It forks a process that takes over arguments, environment, folder and files, and
runs the module, script or code as ``python`` does.  The process is a child of whoever asked, with
its own command in /proc, and dies or is waited for like any other.

What cannot be the same is started as always: another Python or options of it, a shell, a function
that runs before the start, variables that libraries read while they are imported.  Tests whose
subject is a start (what it imports, how long it takes, how much memory) do without this.

As a script: ``warm.py FD`` is the warm parent, which serves the socket FD.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

IMPORTED = (
    *("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed"),
    # A compile imports these when it meets them.
    *("torch.utils.cpp_extension", "torch.distributed.tensor.experimental._attention"),
    *("torch.export", "sympy.combinatorics", "sympy.tensor.tensor"),
    *("fastapi", "uvicorn", "uvloop", "httptools", "prometheus_client", "zmq", "msgspec"),
    *("safetensors.torch", "tokenizers", "jinja2", "typer"),
)
READ_AT_IMPORT = ("CC", "CXX", "KMP_", "LD_", "MKL_", "OMP_", "PYTHON", "TORCH", "TRITON")
READ_WHEN_USED = {
    *("TORCHINDUCTOR_CACHE_DIR", "TORCH_WARM_POOL", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH"),
    *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"),
}
ROOM = "-" * 8000
"""An argument of the warm parent, whose place the arguments of its children take."""
_PR_SET_CHILD_SUBREAPER = 36
_prctl = ctypes.CDLL(None).prctl


# The side of who starts processes


class WarmParent:
    """The socket of a warm parent, and its process where it is ours."""

    def __init__(self, end: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._end, self._process = end, process
        self._owner, self._lock = os.getpid(), threading.Lock()

    @property
    def is_ours(self) -> bool:
        """Whether this process started it; a forked one cannot be given children of it."""
        return self._owner == os.getpid()

    def start(self, job: dict[str, Any], files: dict[int, int]) -> int:
        """Start a process; returns its ID.

        Args:
            job: what Python shall run and how, as ``_start`` makes it.
            files: this process's descriptor of each that the other shall have.
        """
        text = json.dumps({**job, "fds": list(files)}).encode()
        with self._lock:
            # Whoever the warm parent forks loses its parent at once, and is given to us.
            _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                self._end.sendall(len(text).to_bytes(4, "big"))
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files.values()))]
                self._end.sendmsg([b"f"], rights)
                self._end.sendall(text)
                pid = int.from_bytes(_receive(self._end, 4), "big")
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return pid


_parents: dict[tuple[tuple[str, str], ...], WarmParent | None] = {}
_fork_exec: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]
_starting = threading.Lock()
_is_child = False
"""Whether a warm parent has forked this process."""


def _key(environment: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables that are read while libraries are imported."""
    return tuple(
        (name, value)
        for name, value in sorted(environment.items())
        if name.startswith(READ_AT_IMPORT) and name not in READ_WHEN_USED
    )


_KNOWN = [_key({**os.environ, **more}) for more in ({}, {"TRITON_INTERPRET": "1"})]
"""With kernels compiled and interpreted; what needs other variables is started as always."""
_HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))
"""A library may ask for the GPU while it is imported, and would find none in a forked process."""


def _parent(environment: dict[str, str]) -> WarmParent | None:
    """The warm parent with these variables, which is started when it is first needed."""
    key = _key(environment)
    with _starting:
        found = _parents.get(key)
        if key not in _parents and key in _KNOWN and not (_is_child or _HAS_GPU):
            found = _parents[key] = _warm_parent(environment)
    return found if found and found.is_ours else None


def _warm_parent(environment: dict[str, str]) -> WarmParent | None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", __file__, str(theirs.fileno()), ROOM]
    pipe = subprocess.PIPE
    with theirs:
        process = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, pass_fds=[theirs.fileno()]
        )
    return WarmParent(ours, process) if ours.recv(1) else None


def _job(words: Sequence[str]) -> tuple[str, str, list[str]] | None:
    """How Python is told what to run, what that is, and its arguments."""
    rest = list(words)
    if rest[:1] == ["-P"]:
        rest.pop(0)
    elif not os.environ.get("PYTHONSAFEPATH"):
        return None
    if rest[:1] in (["-m"], ["-c"]):
        return rest[0], rest[1], rest[2:]
    if not rest or rest[0].startswith("-"):
        return None
    return "", rest[0], rest[1:]


def _start(given: Sequence[Any], nested: bool) -> int | None:
    """Start a process as ``subprocess`` asks for it; returns None if that needs a start."""
    words, _, close_fds, kept, folder, variables = given[:6]
    ends, error_pipe, is_session = (given[6], given[9], given[11]), given[13], given[15]
    command = [os.fsdecode(word) for word in words]
    is_plain = close_fds and given[16:22] == (-1, None, None, None, -1, None)
    is_plain = is_plain and command[0] == sys.executable and ROOM not in command
    job = _job(command[1:]) if is_plain else None
    if job is None:
        return None
    if variables is None:
        environment = dict(os.environ)
    else:
        parts = (os.fsdecode(each).partition("=") for each in variables)
        environment = {name: value for name, _, value in parts}
    parent = _parent(environment)
    if parent is None:
        return None
    files = {fd: fd for fd in kept if fd != error_pipe}
    files |= {fd: fd if end == -1 else end for fd, end in enumerate(ends)}
    facts = {
        **dict(zip(("how", "what", "argv"), job, strict=True)),
        "command": command,
        "environment": environment,
        "folder": os.fsdecode(folder) if folder else str(Path.cwd()),
        "session": bool(is_session),
        "nested": nested,
    }
    return parent.start(facts, files)


def _replace_starts(start: Callable[..., int]) -> Callable[..., int]:
    """Have ``subprocess`` call ``start``; returns what it called before."""
    before: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]
    subprocess._fork_exec = start  # type: ignore[attr-defined]
    return before


def _start_warm(*given: Any) -> int:
    pid = _start(given, False)
    return _fork_exec(*given) if pid is None else pid


def _start_nested(*given: Any) -> int:
    pid = _start(given, True)
    return _fork_exec(*given) if pid is None else pid


@contextmanager
def warm_starts(*, nested: bool = False) -> Iterator[None]:
    """Meanwhile ``subprocess`` starts Python from a warm parent.

    Args:
        nested: those processes, too, for what they start.
    """
    before = _replace_starts(_start_nested if nested else _start_warm)
    try:
        yield
    finally:
        _replace_starts(before)


@contextmanager
def real_starts() -> Iterator[None]:
    """Meanwhile ``subprocess`` starts every process as always."""
    before = _replace_starts(_fork_exec)
    try:
        yield
    finally:
        _replace_starts(before)


# The side of the warm parent


def _receive(end: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = end.recv(size - len(found))
        if not part:
            raise EOFError
        found += part
    return found


def _receive_job(end: socket.socket) -> tuple[dict[str, Any], list[int]]:
    size = int.from_bytes(_receive(end, 4), "big")
    _, fds, _, _ = socket.recv_fds(end, 1, 100)
    return json.loads(_receive(end, size)), fds


def _serve(end: socket.socket) -> dict[str, Any]:
    """Fork processes until nobody can ask any more; returns in each of them, with its job."""
    while True:
        try:
            job, fds = _receive_job(end)
        except (EOFError, OSError):
            os._exit(0)
        wait, go = os.pipe()
        told, tell = os.pipe()
        if (between := os.fork()) == 0:
            if pid := os.fork():
                os.write(tell, pid.to_bytes(4, "big"))
                os._exit(0)
            for fd in (go, told, tell):
                os.close(fd)
            os.read(wait, 1)  # until the parent is the right one
            os.close(wait)
            end.close()
            _take_over(job, fds)
            return job
        for fd in (*fds, wait, tell):
            os.close(fd)
        os.waitpid(between, 0)
        os.close(go)
        end.sendall(os.read(told, 4))
        os.close(told)


def _take_over(job: dict[str, Any], fds: list[int]) -> None:
    """Make this process the one that was asked for."""
    import fcntl

    import numpy

    above = max([*job["fds"], *fds]) + 1
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, target in zip(high, job["fds"], strict=True):
        os.dup2(fd, target)
        os.close(fd)
    if job["session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    tempfile.tempdir = None  # TMPDIR may be another
    numpy.random.seed()
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.orig_argv = job["command"]
    _show_command(job["command"])


def _show_command(command: list[str]) -> None:
    """Write the command where /proc reads that of this process."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"\0".join(word.encode() for word in command)
    ctypes.memmove(start, text.ljust(end - start, b"\0")[: end - start - 1] + b"\0", end - start)


def _run(job: dict[str, Any]) -> None:
    """Run what Python was told to run."""
    what, sys.argv = job["what"], [job["what"], *job["argv"]]
    if job["how"] == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif job["how"] == "-c":
        sys.argv[0] = "-c"
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), vars(main))
    else:
        runpy.run_path(what, run_name="__main__")


def _become(job: dict[str, Any]) -> NoReturn:
    """Run what was asked for, in a process that has a warm parent of its own if it shall."""
    global _is_child
    _is_child = True
    while job["nested"]:
        ours, theirs = socket.socketpair()
        if os.fork():
            theirs.close()
            _parents[_key(dict(os.environ))] = WarmParent(ours)
            _replace_starts(_start_nested)
            break
        ours.close()
        # The files that were given to this process must end with the one that was asked for.
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in job["fds"]:
            os.dup2(nothing, fd)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        job = _serve(theirs)
    try:
        _run(job)
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        _end(error.code if isinstance(error.code, int) else int(error.code is not None))
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        _end(1)
    _end(0)


def _end(code: int) -> NoReturn:
    """End as Python does, but for the memory of modules: to free it would copy its pages first."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120
    os._exit(code & 0xFF)


def _hash_sources() -> None:
    """Read all of torch and Triton, as Inductor does once in each process to know their version."""
    from torch._inductor.codecache import torch_key
    from triton.runtime.cache import triton_key

    torch_key()
    triton_key()


def _main() -> None:
    end = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    for name in IMPORTED:
        with suppress(ImportError):
            importlib.import_module(name)
    with suppress(ImportError):
        _hash_sources()
    gc.freeze()  # no collection looks at these, and copies their pages, in any child
    gc.enable()
    if len([*Path("/proc/self/task").iterdir()]) > 1:
        return  # a thread of OpenBLAS, for which OMP_NUM_THREADS is 1: no child would have it
    end.sendall(b"w")
    _become(_serve(end))


if __name__ == "__main__":
    _main()
