"""``silu_mul``: the gated activation of Llama, Mistral and Qwen (SwiGLU)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._gated import gated_op, split_halves


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` (Shazeer, 2020, GLU Variants, eq. 6).

    Args:
        gate_up: [..., 2 * I], floating point: I gate columns, then I up columns.

    Returns:
        [..., I] in the same dtype, contiguous; computed in float32 and rounded once.

    Raises:
        ValueError: the last dimension is odd.
    """
    return torch.ops.fw.silu_mul.default(gate_up)  # type: ignore[no-any-return]


def _reference(gate_up: Tensor) -> Tensor:
    gate, up = split_halves(gate_up)
    return (F.silu(gate) * up).to(gate_up.dtype)


OP = gated_op("silu_mul", _reference, "silu")
