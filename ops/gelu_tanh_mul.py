"""``gelu_tanh_mul``: the gated activation of Gemma (GeGLU with the tanh approximation)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._gated import gated_op, split_halves


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """``gelu(gate) * up`` (Shazeer, 2020, eq. 6) with tanh (Hendrycks and Gimpel, 2016, section 2).

    Args:
        gate_up: [..., 2 * I], floating point: I gate columns, then I up columns.

    Returns:
        [..., I] in the same dtype, contiguous; computed in float32 and rounded once.

    Raises:
        ValueError: the last dimension is odd.
    """
    return torch.ops.fw.gelu_tanh_mul.default(gate_up)  # type: ignore[no-any-return]


def _reference(gate_up: Tensor) -> Tensor:
    gate, up = split_halves(gate_up)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


OP = gated_op("gelu_tanh_mul", _reference, "gelu_tanh")
