"""A feed-forward of experts: a router chooses some for each token, and their results are added.

What is fused of it is written plainly here: the router is a linear layer and ``route``, and the
experts' activation is spelled out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import ops
from ..experts import ExpertLinear
from ..layers import gate_up_linear, replicated_linear, row_linear
from ..parallel import GROUP
from ..quant.scheme import QuantKind
from ..spec import ModelSpec, MoESpec


class GatedMLP(nn.Module):
    """SiLU-gated feed-forward (Shazeer, 2020)."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        *,
        bias: bool = False,
        quants: tuple[QuantKind | None, QuantKind | None],
        world: int = 1,
        reduce: bool = True,
    ) -> None:
        """``quants``: of gate and up, and of down.  Each of ``world`` ranks has a part of
        ``inner``; without ``reduce`` the caller sums their results."""
        super().__init__()
        self.gate_up = gate_up_linear(hidden, inner, bias=bias, quant=quants[0], world=world)
        self.down = row_linear(
            inner, hidden, bias=bias, quant=quants[1], world=world, reduce=reduce
        )

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """The chosen experts' feed-forwards, a row of results for each choice.  Where each rank has
    experts of its own, ``first_expert`` is the id of the first of them: a buffer, so that all ranks
    run the same code.  The rows of other ranks' experts are zeros."""

    first_expert: Tensor | None

    def __init__(self, spec: ModelSpec, moe: MoESpec, layer: int) -> None:
        super().__init__()
        quants = [spec.quant_of(layer, f"mlp.experts.{name}") for name in ("gate_up", "down")]
        hidden, inner, world = spec.hidden_size, moe.intermediate_size, spec.ranks_an_expert
        gate_up = gate_up_linear(hidden, inner, quant=quants[0], world=world)
        down = row_linear(inner, hidden, quant=quants[1], world=world)
        whole, experts = spec.expert_parallel, spec.local_experts
        self.gate_up = ExpertLinear(experts, gate_up, whole=whole)
        self.down = ExpertLinear(experts, down, whole=whole)
        first = torch.zeros(1, dtype=torch.int32) if whole else None
        self.register_buffer("first_expert", first)

    def forward(self, x: Tensor, topk_ids: Tensor) -> Tensor:
        gate, up = self.gate_up(x, topk_ids, self.first_expert).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up, topk_ids, self.first_expert)  # type: ignore[no-any-return]


class MoE(nn.Module):
    """Router, chosen experts and, in some models, one that all tokens have (Shazeer et al., 2017;
    Dai et al., 2024, DeepSeekMoE).  Every rank routes alike and has a part of every expert, or
    some experts whole; what they have in common is summed over the ranks once.

    ``load``, where a spec asks for it, counts the tokens that chose each expert since the start.
    """

    load: Tensor | None

    def __init__(self, spec: ModelSpec, moe: MoESpec, layer: int) -> None:
        super().__init__()
        self.routing, self.world = moe.routing, spec.tensor_parallel_size
        load = torch.zeros(1, moe.num_experts, dtype=torch.int32) if moe.record_load else None
        self.register_buffer("load", load)
        self.router = replicated_linear(spec.hidden_size, moe.num_experts)
        self.experts = Experts(spec, moe, layer)
        self.shared: GatedMLP | None = None
        self.shared_gate = replicated_linear(spec.hidden_size, 1) if moe.shared_gate else None
        if moe.shared_intermediate_size:
            names = ("mlp.shared.gate_up", "mlp.shared.down")
            first, second = (spec.quant_of(layer, name) for name in names)
            self.shared = GatedMLP(
                spec.hidden_size,
                moe.shared_intermediate_size,
                quants=(first, second),
                world=self.world,
                reduce=False,
            )

    def forward(self, x: Tensor, slot_mapping: Tensor) -> Tensor:
        """[num_tokens, hidden] -> the same; tokens with a negative slot are padding."""
        y = self._combined(x, slot_mapping)
        return ops.all_reduce(y, GROUP) if self.world > 1 else y

    def _combined(self, x: Tensor, slot_mapping: Tensor) -> Tensor:
        how = self.routing
        topk_weights, topk_ids = ops.route(
            self.router(x),
            None,
            how.top_k,
            how.scoring,
            how.renormalize,
            how.num_groups,
            how.topk_groups,
            how.scaling,
        )
        if self.load is not None:
            ids = topk_ids.masked_fill(slot_mapping.unsqueeze(1) < 0, -1).flatten()
            ops.count_tokens(ids, torch.zeros_like(ids), self.load)
        y = self.experts(x, topk_ids)
        if self.shared is None:
            return ops.combine_experts(y, topk_weights)
        gate = None if self.shared_gate is None else self.shared_gate(x)
        return ops.combine_experts(y, topk_weights, self.shared(x), gate)
