"""Runs kernels through the CUDA driver, by ctypes: it loads a cubin, packs parameters and launches.

There is no Triton and no compiler here.  A device is torch's index; its context is torch's, the
primary one.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import ClassVar

from ...config.arch import arch
from .variant import Binary, Variant, param_layout, struct_format

_INVALID_VALUE, _INVALID_CONTEXT = 1, 201
_MAX_DYNAMIC_SHARED_BYTES = 8  # a function attribute
_PREFER_SHARED, _CAPTURE_RELAXED = 1, 2
_BUFFER_POINTER, _BUFFER_SIZE = 1, 2  # keys in the list of a launch's extras
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # a launch attribute
_FREE_SHARED_BYTES = 48 << 10  # above this a kernel must ask

_ARGUMENTS = {
    "cuInit": [c_uint],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
    "cuCtxGetCurrent": [POINTER(c_void_p)],
    "cuCtxSetCurrent": [c_void_p],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuThreadExchangeStreamCaptureMode": [POINTER(c_int)],
    "cuModuleLoadData": [POINTER(c_void_p), c_char_p],
    "cuModuleGetFunction": [POINTER(c_void_p), c_void_p, c_char_p],
    "cuFuncSetAttribute": [c_void_p, c_int, c_int],
    "cuFuncSetCacheConfig": [c_void_p, c_int],
    "cuFuncGetParamInfo": [c_void_p, c_size_t, POINTER(c_size_t), POINTER(c_size_t)],
    "cuLaunchKernelEx": [c_void_p] * 4,
}


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute``: the value is a union of 64 bytes."""

    _fields_: ClassVar = [("id", c_int), ("value", c_uint64 * 8)]


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_: ClassVar = [
        ("grid_x", c_uint),
        ("grid_y", c_uint),
        ("grid_z", c_uint),
        ("block_x", c_uint),
        ("block_y", c_uint),
        ("block_z", c_uint),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)),
        ("num_attributes", c_uint),
    ]


class DriverError(RuntimeError):
    """The CUDA driver is missing, or refused a call."""


@functools.cache
def _cuda() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
        for name, types in _ARGUMENTS.items():
            getattr(library, name).argtypes = types
    except (OSError, AttributeError) as error:
        raise DriverError(
            f"libcuda.so.1: {error}; expected an NVIDIA driver for CUDA 12.4 or later: install one"
        ) from error
    _check(library, library.cuInit(0), "starting the CUDA driver")
    return library


def _check(library: ctypes.CDLL, status: int, what: str) -> None:
    if status:
        text = c_char_p()
        library.cuGetErrorString(status, byref(text))
        raise DriverError(f"{what}: CUDA error {status}, {(text.value or b'unknown').decode()}")


def _make_current(device: int) -> None:
    """Make torch's context, the primary one, current: a thread that is new to CUDA has none."""
    cuda, context = _cuda(), c_void_p()
    _check(cuda, cuda.cuCtxGetCurrent(byref(context)), "finding the current context")
    if not context:
        what = f"taking the context of device {device}"
        _check(cuda, cuda.cuDevicePrimaryCtxRetain(byref(context), device), what)
        _check(cuda, cuda.cuCtxSetCurrent(context), what)


@contextmanager
def _loading_allowed() -> Iterator[None]:
    """Let the block load code during a capture on another stream: loading may allocate, which
    would otherwise end that capture."""
    cuda, mode = _cuda(), c_int(_CAPTURE_RELAXED)
    _check(cuda, cuda.cuThreadExchangeStreamCaptureMode(byref(mode)), "relaxing capture")
    try:
        yield
    finally:
        _check(cuda, cuda.cuThreadExchangeStreamCaptureMode(byref(mode)), "restoring capture")


