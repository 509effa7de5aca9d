"""The libraries' GEMMs that linear layers of bfloat16, and of FP8 cuBLASLt's, are timed against.

A rival is called with the arguments of ``linear``.  At the first call of a shape it measures its
kernels there, and then runs the fastest: of cuBLASLt's algorithms, by the search that writes device
tables; of CUTLASS's, those of ``cutlass_linear.cu``, for integers of four bits those of
``cutlass_mixed.cu``.  They are compiled where nvcc and the headers are (``pip install
nvidia-cutlass``) and kept in the user's folder.  A gated activation behind them is the kernel that
a layer has without a fused one.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ...compiler.lowering.tune_library import graph_time, is_right, problem, screened
from ...config.device_table import OPERANDS
from ...config.folders import user_path
from ...config.weight_format import STORED_FORMATS
from ...ops.core.launch import run_launches
from ...ops.linear.desc import LinearArgs, format_of
from ...ops.linear.formats import dequantize, quantize
from ...ops.linear.kernels import plan_epilogue

Gemm = Callable[..., Tensor]
Weights = Sequence[tuple[Tensor, ...]]
_INT4 = STORED_FORMATS["int4_g128"]
_epilogue = run_launches(plan_epilogue)
_POOL_BYTES, _MOST_COPIES = 512 << 20, 16


class CutlassTile(NamedTuple):
    """A source is compiled with a tile, the blocks that share one by multicast, a
    schedule, and whether the weight is the tall operand."""

    tile_m: int
    tile_n: int
    cluster_m: int = 1
    pingpong: int = 0
    stream_k: int = 0
    swap: int = 0


CUTLASS_TILES = (
    CutlassTile(128, 64, stream_k=1, swap=1),
    CutlassTile(128, 128, stream_k=1, swap=1),
    CutlassTile(128, 256, cluster_m=2, stream_k=1, swap=1),
    CutlassTile(128, 128, cluster_m=2, pingpong=1),
    CutlassTile(128, 256, cluster_m=2),
    CutlassTile(256, 128, cluster_m=2),
)

MIXED_TILES = (
    CutlassTile(128, 16, stream_k=1, swap=1),
    CutlassTile(128, 32, stream_k=1, swap=1),
    CutlassTile(128, 64, stream_k=1, swap=1),
    CutlassTile(128, 128, stream_k=1, swap=1),
    CutlassTile(128, 256, cluster_m=2, stream_k=1, swap=1),
)
_LINEAR, _MIXED = "cutlass_linear.cu", "cutlass_mixed.cu"


def _headers() -> Path | None:
    """The folder of CUTLASS's headers that the wheel nvidia-cutlass brings, or None."""
    package = importlib.util.find_spec("cutlass_library")
    if package is None or package.origin is None:
        return None
    folder = Path(package.origin).parent / "source"
    return folder if (folder / "include" / "cutlass" / "cutlass.h").is_file() else None


def why_no_cutlass() -> str:
    """Say what keeps CUTLASS's kernels from being built here; "" if nothing does."""
    if _nvcc() is None:
        return "CUTLASS: no nvcc; install the CUDA toolkit"
    if _headers() is None:
        return "CUTLASS: no headers; pip install nvidia-cutlass"
    return "" if user_path() else "CUTLASS: no folder for its kernels; set FUSEWRIGHT_CACHE_DIR"


def _nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def build_command(tile: CutlassTile, output: Path, source: str = _LINEAR) -> list[str]:
    """nvcc's command for one tile of a source of this folder."""
    headers = _headers()
    includes = [f"-I{headers}/include", f"-I{headers}/tools/util/include"]
    macros = [f"-D{name.upper()}={value}" for name, value in tile._asdict().items()]
    macros += ["-DNDEBUG"]  # a call of assert would serialize the MMAs
    how = ["-std=c++17", "-O3", "-shared", "-Xcompiler=-fPIC", "--expt-relaxed-constexpr"]
    arch = "-gencode=arch=compute_90a,code=sm_90a"
    path = Path(__file__).with_name(source)
    return [str(_nvcc()), *how, arch, *includes, *macros, str(path), "-o", str(output)]


