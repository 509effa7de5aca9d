"""Calls cuBLASLt through ctypes: ``x @ weight.T`` by an algorithm that the caller names.

torch takes the first algorithm of the library's heuristic; for many shapes another is faster.  An
algorithm is the 64 bytes of ``cublasLtMatmulAlgo_t``, which the library's manual allows to keep for
the same version of the library, and for no other.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Mapping
from ctypes import (
    POINTER,
    byref,
    c_float,
    c_int,
    c_int64,
    c_size_t,
    c_uint,
    c_uint16,
    c_uint64,
    c_void_p,
)
from typing import ClassVar

import torch
from torch import Tensor

from ...config.device_table import ALGORITHM_BYTES

WORKSPACE_BYTES = 32 << 20
"""Most workspace that an algorithm may need; torch gives its own GEMMs on Hopper as much."""

# cudaDataType_t and cublasComputeType_t
_BFLOAT16, _FLOAT32, _E4M3, _COMPUTE_FLOAT32 = 14, 0, 28, 68
# Attributes of an operation, of a preference, and their values.
_TRANSPOSE_A, _WEIGHT_SCALE, _X_SCALE, _WEIGHT_SCALES, _X_SCALES = 3, 17, 18, 31, 32
_TRANSPOSED, _SCALE_EACH_ROW = 1, 3
_MAX_WORKSPACE = 1
_ANY_ADDRESS = 256  # the library checks that there is an address; nothing reads from this one

SETTINGS: Mapping[str, tuple[int, type[ctypes._SimpleCData[int]]]] = {
    "id": (0, c_int),
    "tile": (1, c_uint),
    "split_k": (2, c_int),
    "reduction": (3, c_uint),
    "swizzle": (4, c_uint),
    "option": (5, c_uint),
    "stages": (6, c_uint),
    "inner": (7, c_uint16),
    "cluster": (8, c_uint16),
}
"""Settings of an algorithm, under the library's numbers.  All can be read; all but the id can be
set."""

_ARGUMENTS = {
    "cublasLtGetVersion": [],
    "cublasLtCreate": [POINTER(c_void_p)],
    "cublasLtMatmulDescCreate": [POINTER(c_void_p), c_int, c_int],
    "cublasLtMatmulDescDestroy": [c_void_p],
    "cublasLtMatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatrixLayoutCreate": [POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatrixLayoutDestroy": [c_void_p],
    "cublasLtMatmulPreferenceCreate": [POINTER(c_void_p)],
    "cublasLtMatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatmulPreferenceDestroy": [c_void_p],
    "cublasLtMatmulAlgoGetHeuristic": [c_void_p] * 7 + [c_int, c_void_p, POINTER(c_int)],
    "cublasLtMatmulAlgoCheck": [c_void_p] * 8,
    "cublasLtMatmulAlgoConfigGetAttribute": [c_void_p, c_int, c_void_p, c_size_t, c_void_p],
    "cublasLtMatmulAlgoConfigSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatmul": [c_void_p] * 14 + [c_size_t, c_void_p],
}


class CublasLtError(RuntimeError):
    """cuBLASLt is missing, or refused a call."""


class _Result(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``."""

    _fields_: ClassVar = [
        ("algorithm", ctypes.c_ubyte * ALGORITHM_BYTES),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


@functools.cache
def _library() -> ctypes.CDLL:
    """The copy of the library that torch has loaded; the loader finds it by this name."""
    name = f"libcublasLt.so.{(torch.version.cuda or '0').partition('.')[0]}"
    try:
        library = ctypes.CDLL(name)
        for function, types in _ARGUMENTS.items():
            getattr(library, function).argtypes = types
    except (OSError, AttributeError) as error:
        raise CublasLtError(
            f"{name}: {error}; expected the cuBLASLt that comes with torch for CUDA 12 or later"
        ) from error
    library.cublasLtGetVersion.restype = c_size_t
    return library


def version() -> int:
    """Version of the library, as 130002 for 13.0.2.  Raises CublasLtError without a library."""
    return int(_library().cublasLtGetVersion())


def installed() -> str:
    """``version``, or "none" where there is no library."""
    try:
        return str(version())
    except CublasLtError:
        return "none"


def _call(name: str, *args: object) -> None:
    if status := getattr(_library(), name)(*args):
        raise CublasLtError(f"{name}: cuBLAS status {status}")


@functools.cache
def handle(device: int) -> c_void_p:
    """The library's context for a device, made at the first call.

    Raises:
        RuntimeError: that call is inside a CUDA graph's capture, where the context cannot allocate.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"cuBLASLt on cuda:{device} is first asked for inside a CUDA graph capture, where it"
            " cannot allocate: run the op once before capturing"
        )
    made = c_void_p()
    with torch.cuda.device(device):
        _call("cublasLtCreate", byref(made))
    return made


class GemmPlan:
    """The GEMM plan of ``x @ weight.T`` for one shape; x, weight and y are contiguous.

    Its descriptors are destroyed with it.  A call holds the plan until everything is enqueued, and
    a captured graph keeps no descriptor.

    Args:
        operands: one of ``config.device_table.OPERANDS``.
        device: index of the device.
        rows, out_features, in_features: of x [rows, in_features], weight [out_features,
            in_features] and y [rows, out_features], which is bfloat16.
    """

    def __init__(
        self, operands: str, device: int, rows: int, out_features: int, in_features: int
    ) -> None:
        self._device, self._handle = device, handle(device)
        self._operation = self._own("MatmulDesc", _COMPUTE_FLOAT32, _FLOAT32)
        self._lock = threading.Lock()
        self._workspace_bytes: dict[bytes, int] = {}
        self._scaled = operands != "bfloat16"
        self._set(_TRANSPOSE_A, c_int(_TRANSPOSED))
        if self._scaled:  # the scales' own come with a call
            for attribute in (_X_SCALE, _WEIGHT_SCALE):
                self._set(attribute, c_void_p(_ANY_ADDRESS))
        if operands == "fp8 token":
            self._set(_WEIGHT_SCALES, c_int(_SCALE_EACH_ROW))
            self._set(_X_SCALES, c_int(_SCALE_EACH_ROW))
        kind = _E4M3 if self._scaled else _BFLOAT16
        # Column-major, as the library counts: y.T = weight @ x.T.
        weight = self._layout(kind, in_features, out_features)
        y = self._layout(_BFLOAT16, out_features, rows)
        self._shapes = (weight, self._layout(kind, in_features, rows), y, y)
        self._one, self._zero = c_float(1), c_float(0)

    def _own(self, kind: str, *args: int) -> c_void_p:
        """Make a descriptor that lives as long as this plan."""
        made = c_void_p()
        _call(f"cublasLt{kind}Create", byref(made), *args)
        weakref.finalize(self, _call, f"cublasLt{kind}Destroy", made).atexit = False
        return made

    def _layout(self, kind: int, rows: int, columns: int) -> c_void_p:
        return self._own("MatrixLayout", kind, rows, columns, rows)

    def _set(self, attribute: int, value: c_int | c_void_p) -> None:
        size = ctypes.sizeof(value)
        what = (self._operation, attribute, byref(value), size)
        _call("cublasLtMatmulDescSetAttribute", *what)

    def algorithms(self, most: int) -> list[bytes]:
        """Algorithms that the library's heuristic offers, its favourite first."""
        results, found = (_Result * most)(), c_int()
        preference, size = c_void_p(), c_size_t(WORKSPACE_BYTES)
        _call("cublasLtMatmulPreferenceCreate", byref(preference))
        try:
            what = (preference, _MAX_WORKSPACE, byref(size), ctypes.sizeof(size))
            _call("cublasLtMatmulPreferenceSetAttribute", *what)
            args = (self._handle, self._operation, *self._shapes, preference, most, results)
            with torch.cuda.device(self._device):
                _call("cublasLtMatmulAlgoGetHeuristic", *args, byref(found))
        finally:
            _call("cublasLtMatmulPreferenceDestroy", preference)
        return [bytes(r.algorithm) for r in results[: found.value] if not r.state]

    def refuses(self, algorithm: bytes) -> str:
        """Why the algorithm cannot run here, or an empty string."""
        result = _Result()
        args = (self._handle, self._operation, *self._shapes, algorithm, byref(result))
        with torch.cuda.device(self._device):
            status = _library().cublasLtMatmulAlgoCheck(*args)
        if status or result.state:
            return f"cuBLAS status {status or result.state}"
        if result.workspace > WORKSPACE_BYTES:
            return f"a workspace of {result.workspace} bytes, more than {WORKSPACE_BYTES}"
        self._workspace_bytes[algorithm] = result.workspace
        return ""

    def workspace_bytes(self, algorithm: bytes) -> int:
        """Workspace that the algorithm needs.  Raises CublasLtError if it cannot run."""
        if algorithm not in self._workspace_bytes and (reason := self.refuses(algorithm)):
            raise CublasLtError(f"cublasLtMatmulAlgoCheck: {reason}")
        return self._workspace_bytes[algorithm]

    def run(
        self, x: Tensor, weight: Tensor, y: Tensor, algorithm: bytes, *scales: Tensor
    ) -> Tensor:
        """Enqueue the GEMM on the current stream, and return y.

        The workspace comes from torch's allocator for this call alone.  Later work on the same
        stream reuses it; in a captured graph it lies in the graph's pool.

        Args:
            x, weight, y: as described, contiguous, at addresses that are multiples of 16.
            algorithm: one that ``refuses`` does not refuse.
            scales: for FP8, those of x and then of weight: float32, contiguous.

        Raises:
            CublasLtError: the library refuses.
        """
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                return self.run(x, weight, y, algorithm, *scales)
        needed = self.workspace_bytes(algorithm)
        workspace = x.new_empty(needed, dtype=torch.uint8) if needed else None
        into = (y.data_ptr(), self._shapes[3])
        # The operation holds the scales' addresses until it is enqueued.
        with self._lock:
            if self._scaled:
                self._set(_X_SCALE, c_void_p(scales[0].data_ptr()))
                self._set(_WEIGHT_SCALE, c_void_p(scales[1].data_ptr()))
            _call(
                "cublasLtMatmul",
                self._handle,
                self._operation,
                byref(self._one),
                weight.data_ptr(),
                self._shapes[0],
                x.data_ptr(),
                self._shapes[1],
                byref(self._zero),
                *into,
                *into,
                algorithm,
                None if workspace is None else workspace.data_ptr(),
                needed,
                torch._C._cuda_getCurrentRawStream(self._device),
            )
        return y


def setting(algorithm: bytes, name: str) -> int:
    """The value of one of ``SETTINGS`` in an algorithm."""
    attribute, kind = SETTINGS[name]
    value = kind()
    what = (algorithm, attribute, byref(value), ctypes.sizeof(value), None)
    _call("cublasLtMatmulAlgoConfigGetAttribute", *what)
    return value.value


def changed(algorithm: bytes, **settings: int) -> bytes | None:
    """The algorithm with other ``SETTINGS``; None if the library does not know a value."""
    copy = ctypes.create_string_buffer(algorithm, ALGORITHM_BYTES)
    for name, wanted in settings.items():
        attribute, kind = SETTINGS[name]
        value = kind(wanted)
        if _library().cublasLtMatmulAlgoConfigSetAttribute(
            copy, attribute, byref(value), ctypes.sizeof(value)
        ):
            return None
    return copy.raw
