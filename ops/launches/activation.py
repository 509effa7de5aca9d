"""Launches of the gated activations."""

from __future__ import annotations

import torch
from torch import Tensor

from .._launch import Launch
from .tiles import cdiv, next_power_of_2

# Below this many tokens the grid is small: short blocks spread the row over more SMs.
_FEW_TOKENS = 32


def gated_activation(gate_up: Tensor, activation: str) -> tuple[list[Launch], Tensor]:
    intermediate = gate_up.shape[-1] // 2
    out = torch.empty(
        (*gate_up.shape[:-1], intermediate), dtype=gate_up.dtype, device=gate_up.device
    )
    if gate_up.stride(-1) != 1:
        gate_up = gate_up.contiguous()
    rows = gate_up.reshape(-1, 2 * intermediate)
    num_tokens = rows.shape[0]
    widest = 512 if num_tokens <= _FEW_TOKENS else 2048
    block = min(next_power_of_2(max(intermediate, 1)), widest)
    parts = cdiv(intermediate, block)
    launch = Launch(
        kernel="activation:_gated_activation_kernel",
        grid=(num_tokens * parts,),
        args={
            "gate_up_ptr": rows,
            "out_ptr": out,
            "intermediate": intermediate,
            "row_stride": rows.stride(0),
        },
        constexprs={"ACTIVATION": activation, "PARTS": parts, "BLOCK": block},
        num_warps=max(block // 256, 1),
        programmatic=True,
    )
    return [launch], out
