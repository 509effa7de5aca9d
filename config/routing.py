"""How a router chooses experts, as data: what models read from a config and ``ops.route`` does."""

from __future__ import annotations

from dataclasses import dataclass

SCORINGS = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Routing:
    """How a router chooses.

    Attributes:
        top_k: experts of a token.
        scoring: "softmax" or "sigmoid" makes scores of logits.
        renormalize: the weights of a token's experts are divided by their sum.
        num_groups, topk_groups: experts are parted into ``num_groups`` groups of neighbours, and
            only those of a token's best ``topk_groups`` groups are chosen from (DeepSeek-AI, 2024,
            DeepSeek-V2, section 2.1.2); 1 and 1: from all.
        scaling: weights are multiplied by it at last.
    """

    top_k: int
    scoring: str = "softmax"
    renormalize: bool = True
    num_groups: int = 1
    topk_groups: int = 1
    scaling: float = 1.0

    def why_not(self, num_experts: int) -> str:
        """Why these rules cannot choose among ``num_experts`` experts; "" if they can."""
        if self.scoring not in SCORINGS:
            return f"scoring is {self.scoring!r}, expected {' or '.join(map(repr, SCORINGS))}"
        if self.num_groups < 1 or num_experts % self.num_groups:
            return f"num_groups is {self.num_groups}, expected a divisor of {num_experts} experts"
        if not 1 <= self.topk_groups <= self.num_groups:
            return f"topk_groups is {self.topk_groups}, expected 1 to {self.num_groups}"
        size = num_experts // self.num_groups
        if self.num_groups > 1 and size < 2:
            return f"groups of {size} experts, expected 2 or more"
        most = size * self.topk_groups
        if not 1 <= self.top_k <= most:
            of = f" of {self.topk_groups} groups" if self.num_groups > 1 else ""
            return f"top_k is {self.top_k}, expected 1 to the {most} experts{of}"
        return ""
