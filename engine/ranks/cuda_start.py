"""Starts the CUDA driver while Python imports torch, which would start it afterwards."""

from __future__ import annotations

import ctypes
import sys
from threading import Thread


def start_cuda(*, alone: bool) -> None:
    """Start the driver in a thread, and return at once.

    A process that has imported torch may have chosen a GPU, and is left alone.  Failures are
    not reported: torch meets them again, and says what is wrong.

    Args:
        alone: the process is the only rank.  It also gets the context of its GPU, the first
            visible one, which torch then finds.
    """
    if "torch" not in sys.modules:
        Thread(target=_start, args=(alone,), name="cuda start", daemon=True).start()


def _start(with_context: bool) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return  # no driver on this machine
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and with_context and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
