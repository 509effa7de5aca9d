"""Keeps what kernels leave on the device from launch to launch; above all, arrival counters.

A kernel that divides one result among programs counts those that are done; the last one combines
what the others left in memory, and sets its counter back to zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_COUNTERS = 1 << 16
_GRAPHS = -1
_made: dict[tuple[torch.device, int, int, torch.dtype], Tensor] = {}


def zeros_between_launches(device: torch.device, numel: int, dtype: torch.dtype) -> Tensor:
    """[numel], zeros at first, then what each launch leaves for the next.

    Launches of one stream run one after the other, so each stream has its own.  Captured graphs
    have one more: of those, one a device may run at a time.

    Raises:
        RuntimeError: it would be allocated inside of a CUDA graph's capture.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    stream = _stream(device)
    found = _made.get((device, stream, numel, dtype))
    if found is not None:
        return found
    if stream == _GRAPHS:
        raise RuntimeError(
            f"what a kernel keeps on {device} between launches is first asked for inside a CUDA"
            " graph capture, where it cannot be allocated: run the op once before capturing"
        )
    for whose in (_GRAPHS, stream):  # a capture may come next
        key = (device, whose, numel, dtype)
        if key not in _made:
            _made[key] = torch.zeros(numel, dtype=dtype, device=device)
    return _made[device, stream, numel, dtype]


def _stream(device: torch.device) -> int:
    """The owner of the next launches: a raw stream, or the captured graphs."""
    if device.type != "cuda":
        return 0
    if torch.cuda.is_current_stream_capturing():
        return _GRAPHS
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream


def counters(device: torch.device) -> Tensor:
    """[MAX_COUNTERS] int32, zero between launches; all kernels share them."""
    return zeros_between_launches(device, MAX_COUNTERS, torch.int32)
