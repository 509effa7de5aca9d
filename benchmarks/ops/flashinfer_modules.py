"""Compiles the CUDA files beside the benchmarks with the headers of flashinfer-python, by nvcc.

FlashInfer is a rival in benchmarks; the engine does not use it.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ...compiler.artifacts.scratch import scratch_folder
from ...config import UserError
from ...config.arch import HOPPER

_INCLUDES = (
    "cccl/cub",
    "cccl/libcudacxx/include",
    "cccl/thrust",
    "include",
    "cutlass/include",
)
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-shared",
    "-Xcompiler=-fPIC",
    f"-gencode=arch=compute_{HOPPER.csrc},code=sm_{HOPPER.csrc}",
    "--expt-relaxed-constexpr",
    "--use_fast_math",  # as FlashInfer builds it
    "-DNDEBUG",
    "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED",
)
_CUDA = Path("/usr/local/cuda/bin/nvcc")


def compile_source(source: Path, defines: dict[str, int]) -> bytes:
    """Compile a CUDA file with FlashInfer's headers into a shared object.

    Raises:
        UserError: the package or nvcc is missing, or nvcc fails; says what to do.
    """
    data = _package_data()
    command = [str(_nvcc()), *_FLAGS, *(f"-D{name}={value}" for name, value in defines.items())]
    command += [f"-I{data / folder}" for folder in _INCLUDES]
    with scratch_folder() as folder:
        out = folder / "module.so"
        command += [str(source), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
            raise UserError(
                f"nvcc cannot compile {source.name} with flashinfer-python {package_version()}: "
                f"{(lines or [done.stderr.strip()])[0][:300]}; use version 0.7.2"
            )
        return out.read_bytes()


def package_version() -> str:
    """Version of the installed flashinfer-python."""
    try:
        return version("flashinfer-python")
    except PackageNotFoundError:
        return "of unknown version"


def _package_data() -> Path:
    """The folder of the package's headers.  The package is not imported: that takes seconds."""
    spec = importlib.util.find_spec("flashinfer")
    for folder in spec.submodule_search_locations or () if spec else ():
        if (Path(folder) / "data" / "include").is_dir():
            return Path(folder) / "data"
    raise UserError(
        "flashinfer-python is not installed here, and its headers are compiled; "
        "pip install --no-deps flashinfer-python"
    )


def _nvcc() -> Path:
    if found := shutil.which("nvcc"):
        return Path(found)
    if _CUDA.is_file():
        return _CUDA
    raise UserError(
        "nvcc is neither on the PATH nor in /usr/local/cuda, and FlashInfer's kernels must be "
        "compiled; install the CUDA toolkit"
    )
