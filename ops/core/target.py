"""Where an op runs, as far as kernels depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ...config.arch import HOPPER, why_csrc_has_no_code
from . import device_table as _device_table
from .cuda import why_not_built
from .desc import OpDesc


@dataclass(frozen=True)
class Target:
    """Where a layer runs: the device, its compute capability such as 90 (0: unknown), and whether
    the kernels of csrc are there (None: as in this process)."""

    device: torch.device
    sm: int = 0
    csrc: bool | None = None

    @classmethod
    def of(cls, desc: OpDesc) -> Target:
        return cls(torch.device(desc.device), desc.sm, desc.csrc)

    @property
    def why_no_hopper(self) -> str:
        """Why csrc's kernels cannot run on the device, or an empty string.  Their copy engine came
        with SM 9.0; for 8.0 and 8.9 the seam is what fills shared memory: cp.async."""
        if self.device.type not in ("cuda", "meta"):
            return f"on {self.device.type}, not CUDA"
        return why_csrc_has_no_code(self.sm)

    @property
    def why_no_csrc(self) -> str:
        """Why csrc's kernels are not there, or an empty string."""
        return why_not_built(self.csrc)


@lru_cache
def here(device: torch.device) -> Target:
    """The target that tensors on a device mean.  "meta" stands for a GPU with every kernel, since
    lowering has asked whether they are there."""
    if device.type == "cuda":
        return Target(device, _device_table.gpu_of(device)[1])
    return Target(device, HOPPER.sm if device.type == "meta" else 0, device.type == "meta" or None)
