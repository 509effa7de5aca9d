"""How a model's linear layers are quantized, as data: part of ``ModelSpec`` and so of the key.

Always float8_e4m3fn, up to 448 in size; a value is its FP8 number times its scale, float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from ...config import outside_key

BLOCK = 128

QuantKind: TypeAlias = Literal["fp8", "fp8_block", "fp8_static"]
"""What a scale covers, of weights [N, K] and of activations [M, K]:

kind        weights                         activations
fp8         one output channel, [N, 1]      one token, [M, 1], found at run time
fp8_block   128 x 128, [N / 128, K / 128]   128 of one token, [M, K / 128], found at run time
fp8_static  the whole matrix, [1, 1]        the whole matrix, [1, 1], from the checkpoint
"""
KINDS: tuple[QuantKind, ...] = get_args(QuantKind)

LINEARS = ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")
"""What is quantized in a layer unless left out; never norms, embedding and ``lm_head``."""


@dataclass(frozen=True)
class QuantScheme:
    """``unquantized`` names, for each layer, the ``LINEARS`` left in the model's dtype; ``online``
    weights are quantized while they are loaded, others are so in the checkpoint."""

    kind: QuantKind
    unquantized: tuple[tuple[str, ...], ...]
    online: bool = field(metadata=outside_key("values of weights never enter the code"))

    def kind_of(self, layer: int, linear: str) -> QuantKind | None:
        """How one of ``LINEARS`` is quantized; None: not at all."""
        return None if linear in self.unquantized[layer] else self.kind


def weight_scale_shape(kind: QuantKind, out_features: int, in_features: int) -> tuple[int, int]:
    """The shape of the scale of a weight [out_features, in_features]."""
    if kind == "fp8":
        return out_features, 1
    if kind == "fp8_block":
        return -(-out_features // BLOCK), -(-in_features // BLOCK)
    return 1, 1