def _build(tile: CutlassTile, source: str) -> ctypes.CDLL:
    """Compile a tile's kernel, a minute or two of one core, unless it was compiled before."""
    text = Path(__file__).with_name(source).read_bytes()
    key = hashlib.sha256(text + repr((tile, _headers())).encode()).hexdigest()[:16]
    folder = user_path()
    assert folder is not None, why_no_cutlass()
    path = folder / "cutlass" / f"{key}.so"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        command = build_command(tile, unfinished, source)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"CUTLASS: nvcc failed on {tile}: {done.stderr[-2000:]}")
        unfinished.replace(path)
    library = ctypes.CDLL(str(path))
    library.workspace_bytes.restype = ctypes.c_int64
    pointer, number = ctypes.c_void_p, ctypes.c_int
    tensors = 4 if source == _MIXED else 3
    library.run.argtypes = [pointer] * tensors + [number] * 3 + [pointer] * 2
    return library


@functools.cache
def _libraries(source: str, tiles: tuple[CutlassTile, ...]) -> tuple[ctypes.CDLL, ...]:
    with ThreadPoolExecutor() as threads:
        return tuple(threads.map(partial(_build, source=source), tiles))


def _cutlass_gemm(library: ctypes.CDLL) -> Gemm:
    """A kernel as a function of x, the weight and its scales if it has any."""

    def run(x: Tensor, *weight: Tensor) -> Tensor:
        shape = (*x.shape[:1], weight[0].shape[0], x.shape[1])
        workspace = x.new_empty(library.workspace_bytes(*shape), dtype=torch.uint8)
        y = x.new_empty(x.shape[0], weight[0].shape[0])
        stream = torch.cuda.current_stream().cuda_stream
        tensors = [tensor.data_ptr() for tensor in (x, *weight, y)]
        if status := library.run(*tensors, *shape, workspace.data_ptr(), stream):
            raise RuntimeError(f"CUTLASS: status {status} for {list(shape)}")
        return y

    return run


@functools.lru_cache(maxsize=8)
def _fastest_cutlass(rows: int, n: int, k: int) -> Gemm:
    x = torch.randn(rows, k, device="cuda").bfloat16()
    weights = torch.randn(_copies(n, k), n, k, device="cuda").bfloat16()
    exact = x.float() @ weights[0].float().T
    libraries = _libraries(_LINEAR, CUTLASS_TILES)
    return _fastest_of(libraries, x, [(weight,) for weight in weights], exact)


@functools.lru_cache(maxsize=8)
def _fastest_mixed(rows: int, n: int, k: int) -> Gemm:
    """Its kernels of integers of four bits in groups of 128."""
    x = torch.randn(rows, k, device="cuda").bfloat16()
    packed = [
        quantize(_INT4, torch.randn(n, k, device="cuda").bfloat16()) for _ in range(_copies(n, k))
    ]
    weights = [_as_cutlass_reads(each["weight"], each["weight_scale"]) for each in packed]
    first, scale = packed[0]["weight"], weights[0][1].t().contiguous()
    exact = x.float() @ dequantize(_INT4, first, scale.half()).float().T
    return _fastest_of(_libraries(_MIXED, MIXED_TILES), x, weights, exact)


def _fastest_of(
    libraries: Sequence[ctypes.CDLL], x: Tensor, weights: Weights, exact: Tensor
) -> Gemm:
    times: dict[Gemm, float] = {}
    for gemm in map(_cutlass_gemm, libraries):
        try:
            apart = (gemm(x, *weights[0]).float() - exact).norm() / exact.norm()
        except RuntimeError:
            continue  # the tile takes no such shape
        if apart < 2.0**-7:
            times[gemm] = graph_time(partial(_rotated, gemm, x, weights), 5)
    if not times:
        pytest.skip(f"CUTLASS: none of its kernels takes {list(x.shape)} by {list(exact.shape)}")
    return min(times, key=times.__getitem__)


