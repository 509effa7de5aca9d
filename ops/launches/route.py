"""Describes the launch of the router's choice of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from ...config.routing import Routing
from ..core.launch import Launch, Launches
from ..core.tiles import dense_rows, next_power_of_2

_MOST_EXPERTS = 1024


def too_many(num_experts: int) -> str:
    """Why the kernel does not hold so many experts, or nothing."""
    if num_experts <= _MOST_EXPERTS:
        return ""
    return f"{num_experts} experts > {_MOST_EXPERTS}: those of a token are one tile"


def route(
    logits: Tensor,
    bias: Tensor | None,
    how: Routing,
) -> Launches[tuple[Tensor, Tensor]]:
    """The launch that chooses, for checked arguments of ``ops.route``, and its results."""
    num_tokens, num_experts = logits.shape
    logits = dense_rows(logits)
    weights = torch.empty((num_tokens, how.top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_tokens, how.top_k), dtype=torch.int32, device=logits.device)
    size = num_experts // how.num_groups
    tile = next_power_of_2(how.num_groups) * next_power_of_2(size)
    launch = Launch(
        kernel="route:_route_kernel",
        grid=(num_tokens,),
        args={
            "logits_ptr": logits,
            "bias_ptr": None if bias is None else bias.contiguous(),
            "weights_ptr": weights,
            "ids_ptr": ids,
            "row_stride": logits.stride(0),
            "scaling": float(how.scaling),
        },
        constexprs={
            "TOP_K": how.top_k,
            "TOP_K_BLOCK": next_power_of_2(how.top_k),
            "SCORING": how.scoring,
            "RENORMALIZE": how.renormalize,
            "NUM_GROUPS": how.num_groups,
            "TOPK_GROUPS": how.topk_groups,
            "GROUP_SIZE": size,
            "GROUPS_BLOCK": next_power_of_2(how.num_groups),
            "SIZE_BLOCK": next_power_of_2(size),
        },
        num_warps=max(tile // 256, 1),
    )
    return [launch], (weights, ids)
