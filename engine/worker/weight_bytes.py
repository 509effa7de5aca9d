"""Counts the bytes of a model's weights: those it holds, and those that a step reads."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from ...config import ResolvedConfig
from ...model_executor.experts import ExpertLinear
from ...model_executor.loader import Model
from ...model_executor.spec import ModelSpec
from ..messages.step_reads import CacheReads, StepReads


def weight_bytes(module: nn.Module) -> int:
    """Bytes of the parameters and buffers; shared ones count once."""
    return _bytes([*module.parameters(), *module.buffers()])


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def step_reads(model: Model, spec: ModelSpec, config: ResolvedConfig) -> StepReads:
    """What a step of ``model`` has to read on this rank.  Of the embedding and of the table of
    rotations a step gathers a few rows, so they count only where ``lm_head`` shares them."""
    gathered = model.gathered()
    routed = [module for module in model.modules() if isinstance(module, ExpertLinear)]
    experts = sum(map(weight_bytes, routed))
    size = config.cache.block_size
    return StepReads(
        weights=weight_bytes(model) - _bytes(gathered) - experts,
        experts=experts,
        expert_share=spec.moe.routing.top_k / spec.moe.num_experts if spec.moe else 0.0,
        caches=tuple(
            CacheReads(
                len(group.layers)
                * group.spec.block_bytes(size)
                / (1 if group.spec.kind.per_sequence else size),
                group.spec.window,
                group.spec.kind.per_sequence,
            )
            for group in spec.cache_groups
        ),
    )
