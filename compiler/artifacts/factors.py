"""The factors of a key besides configuration: sources, toolchain and processor.

The captured graph itself is not among the factors, since knowing it needs a trace.  What determines
it is: the model's fields, the sources of model and ops, and the version of torch.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ...ops import find_cuda_library, installed_cublaslt

PACKAGE = Path(__file__).resolve().parents[2]
_OWN_SOURCES = (
    *("config/arch.py", "config/step_fields.py"),
    *("config/device_table.py", "config/expert_tables.py", "config/devices"),
    *("ops", "passes", "compiler", "csrc"),
)
_INSPECTS = "compiler/inspect/"
"""Nothing that compiles or runs imports this folder; ``tests/test_layout.py`` enforces it."""
_SUFFIXES = (".py", ".cu", ".cuh", ".cpp", ".h", ".json")


def source_factors(
    folders: Iterable[str] = (), package: Path = PACKAGE, *, alone: bool = False
) -> dict[str, str]:
    """Digest of every source file that decides what is compiled, by its path in the package.

    Args:
        folders: folders or files of the package besides the compiler's own.
        package: where the package lies; its place is in no factor.
        alone: without the compiler's own.
    """
    factors: dict[str, str] = {}
    for folder in (*(() if alone else _OWN_SOURCES), *folders):
        for file in sorted(_sources(package / folder)):
            name = file.removeprefix(f"{package}/")
            if not name.startswith(_INSPECTS):
                factors[f"source.{name}"] = _digest(Path(file))
    return factors


def _sources(root: Path) -> Iterator[str]:
    """``root`` if it is a file, or all sources below it.  Every start asks for them, and
    ``Path.rglob`` would take more time than to read them all."""
    if root.is_file():
        yield str(root)
    elif root.is_dir():
        yield from _sources_below(str(root))


def _sources_below(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _sources_below(entry.path)
            elif entry.name.endswith(_SUFFIXES) and entry.is_file():
                yield entry.path


def toolchain_factors(device: str) -> dict[str, str]:
    """Versions of what compiles and runs the code on ``device``."""
    factors = {
        "toolchain.torch": torch.__version__,
        "toolchain.triton": _version("triton"),
        "toolchain.python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "toolchain.machine": platform.machine(),
    }
    if device == "cpu":
        factors["toolchain.cpu"] = _cpu()
        # Inductor writes it into the code.
        factors["toolchain.cpu_threads"] = str(torch.get_num_threads())
        if os.environ.get("TRITON_INTERPRET") == "1":
            factors["toolchain.triton_interpret"] = "1"
        return factors
    factors["toolchain.cuda"] = str(torch.version.cuda)
    library = find_cuda_library()
    factors["toolchain.csrc"] = _digest(library) if library else "none"
    return factors


def measured_factors(device: str) -> dict[str, str]:
    """The library whose algorithms ``-O3`` measures; the shipped tables are among the sources."""
    return {"toolchain.cublaslt": installed_cublaslt()} if device == "cuda" else {}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _cpu() -> str:
    """The instruction sets that a kernel compiled here may use."""
    flags = ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{capability} {hashlib.sha256(flags.encode()).hexdigest()[:16]}"