def _rotated(gemm: Gemm, x: Tensor, weights: Weights, i: int) -> Tensor:
    return gemm(x, *weights[i % len(weights)])


def _copies(n: int, k: int) -> int:
    """Copies of a weight that take turns, so that none is in L2, were it of bfloat16 or FP8."""
    return min(_MOST_COPIES, max(2, _POOL_BYTES // (n * k)))


def _as_cutlass_reads(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Integers in two's complement, and scales [groups, out_features] of bfloat16."""
    return weight ^ 0x88, scale.t().contiguous().bfloat16()


@functools.lru_cache(maxsize=8)
def _fastest_algorithm(operands: str, rows: int, n: int, k: int) -> Callable[[LinearArgs], Tensor]:
    if operands not in OPERANDS:
        pytest.skip(f"cuBLASLt: its algorithms for {operands} are not searched")
    scaled = operands != "bfloat16"
    pool = torch.randn(_copies(n, k) * n * k, device="cuda")
    pool = pool.to(torch.float8_e4m3fn if scaled else torch.bfloat16)
    measured = problem((operands, n, k), rows, pool)
    finals = [a for a in screened(measured, ()) if is_right(a, measured)]
    times = {a: graph_time(partial(measured.call, a), 5) for a in finals}
    if not times:
        pytest.skip(f"cuBLASLt: no algorithm for {rows} rows by [{n}, {k}]")
    best, plan = min(times, key=times.__getitem__), measured.plan

    def run(call: LinearArgs) -> Tensor:
        scales = (call.x_scale, call.weight_scale) if scaled else ()
        y = call.x.new_empty((rows, n), dtype=torch.bfloat16)
        return plan.run(call.x, call.weight, y, best, *scales)

    return run


def cublaslt(*args: Any) -> Tensor:
    """``linear`` by the fastest of cuBLASLt's algorithms as measured here."""
    call = LinearArgs(*args)
    operands = format_of(call.x, call.weight, call.x_scale, call.weight_scale).name
    fastest = _fastest_algorithm(operands, call.x.shape[0], *call.weight.shape)
    activated: Tensor = _epilogue(fastest(call), *call.epilogue)
    return activated


def cutlass(*args: Any) -> Tensor:
    """``linear`` by the fastest of CUTLASS's kernels as measured here; skips the benchmark where
    they cannot be built."""
    if reason := why_no_cutlass():
        pytest.skip(reason)
    call = LinearArgs(*args)
    y = _fastest_cutlass(call.x.shape[0], *call.weight.shape)(call.x, call.weight)
    activated: Tensor = _epilogue(y, *call.epilogue)
    return activated


_prepared: dict[int, tuple[Tensor, ...]] = {}


def cutlass_mixed(*args: Any) -> Tensor:
    """``linear`` by a weight in ``int4_g128`` by the fastest of CUTLASS's kernels as measured here.

    Skips the benchmark where they cannot be built.

    The first call for a weight brings it to their layout.  The weight is held, so that no other
    takes its address.
    """
    if reason := why_no_cutlass():
        pytest.skip(reason)
    call = LinearArgs(*args)
    weight, key = call.weight, call.weight.data_ptr()
    if key not in _prepared:
        if len(_prepared) >= _MOST_COPIES:
            _prepared.clear()
        _prepared[key] = (weight, *_as_cutlass_reads(weight, call.weight_scale))
    gemm = _fastest_mixed(call.x.shape[0], weight.shape[0], call.x.shape[1])
    activated: Tensor = _epilogue(gemm(call.x, *_prepared[key][1:]), *call.epilogue)
    return activated


RIVALS: dict[str, Callable[..., Tensor]] = {"cublaslt measured": cublaslt, "cutlass": cutlass}
