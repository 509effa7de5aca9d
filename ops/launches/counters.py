"""What kernels keep on the device from launch to launch; above all, arrival counters.

A kernel that divides one result among programs counts those that are done; the last one combines
what the others left in memory, and sets its counter back to zero.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

MAX_COUNTERS = 1 << 16


@functools.cache
def zeros_between_launches(device: torch.device, numel: int, dtype: torch.dtype) -> Tensor:
    """[numel], zeros at first, then what each launch leaves for the next.

    One stream a device may run such launches at a time.

    Raises:
        RuntimeError: it would be allocated inside of a CUDA graph's capture.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"what a kernel keeps on {device} between launches is first asked for inside a CUDA"
            " graph capture, where it cannot be allocated: run the op once before capturing"
        )
    return torch.zeros(numel, dtype=dtype, device=device)


def counters(device: torch.device) -> Tensor:
    """[MAX_COUNTERS] int32, zero between launches; all kernels share them."""
    return zeros_between_launches(device, MAX_COUNTERS, torch.int32)
