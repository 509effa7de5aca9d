"""Compiles the CUDA files beside the benchmarks with the headers of flashinfer-python, by nvcc.

FlashInfer is a rival in benchmarks; the engine does not use it.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from ...compiler.artifacts.scratch import scratch_folder
from ...config import UserError
from ...config.arch import HOPPER

_INCLUDES = (
    "cccl/cub",
    "cccl/libcudacxx/include",
    "cccl/thrust",
    "include",
    "cutlass/include",
    "csrc/fmha_v2",
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


def compile_source(source: Path, defines: dict[str, Any], generated: str = "") -> bytes:
    """Compile a CUDA file, and ``generated`` beside it, with FlashInfer's headers: a shared object.

    Raises:
        UserError: the package or nvcc is missing, or nvcc fails; says what to do.
    """
    data = _package_data()
    command = [str(_nvcc()), *_FLAGS, *(f"-D{name}={value}" for name, value in defines.items())]
    command += [f"-I{data / folder}" for folder in _INCLUDES]
    # The toolkit's headers of cuBLAS, which FMHA v2 includes, or those of torch's wheels.
    command += [
        f"-I{path}" for path in Path(sysconfig.get_path("purelib")).glob("nvidia/*/include")
    ]
    with scratch_folder() as folder:
        out = folder / "module.so"
        command += [str(source), "-o", str(out)]
        if generated:
            (folder / "generated.cu").write_text(generated)
            command.append(str(folder / "generated.cu"))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
            raise UserError(
                f"nvcc cannot compile {source.name} with flashinfer-python {package_version()}: "
                f"{(lines or [done.stderr.strip()])[0][:300]}; use version 0.7.2"
            )
        return out.read_bytes()


def fmha_source(head_dim: int, soft_cap: bool) -> tuple[str, str]:
    """(name of the launcher, source) of FMHA v2's kernels for Hopper: bf16, pages, causal."""
    jit = _package_data().parent / "jit"
    # Its generator is imported by itself: the package as a whole wants compilers and takes seconds.
    for name in ("flashinfer", "flashinfer.jit", "flashinfer.jit.attention"):
        package = sys.modules.setdefault(name, ModuleType(name))
        package.__path__ = [str(jit.parent.joinpath(*name.split(".")[1:]))]
    for name, member in (
        ("jit.env", "FLASHINFER_CSRC_DIR"),
        ("jit.utils", "write_if_different"),
        ("compilation_context", "CompilationContext"),
    ):
        module = sys.modules.setdefault(f"flashinfer.{name}", ModuleType(name))
        setattr(module, member, jit.parent / "data" / "csrc")
    sys.modules["flashinfer.jit"].env = sys.modules["flashinfer.jit.env"]  # type: ignore[attr-defined]
    library: Any = importlib.import_module("flashinfer.jit.attention.fmha_v2.fmha_library")
    spec = library.generate_kernel_spec(
        sm=90,
        head_size=head_dim,
        dtype="bf16",
        enable_skip_softmax=False,
        return_softmax=False,
        enable_attn_logit_softcapping=soft_cap,
        alibi=False,
        is_mla=False,
        input_layout=library.InputLayout.Q_PAGED_KV,
        head_size_v=0,
        output_dtype="bf16",
    )
    _, launcher, kernel = library.encode_name(spec)
    return launcher, library.get_kernel_code(spec, kernel, launcher)


def package_version() -> str:
    """Version of the installed flashinfer-python."""
    try:
        return version("flashinfer-python")
    except PackageNotFoundError:
        return "of unknown version"


def _package_data() -> Path:
    """The folder of the package's headers.  The package is not imported: that takes seconds."""
    spec = PathFinder.find_spec("flashinfer")
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