class Function:
    """A loaded kernel.  It is never unloaded, since captured graphs may hold it.

    Args:
        device: index of the device it is loaded on, which must be the current one.

    Raises:
        DriverError: the driver refuses the code, or sees other parameters than we pack.
    """

    def __init__(self, variant: Variant, binary: Binary, device: int) -> None:
        self._name, self._device, self._cuda = variant.name, device, _cuda()
        self._attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION)
        self._attribute.value[0] = 1
        self._config = _Config(
            block_x=binary.num_threads,
            block_y=1,
            block_z=1,
            shared_bytes=binary.shared_bytes,
            attributes=ctypes.pointer(self._attribute),
            num_attributes=int(variant.programmatic and arch(binary.sm).programmatic),
        )
        self._config_address = ctypes.addressof(self._config)
        _make_current(device)
        with _loading_allowed():
            self._handle = self._load(binary)
        form = struct_format(kind for _, kind in variant.signature)
        packer = struct.Struct(form)
        self._pack_into = packer.pack_into
        # Triton adds pointers to scratch memory, which no kernel of ours uses: they stay null.
        size = self._checked_size(param_layout(form))
        self._buffer, self._size = ctypes.create_string_buffer(max(size, 1)), c_size_t(size)
        self._extra = (c_void_p * 5)(
            _BUFFER_POINTER,
            ctypes.addressof(self._buffer),
            _BUFFER_SIZE,
            ctypes.addressof(self._size),
            None,
        )
        self._lock = threading.Lock()

    def _load(self, binary: Binary) -> c_void_p:
        cuda, module, handle = self._cuda, c_void_p(), c_void_p()
        where = f"{self._name} for sm_{binary.sm}"
        _check(cuda, cuda.cuModuleLoadData(byref(module), binary.cubin), f"loading {where}")
        name = binary.function.encode()
        found = cuda.cuModuleGetFunction(byref(handle), module, name)
        _check(cuda, found, f"finding {binary.function} in {where}")
        if binary.shared_bytes > _FREE_SHARED_BYTES:
            what = f"{binary.shared_bytes} bytes of shared memory for {where}"
            _check(cuda, cuda.cuFuncSetCacheConfig(handle, _PREFER_SHARED), what)
            status = cuda.cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED_BYTES, binary.shared_bytes)
            _check(cuda, status, what)
        return handle

    def _checked_size(self, layout: Sequence[tuple[int, int]]) -> int:
        """Bytes of all parameters as the driver counts them; the first must be those we pack."""
        found: list[tuple[int, int]] = []
        offset, size = c_size_t(), c_size_t()
        while not (
            status := self._cuda.cuFuncGetParamInfo(
                self._handle, len(found), byref(offset), byref(size)
            )
        ):
            found.append((offset.value, size.value))
        if status != _INVALID_VALUE:  # what the driver says past the last
            _check(self._cuda, status, f"reading the parameters of {self._name}")
        extra = found[len(layout) :]
        if found[: len(layout)] != [*layout] or any(size != 8 for _, size in extra):
            raise DriverError(
                f"{self._name} has parameters (offset, size) {found}, expected {[*layout]} and then"
                " pointers only: its binary is not of this variant; rebuild the artifact"
            )
        return sum(found[-1]) if found else 0

    def launch(self, grid: Sequence[int], stream: int, values: Sequence[int | float]) -> None:
        """Enqueue the kernel.

        Args:
            grid: one to three sizes, none 0.
            stream: a raw stream of the device.
            values: run-time parameters in the signature's order, pointers as addresses.
        """
        x, y, z = (*grid, 1, 1)[:3]
        try:
            # The driver reads both buffers during the call, in which other threads may run.
            with self._lock:
                self._pack_into(self._buffer, 0, *values)
                status = self._enqueue(x, y, z, stream)
                if status == _INVALID_CONTEXT:
                    _make_current(self._device)
                    status = self._enqueue(x, y, z, stream)
        except struct.error as error:
            raise ValueError(f"{self._name}: parameters {list(values)}: {error}") from error
        if status:
            _check(self._cuda, status, f"launching {self._name} on a grid of {(x, y, z)}")

    def _enqueue(self, x: int, y: int, z: int, stream: int) -> int:
        config = self._config
        config.grid_x, config.grid_y, config.grid_z, config.stream = x, y, z, stream
        status: int = self._cuda.cuLaunchKernelEx(
            self._config_address, self._handle, None, self._extra
        )
        return status
