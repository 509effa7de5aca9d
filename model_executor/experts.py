"""A linear layer with a weight for each expert, in one parameter, and how it is loaded.

Checkpoints hold a tensor an expert; each is copied into its share of the parameter, by the rules of
the dense layer that it would be.  Nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..config.weight_format import StoredFormat, why_not_experts
from .layers import Linear
from .quant.scheme import QuantFormat
from .sharding import ShardRule


@dataclass(frozen=True)
class OneExpert:
    """One expert's share of a layer, as a ``Linear`` has it."""

    quant: QuantFormat | StoredFormat | None
    shape: tuple[int, int]
    weight: Tensor
    weight_scale: Tensor
    rules: dict[str, ShardRule]
    weight_zero: Tensor | None = None

    def share(self, expert: int | None) -> tuple[OneExpert, bool]:
        """The share itself."""
        return self, False

    def shares(self) -> tuple[OneExpert, ...]:
        """The share itself."""
        return (self,)


class ExpertLinear(nn.Module):
    """``x @ weight[expert].T`` for each choice of a token; who calls it may have a bias.

    With ``quant`` weights are FP8 and x is quantized before the matmul, as in ``Linear``; a static
    ``input_scale`` is that of all experts.  Or weights are stored in a format of few bits, and x
    is not quantized.  ``first`` is the number of expert 0 here, where other ranks have those before
    it; loading sets it.
    """

    weight_scale: Tensor
    weight_zero: Tensor
    input_scale: Tensor

    def __init__(self, num_experts: int, one: Linear, *, whole: bool = False) -> None:
        """Make ``num_experts`` experts, each like ``one``.  With ``whole`` a rank holds its experts
        uncut, and other ranks hold other experts.

        Raises:
            ValueError: the weight of ``one`` is stored in a format that experts cannot have.
        """
        super().__init__()
        if isinstance(one.quant, StoredFormat) and (reason := why_not_experts(one.quant)):
            raise ValueError(f"weights of experts cannot be {one.quant.name!r}: {reason}")
        self.quant = one.quant
        self.num_experts, self.whole, self.first = num_experts, whole, 0
        rules = one.rules.items()
        self.rules = {k: replace(rule, split=False) if whole else rule for k, rule in rules}
        self.weight_rule = replace(one.weight_rule, split=False) if whole else one.weight_rule
        shape = (num_experts, *one.weight.shape)
        weight = torch.empty(shape, dtype=one.weight.dtype, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.shape = (num_experts, *one.shape)
        if isinstance(one.quant, StoredFormat):
            for name in [*one.quant.tensors][1:]:
                like = getattr(one, name)
                self.register_buffer(name, like.new_empty((num_experts, *like.shape)))
        elif one.quant is not None:
            self.register_buffer("weight_scale", torch.zeros(num_experts, *one.weight_scale.shape))
            if one.quant.static:
                self.register_buffer("input_scale", torch.zeros(1, 1))

    def forward(
        self,
        x: Tensor,
        topk_ids: Tensor,
        first_expert: Tensor | None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """[num_tokens, in_features], or a row for each choice -> [num_tokens * top_k,
        out_features].  ``bias`` is [num_experts, out_features]."""
        beside: dict[str, Any] = {"first_expert": first_expert, "bias": bias}
        if self.quant is None:
            return ops.expert_linear(x, self.weight, topk_ids, **beside)
        if isinstance(self.quant, StoredFormat):
            if self.quant.zero is not None:
                beside["weight_zero"] = self.weight_zero
            beside |= {"weight_scale": self.weight_scale, "weight_format": self.quant.name}
            return ops.expert_linear(x, self.weight, topk_ids, **beside)
        known = self.input_scale if self.quant.static else None
        quantized, scale = ops.quantize_operand(x, "float8_e4m3fn", known, self.quant.columns)
        return ops.expert_linear(
            *(quantized, self.weight, topk_ids, scale, self.weight_scale, x.dtype), **beside
        )

    def place(self, rank: int) -> None:
        """Note which experts this rank holds: with ``whole``, the ``rank``-th share of all."""
        self.first = rank * self.num_experts if self.whole else 0

    @property
    def numbers(self) -> range:
        """The model's numbers of the experts that are here."""
        return range(self.first, self.first + self.num_experts)

    def share(self, expert: int | None) -> tuple[OneExpert | None, bool]:
        """The share of an expert, and whether it is another rank's: then that of any expert here
        stands for it.  None for None: there is no share of all."""
        if expert is None:
            return None, False
        elsewhere = expert not in self.numbers
        return self.expert(self.first if elsewhere else expert), elsewhere

    def shares(self) -> tuple[OneExpert, ...]:
        """Those of all experts that are here."""
        return tuple(map(self.expert, self.numbers))

    def expert(self, number: int) -> OneExpert:
        """The share of one of ``numbers``; writing to its tensors writes to the layer's."""
        at = number - self.first
        scale = self.weight_scale[at] if self.quant else self.weight
        stored = isinstance(self.quant, StoredFormat) and self.quant.zero is not None
        zero, shape = self.weight_zero[at] if stored else None, (self.shape[1], self.shape[2])
        return OneExpert(self.quant, shape, self.weight[at], scale, self.rules, zero)


def expert_shares(model: nn.Module, kind: str) -> Iterator[tuple[str, Tensor]]:
    """Every expert's share of the tensors ``kind`` ("weight" or "weight_scale"), by names such as
    ``layers.0.mlp.experts.down.weight[3]``."""
    for name, module in model.named_modules():
        if isinstance(module, ExpertLinear) and (
            kind == "weight" or isinstance(module.quant, QuantFormat)
        ):
            shares = getattr(module, kind).unbind(0)
            pairs = zip(module.numbers, shares, strict=True)
            yield from ((f"{name}.{kind}[{number}]", share) for number, share in pairs)
