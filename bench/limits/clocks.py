"""Reads a GPU's clock and power while a benchmark runs.

At its power limit a GPU lowers its clock. A step then takes longer than its bytes and its
arithmetic at the highest clock explain, and what saves energy anywhere in it makes all of it
faster.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

_EVERY_S = 0.05
_SM = 1  # NVML_CLOCK_SM
_POWER_LIMIT = 0x4 | 0x80  # of NVML's reasons for a lower clock: software cap, external brake


@dataclass
class Clocks:
    """Samples of a GPU: the clock of its multiprocessors in MHz, its power in watts, and whether
    power limits the clock."""

    most_mhz: int = 0
    samples: list[tuple[int, float, bool]] = field(default_factory=list)

    def to_json(self) -> dict[str, float]:
        """Medians, the highest clock, and the share of the samples at the power limit; nothing
        without samples."""
        if not self.samples:
            return {}
        mhz, watts, limited = zip(*self.samples, strict=True)
        return {
            "sm_mhz": median(mhz),
            "most_sm_mhz": self.most_mhz,
            "power_w": round(median(watts), 1),
            "at_power_limit": round(sum(limited) / len(limited), 3),
        }


def power_text(clocks: dict[str, float]) -> str:
    """A remark on figures that were measured mostly at the power limit, else nothing."""
    if clocks.get("at_power_limit", 0.0) < 0.5:
        return ""
    return (
        f", at the power limit: {clocks['power_w']:.0f} W, multiprocessors at "
        f"{clocks['sm_mhz']:.0f} of {clocks['most_sm_mhz']:.0f} MHz"
    )


@contextmanager
def watch_clocks() -> Iterator[Clocks]:
    """Sample the current GPU in a thread until the block ends.  No samples come without a GPU or
    without ``nvidia-ml-py``, nor where the driver refuses."""
    clocks, ended = Clocks(), threading.Event()
    nvml, handle = _open()
    if nvml is None:
        yield clocks
        return
    clocks.most_mhz = nvml.nvmlDeviceGetMaxClockInfo(handle, _SM)

    def sample() -> None:
        while not ended.wait(_EVERY_S):
            try:
                watts = nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
                reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
                mhz = nvml.nvmlDeviceGetClockInfo(handle, _SM)
            except nvml.NVMLError:
                return
            clocks.samples.append((mhz, watts, bool(reasons & _POWER_LIMIT)))

    thread = threading.Thread(target=sample, name="clocks", daemon=True)
    thread.start()
    try:
        yield clocks
    finally:
        ended.set()
        thread.join()
        nvml.nvmlShutdown()


def _open() -> tuple[Any, Any]:
    """NVML and its handle of the current GPU, or twice None."""
    import torch

    try:
        import pynvml
    except ImportError:
        return None, None
    if not torch.cuda.is_available():
        return None, None
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        pynvml.nvmlDeviceGetMaxClockInfo(handle, _SM)
    except pynvml.NVMLError:
        return None, None
    return pynvml, handle
