"""``silu_mul`` is the gated activation of Llama, Mistral and Qwen (SwiGLU)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._gated import Gate, gate_and_up, gated_op


def silu_mul(
    gate_up: Tensor,
    up: Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    interleaved: bool = False,
) -> Tensor:
    """``silu(gate) * up`` (Shazeer, 2020, GLU Variants, eq. 6); with attributes
    ``gate * sigmoid(alpha * gate) * (up + up_offset)``, both clamped first.

    gpt-oss has alpha 1.702, limit 7, up_offset 1 and interleaved columns.

    Args:
        gate_up: [..., 2 * I], floating point: I gate columns, then I up columns; or, with ``up``,
            the gate columns alone, [..., I].
        up: [..., I], like the gate; None where it is part of ``gate_up``.
        alpha: of the logistic function.
        limit: upper bound of the gate and bound of ``up``'s magnitude, or None.
        up_offset: is added to ``up``.
        interleaved: ``gate_up`` has pairs of a gate column and its up column.

    Returns:
        [..., I] in the same dtype, contiguous; computed in float32 and rounded once.

    Raises:
        ValueError: the last dimension is odd, gate and up differ, or are interleaved and two.
    """
    attributes = (alpha, limit, up_offset, interleaved)
    return torch.ops.fw.silu_mul.default(  # type: ignore[no-any-return]
        gate_up, up, *(() if Gate(*attributes) == Gate() else attributes)
    )


def _reference(
    gate_up: Tensor,
    up: Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    interleaved: bool = False,
) -> Tensor:
    gate, up = gate_and_up(gate_up, up, Gate(alpha, limit, up_offset, interleaved))
    activated = F.silu(gate) if alpha == 1 else gate * torch.sigmoid(alpha * gate)
    return (activated * up).to(gate_up.dtype).contiguous()


OP = gated_op(
    "silu_mul",
    _reference,
    "silu",
    gates=[Gate(1.702, 7.0, 1.0, interleaved=True), Gate(1.702, limit=2.5), Gate(interleaved=True)],
)
