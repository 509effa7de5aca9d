"""``gelu_tanh_mul`` is the gated activation of Gemma (GeGLU with the tanh approximation)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._gated import gate_and_up, gated_op


def gelu_tanh_mul(gate_up: Tensor, up: Tensor | None = None) -> Tensor:
    """``gelu(gate) * up`` (Shazeer, 2020, eq. 6) with tanh (Hendrycks and Gimpel, 2016, section 2).

    Args:
        gate_up: [..., 2 * I], floating point: I gate columns, then I up columns; or, with ``up``,
            the gate columns alone, [..., I].
        up: [..., I], like the gate; None where it is part of ``gate_up``.

    Returns:
        [..., I] in the same dtype, contiguous; computed in float32 and rounded once.

    Raises:
        ValueError: the last dimension is odd, or gate and up differ.
    """
    return torch.ops.fw.gelu_tanh_mul.default(gate_up, up)  # type: ignore[no-any-return]


def _reference(gate_up: Tensor, up: Tensor | None = None) -> Tensor:
    gate, up = gate_and_up(gate_up, up)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype).contiguous()


OP = gated_op("gelu_tanh_mul", _reference, "gelu_tanh")
