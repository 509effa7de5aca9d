"""Makes a dense model's feed-forwards ones of experts, from which training goes on.

Tokens are parted into as many clusters as there are experts.  A cluster's expert gets the dense
layer's neurons that do most for its tokens, and its center is the router's row (after Komatsuzaki
et al., 2023, Sparse Upcycling, and Zhang et al., 2022, MoEfication).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from abacus_model import MLP, Abacus, MoE
from torch import Tensor

SHARPNESS = 20.0
"""The router's logits of opposite directions differ by twice as much."""


@torch.no_grad()
def upcycle(dense: Abacus, model: Abacus, ids_BT: Tensor, seed: int) -> None:
    """Fill ``model`` from ``dense``, which is of the same shape but for its feed-forwards.

    Args:
        ids_BT: tokens by which neurons are judged.
    """
    seen: list[Tensor] = []
    for layer in dense.model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, 1)))
    dense(ids_BT)
    state = {name: w for name, w in dense.state_dict().items() if ".mlp." not in name}
    model.load_state_dict(state, strict=False)
    generator = torch.Generator().manual_seed(seed)
    for x_ND, old, new in zip(seen, dense.model.layers, model.model.layers, strict=True):
        _fill(x_ND, old.mlp, new.mlp, generator)


def _fill(x_ND: Tensor, dense: MLP, moe: MoE, generator: torch.Generator) -> None:
    experts = moe.gate.out_features
    size = moe.gate_proj_FD.shape[0] // experts
    centers_ED, nearest_N = _clusters(F.normalize(x_ND), experts, generator)
    moe.gate.weight.copy_(centers_ED * SHARPNESS / x_ND.norm(dim=1).mean())
    h_NI = F.silu(dense.gate_proj(x_ND)) * dense.up_proj(x_ND)
    effect_NI = h_NI.abs() * dense.down_proj.weight.norm(dim=0)
    for e in range(experts):
        chosen = effect_NI[nearest_N == e].mean(0).topk(size).indices
        part = slice(e * size, (e + 1) * size)
        moe.gate_proj_FD[part] = dense.gate_proj.weight[chosen]
        moe.up_proj_FD[part] = dense.up_proj.weight[chosen]
        moe.down_proj_DF[:, part] = dense.down_proj.weight[:, chosen]


def _clusters(x_ND: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Directions of the clusters, less what they have in common, and each token's cluster
    (spherical k-means)."""
    x_ND = F.normalize(x_ND - x_ND.mean(0))
    centers = x_ND[torch.randperm(len(x_ND), generator=generator)[:count]]
    for _ in range(20):
        nearest = (x_ND @ centers.T).argmax(1)
        sums = torch.zeros_like(centers).index_add_(0, nearest, x_ND)
        centers = F.normalize(sums)
    return centers, (x_ND @ centers.T).argmax(1)
