"""Builds FlashInfer's prefill kernel into an artifact: nvcc on the headers of flashinfer-python.

Only ``fusewright compile`` comes here (see ``engine/attention_backend.py``).  A start loads what an
artifact holds, and needs neither the package nor nvcc.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torch import fx

from ...config import UserError
from ...ops import flashinfer
from ...passes import fake_value
from ..artifacts.scratch import scratch_folder

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
    "-gencode=arch=compute_90a,code=sm_90a",
    "--expt-relaxed-constexpr",
    "--use_fast_math",  # as FlashInfer builds it
    "-DNDEBUG",
    "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED",
)
_CUDA = Path("/usr/local/cuda/bin/nvcc")
_INSTEAD = "or leave attention_backend=flashinfer out"


def needed(gm: fx.GraphModule) -> list[int]:
    """Head dimensions of the FlashInfer modules that a lowered graph calls."""
    calls = [node for node in gm.graph.nodes if _is_call(node)]
    return sorted({int(fake_value(node.args[0]).shape[2]) for node in calls})


def _is_call(node: fx.Node) -> bool:
    return getattr(node.target, "_name", "") == "fw_flashinfer::paged_attention"


def build_module(head_dim: int) -> bytes:
    """Build the module of one head dimension, which takes about a minute on one core.

    Raises:
        UserError: the package or nvcc is missing, or nvcc fails; says what to do.
    """
    return compile_source(
        flashinfer.SOURCE,
        {
            "FW_HEAD_DIM": head_dim,
            "FW_TILE_Q": flashinfer.TILES[head_dim].queries,
            "FW_TILE_KV": flashinfer.TILES[head_dim].keys,
            "FW_STAGES": flashinfer.TILES[head_dim].stages,
        },
    )


def compile_source(source: Path, defines: dict[str, int]) -> bytes:
    """Compile a CUDA file with FlashInfer's headers into a shared object.

    Raises:
        UserError: as ``build_module``.
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
                f"{(lines or [done.stderr.strip()])[0][:300]}; use a version that fits "
                f"(pip install fusewright[gpu]), {_INSTEAD}"
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
        "attention_backend=flashinfer: flashinfer-python is not installed here, and its kernels "
        f"must be compiled; pip install fusewright[gpu], {_INSTEAD}"
    )


def _nvcc() -> Path:
    if found := shutil.which("nvcc"):
        return Path(found)
    if _CUDA.is_file():
        return _CUDA
    raise UserError(
        "attention_backend=flashinfer: nvcc is neither on the PATH nor in /usr/local/cuda, and "
        f"FlashInfer's kernels must be compiled; install the CUDA toolkit, {_INSTEAD}"
    )
