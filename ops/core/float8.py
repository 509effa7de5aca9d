"""Defines FP8 as this stack stores it: e4m3fn, 8 bits with NaN and no infinity.

A stored q stands for the value q * scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .desc import OpDesc

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0


def to_e4m3(x: Tensor, scale: Tensor | None) -> Tensor:
    """x / scale in float32, to the nearest e4m3, ties to even; beyond +-448 saturated, NaN kept.

    Args:
        x: any floating-point dtype and shape.
        scale: float32, broadcast against ``x``; None: 1.
    """
    x = x.float() if scale is None else x.float() / scale
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def why_no_e4m3(desc: OpDesc, *names: str) -> str:
    """Empty, or why a kernel cannot convert these arguments: what converts came with sm_89."""
    found = [name for name in names if desc[name].dtype == E4M3]
    if found and 0 < desc.sm < 89:
        return f"{found[0]} is FP8, which sm_{desc.sm} cannot convert: that takes sm_89 or later"
    return ""
