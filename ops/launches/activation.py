"""Describes the launches of activations, of which most are gated."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.launch import Launch, Launches
from ..core.tiles import cdiv, dense_rows, next_power_of_2

# Below this many tokens the grid is small: short blocks spread the row over more SMs.
_FEW_TOKENS = 32


def _rows(x: Tensor) -> Tensor:
    return dense_rows(x).reshape(-1, x.shape[-1])


def gated_activation(
    gate_up: Tensor,
    up: Tensor | None,
    activation: str,
    *,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    interleaved: bool = False,
) -> Launches[Tensor]:
    """``gate_up`` is the gate alone where ``up`` is given, and all there is if the activation gates
    nothing; the rest is what a ``Gate`` has."""
    gates = activation in ("silu", "gelu_tanh")
    intermediate = gate_up.shape[-1] // (2 if gates and up is None else 1)
    out = torch.empty(
        (*gate_up.shape[:-1], intermediate), dtype=gate_up.dtype, device=gate_up.device
    )
    rows, up_rows = _rows(gate_up), None if up is None else _rows(up)
    num_tokens = rows.shape[0]
    widest = 512 if num_tokens <= _FEW_TOKENS else 2048
    block = min(next_power_of_2(max(intermediate, 1)), widest)
    parts = cdiv(intermediate, block)
    launch = Launch(
        kernel="activation:_gated_activation_kernel",
        grid=(num_tokens * parts,),
        args={
            "gate_up_ptr": rows,
            "up_ptr": up_rows,
            "out_ptr": out,
            "intermediate": intermediate,
            "row_stride": rows.stride(0),
            "up_row_stride": None if up_rows is None else up_rows.stride(0),
        },
        constexprs={
            "ACTIVATION": activation,
            "GATES": gates,
            "ALPHA": alpha,
            "LIMIT": limit,
            "UP_OFFSET": up_offset,
            "INTERLEAVED": interleaved,
            "PARTS": parts,
            "BLOCK": block,
        },
        num_warps=max(block // 256, 1),
    )
    return [launch], out
