"""Provides what generated code imports, torch's C functions and kernels from files, and loads it.

Nothing here imports Dynamo, Inductor or Triton: a machine without a compiler can run a piece.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# Registers the ops that generated code calls.
from ... import ops as _ops  # noqa: F401
from ...ops.core.driver import Function
from ...ops.core.variant import Binary, Variant

_C: Any = torch._C
_guards = _C._dynamo.guards

assert_size_stride = _guards.assert_size_stride
"""(tensor, size, stride): raises unless the tensor has them."""
assert_alignment = getattr(_guards, "assert_alignment", None)
"""(tensor, alignment): raises unless the tensor's address is a multiple of that many elements."""
empty_strided_cpu = _guards._empty_strided_cpu
"""(size, stride, dtype): a new uninitialized tensor on the CPU."""
empty_strided_cuda = _guards._empty_strided_cuda
"""(size, stride, dtype): a new uninitialized tensor on the current GPU."""
reinterpret_tensor = _guards._reinterpret_tensor
"""(tensor, size, stride, offset): another view of the same memory."""
alloc_from_pool = torch.ops.inductor._alloc_from_pool
"""(pool, byte offset, dtype, size, stride): a tensor inside a larger allocation."""
aten = torch.ops.aten
device = torch.device
empty_strided = torch.empty_strided
inf, nan = math.inf, math.nan
current_device = getattr(_C, "_cuda_getDevice", lambda: 0)
"""Index of this thread's GPU."""
get_raw_stream = getattr(_C, "_cuda_getCurrentRawStream", None)
"""(device index): the current stream's handle."""

_ALIGNMENT = 16


def _bias_addmm(
    bias: Tensor, a: Tensor, b: Tensor, *, out: Tensor, alpha: float = 1, beta: float = 1
) -> Tensor:
    """``addmm`` that passes an expanded bias as a vector, for which cuBLASLt has an epilogue."""
    same_rows = bias.size(0) == 1 or (bias.stride(0) == 0 and bias.size(0) != 0)
    return torch.addmm(bias[0] if same_rows else bias, a, b, out=out, alpha=alpha, beta=beta)


extern_kernels = SimpleNamespace(
    mm=torch.mm,
    addmm=torch.addmm,
    bias_addmm=_bias_addmm,
    bmm=torch.bmm,
    baddbmm=torch.baddbmm,
    _int_mm=torch._int_mm,
    _scaled_mm=torch._scaled_mm,
)
"""Library GEMMs that write into ``out``."""


def copy_if_misaligned(x: Tensor) -> Tensor:
    """Return ``x``, or a copy with the same strides if its address is no multiple of 16 bytes."""
    if x.data_ptr() % _ALIGNMENT == 0:
        return x
    span = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
    memory = x.as_strided((span if x.numel() else 0,), (1,)).clone()
    return memory.as_strided(x.shape, x.stride())


def require_aligned(x: Tensor, name: str) -> None:
    """Refuse a misaligned input that is written to: a copy would not see the writes.

    Raises:
        ValueError: names the input and its address.
    """
    if x.data_ptr() % _ALIGNMENT:
        raise ValueError(
            f"{name}: starts at address {x.data_ptr():#x}, expected a multiple of {_ALIGNMENT}: "
            "allocate it as a tensor of its own"
        )


@dataclass(frozen=True)
class KernelFiles:
    """The files beside a generated module, which finds them under the name ``kernel_files``.

    Attributes:
        folder: where the files are.
        read: gives the content of a file by its name; raises if it is not what was stored.
    """

    folder: Path
    read: Callable[[str], bytes]


def cpp_kernel(files: KernelFiles, name: str) -> Callable[..., None]:
    """Load the CPU kernel of the shared object ``name``; it is called with tensors and sizes."""
    files.read(name)
    # The library gets a tensor's address by a function of torch, whose own address it reads here.
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(
        _guards._torchinductor_pyobject_tensor_data_ptr
    )
    module = f"{name.removesuffix('.so')}.kernel"
    loader = ExtensionFileLoader(module, str(files.folder / name))
    spec = importlib.util.spec_from_loader(module, loader)
    if spec is None:
        raise ImportError(f"{files.folder / name}: no extension module")
    loaded = importlib.util.module_from_spec(spec)
    loader.exec_module(loaded)
    kernel: Callable[..., None] = loaded.kernel
    return kernel


class CudaKernel:
    """A loaded GPU kernel with its grid; see ``cuda_kernel``."""

    def __init__(
        self, function: Function, used: tuple[int, ...], grid: Callable[..., tuple[int, int, int]]
    ) -> None:
        self._function, self._used, self._grid = function, used, grid

    def run(self, *args: Any, stream: int) -> None:
        """Enqueue the kernel on a raw stream of its device; an empty grid does nothing."""
        grid = self._grid(*args)
        if 0 in grid:
            return
        values = [args[i] for i in self._used]
        self._function.launch(
            grid, stream, [v.data_ptr() if isinstance(v, Tensor) else v for v in values]
        )


def cuda_kernel(
    files: KernelFiles,
    name: str,
    *,
    function: str,
    sm: int,
    num_warps: int,
    shared_bytes: int,
    parameters: Mapping[str, str],
    grid: Callable[..., tuple[int, int, int]],
) -> CudaKernel:
    """Load the kernel ``function`` of the cubin ``name`` on the current device.

    Args:
        sm: compute capability it was compiled for, such as 90.
        shared_bytes: dynamic shared memory of a block.
        parameters: type of every argument of ``run``: ``*bf16``, ``i32``; ``constexpr`` for one
            that the code does not take.
        grid: blocks in x, y and z, from the arguments of ``run``.
    """
    used = tuple(i for i, kind in enumerate(parameters.values()) if kind != "constexpr")
    signature = tuple((k, v) for k, v in parameters.items() if v != "constexpr")
    variant = Variant(f"inductor:{name}", signature, (), (), num_warps, 0)
    binary = Binary(function, sm, shared_bytes, 32 * num_warps, files.read(name))
    return CudaKernel(Function(variant, binary, current_device()), used, grid)


PROVIDED = frozenset(
    {
        "alloc_from_pool",
        "assert_alignment",
        "assert_size_stride",
        "aten",
        "copy_if_misaligned",
        "cpp_kernel",
        "cuda_kernel",
        "current_device",
        "device",
        "empty_strided",
        "empty_strided_cpu",
        "empty_strided_cuda",
        "extern_kernels",
        "get_raw_stream",
        "inf",
        "math",
        "nan",
        "reinterpret_tensor",
        "require_aligned",
    }
)
"""The names that generated code may import from here."""


def load_piece(
    source: bytes, path: Path, read: Callable[[str], bytes] | None = None
) -> Callable[..., Sequence[Any]]:
    """Execute a generated module, which loads its kernels, and return its ``call``.

    Args:
        source: the module's text, whose digest the caller has verified.
        path: the file it came from; kernels lie beside it.
        read: content of a file beside it, by name, verified; unverified from disk when None.

    Returns:
        A function from the piece's inputs (tensors and sizes) to its outputs.
    """
    module = ModuleType(f"piece_{path.parent.name}")
    module.__file__ = str(path)
    folder = path.parent
    files = KernelFiles(folder, read or (lambda name: (folder / name).read_bytes()))
    module.__dict__["kernel_files"] = files
    exec(compile(source, str(path), "exec"), module.__dict__)
    call: Callable[..., Sequence[Any]] = module.call
    return call
