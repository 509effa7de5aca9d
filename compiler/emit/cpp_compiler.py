"""Checks what Inductor needs of the machine: a C++ compiler for a CPU, and space for its files.

Where one is missing, Inductor logs one traceback and raises another, of a hundred lines; here they
become one line with the remedy.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ...config import MachineError

_NO_COMPILER = "or use -O0, which compiles nothing"


@contextmanager
def machine_faults(*, needs_cpp: bool) -> Iterator[None]:
    """Turn a failure of the machine while Inductor compiles into one line.

    Args:
        needs_cpp: the code is for a CPU: check first that there is a C++ compiler.

    Raises:
        MachineError: names what is missing and the remedy.
    """
    from torch._inductor import exc

    if needs_cpp:
        _check_compiler()
    log = logging.getLogger("torch._inductor.scheduler")
    before = log.disabled
    log.disabled = True  # it logs the node that it compiled, although the error is raised too
    try:
        yield
    except exc.CppCompileError as error:
        raise _compile_error(str(error)) from error
    except exc.InductorError as error:
        inner = error.inner_exception
        if isinstance(inner, OSError):
            raise _os_error(inner) from error
        if isinstance(inner, exc.CppCompileError):
            raise _compile_error(str(inner)) from error
        raise
    finally:
        log.disabled = before


@contextmanager
def compiler_files() -> Iterator[None]:
    """Turn files that the compilers cannot write into one line (the first one is a folder that
    Dynamo makes when it is imported), and the C compiler that Triton does not find.

    Raises:
        MachineError: names what is missing and the remedy.
    """
    try:
        yield
    except OSError as error:
        raise _os_error(error) from error
    except RuntimeError as error:
        if "Failed to find C compiler" not in str(error):
            raise
        raise MachineError(
            "no C compiler: Triton builds what launches its kernels with one; install gcc, or name "
            f"one in CC, {_NO_COMPILER}"
        ) from error


def _check_compiler() -> None:
    from torch._inductor import config, exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError):
        configured = config.cpp.cxx
        several = configured if isinstance(configured, list | tuple) else [configured]
        names = [name for name in several if name]
        raise MachineError(
            f"no C++ compiler: {' or '.join(map(str, names))} cannot be run, and code for a CPU is "
            f"compiled with one; install g++, or name one in CXX, {_NO_COMPILER}"
        ) from None


def _compile_error(text: str) -> MachineError:
    """An error with the compiler's first complaint, out of all that it printed."""
    lines = [line.strip() for line in text.partition("Output:")[2].splitlines() if line.strip()]
    said = [line for line in lines if "error" in line.lower() or "No space" in line] or lines
    if "No space left" in text:
        return _os_error(OSError(errno.ENOSPC, "No space left on device"))
    return MachineError(
        f"the C++ compiler fails: {(said or ['it says nothing'])[0][:300]}; mend it, or name "
        f"another one in CXX, {_NO_COMPILER}"
    )


def _os_error(error: OSError) -> MachineError:
    where = f" at {error.filename}" if error.filename is not None else ""
    return MachineError(
        f"compiling fails{where}: {error.strerror or error}; Inductor's files go to "
        "TORCHINDUCTOR_CACHE_DIR, or else to TMPDIR, and Triton's to TRITON_CACHE_DIR, or else to "
        "~/.triton: point it at a folder that can be written and has space"
    )
