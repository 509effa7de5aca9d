"""The kernels of csrc for tests that call them directly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusewright.ops import load_cuda_library


def csrc_kernels() -> Any:
    """``torch.ops.fw_cuda``.  Skips a test where csrc is not built, or the GPU has another SM."""
    if torch.cuda.get_device_capability() != (9, 0) or not load_cuda_library():
        pytest.skip("needs csrc and SM 9.0")
    return torch.ops.fw_cuda
