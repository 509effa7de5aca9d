"""Gated activations: ``act(gate) * up`` from one packed row of gate and up.

Bandwidth-bound: a row of 2 * I elements is read and I are written.  Each thread has two loads of
16 bytes or more in flight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._op import Launch

# Below this many tokens the grid is small: short blocks spread the row over more SMs.
_FEW_TOKENS = 32


@triton.jit
def _gated_activation_kernel(
    gate_up_ptr,
    out_ptr,
    intermediate,
    row_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Tokens on axis 0, the only axis that may exceed 65535 programs.
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < intermediate
    gate_ptr = gate_up_ptr + row * row_stride
    gate = tl.load(gate_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + intermediate + cols, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        exponent = gate
    else:
        # 0.5 * (1 + tanh(u)) is the logistic function of 2u; sqrt(2 / pi) as in the paper.
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    out = gate / (1.0 + tl.exp(-exponent)) * up
    tl.store(out_ptr + row * intermediate + cols, out.to(out_ptr.dtype.element_ty), mask=mask)


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
    block = min(triton.next_power_of_2(max(intermediate, 1)), widest)
    launch = Launch(
        kernel=_gated_activation_kernel,
        grid=(num_tokens, triton.cdiv(intermediate, block)),
        args={
            "gate_up_ptr": rows,
            "out_ptr": out,
            "intermediate": intermediate,
            "row_stride": rows.stride(0),
        },
        constexprs={"ACTIVATION": activation, "BLOCK": block},
        num_warps=min(max(block // 256, 1), 4),
    )
    return [launch], out
