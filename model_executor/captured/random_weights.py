"""Random weights for a twin, drawn so that a mistake changes its logits.

Norms are away from one, biases away from zero, and matrices are scaled by their fan-in, so that
activations and logits are of order one: what is forgotten, swapped or applied twice shows.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

EMBEDDING_GAIN = 2.0
"""Embeddings are wider than matrices: the first residual is felt, and tied logits lie apart."""


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Draw every parameter and every persistent buffer of a model.

    A value depends on the seed, the name and the shape alone; weights that are tied are drawn once.
    Buffers that hold neither zeros nor ones keep what they hold: they are tables that follow from
    the configuration.  The model must not be on the meta device.
    """
    with torch.no_grad():
        for name, param in model.named_parameters():
            owner, _, key = name.rpartition(".")
            param.copy_(_drawn(model.get_submodule(owner), key, param, _generator(seed, name)))
        for prefix, module in model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is None or key in module._non_persistent_buffers_set:
                    continue
                if bool((buffer == 0).all()) or bool((buffer == 1).all()):
                    generator = _generator(seed, f"{prefix}.{key}")
                    if buffer.is_floating_point():
                        buffer.copy_(_drawn(module, key, buffer, generator))
                    elif buffer.dtype == torch.int64 and buffer.dim() == 2:
                        buffer.copy_(_indices(module, buffer, generator))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:6], "little"))


def _drawn(owner: nn.Module, key: str, like: Tensor, generator: torch.Generator) -> Tensor:
    """New values for the parameter ``key`` of a module, in float32 on the CPU."""
    uniform = torch.rand(like.shape, generator=generator)
    if key.endswith("bias"):
        sign = torch.randint(0, 2, like.shape, generator=generator) * 2 - 1
        return sign * (0.05 + 0.2 * uniform)
    if like.dim() < 2 or _is_norm(owner):
        return 0.5 + uniform
    normal = torch.randn(like.shape, generator=generator)
    if isinstance(owner, nn.Embedding):
        return normal * (EMBEDDING_GAIN / math.sqrt(like.shape[-1]))
    fan_in = math.prod(like.shape[1:]) if isinstance(owner, _CONVOLUTIONS) else like.shape[-1]
    return normal / math.sqrt(fan_in)


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _is_norm(owner: nn.Module) -> bool:
    """Norms have an epsilon, whatever their class is called."""
    return any("eps" in name for name in vars(owner))


def _indices(owner: nn.Module, like: Tensor, generator: torch.Generator) -> Tensor:
    """A table [rows, k] of k different indices a row into the rows of the module's own matrix, such
    as the experts of each token where a router looks them up."""
    rows = [param.shape[0] for param in owner.parameters(recurse=False) if param.dim() == 2]
    scores = torch.rand(like.shape[0], max([like.shape[1], *rows]), generator=generator)
    return scores.argsort(dim=1)[:, : like.shape[1]]
