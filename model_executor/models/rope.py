"""Rope settings of a config: transformers 4 has rope_theta and rope_scaling, 5 rope_parameters."""

from __future__ import annotations

from ...ops.rotary_cache import RopeParameters
from ..hf_json import HfConfig

def rope_parameters(config: HfConfig, head_dim: int) -> RopeParameters:
    return RopeParameters(head_dim=head_dim, theta=config.number("rope_theta", 10000.0))

def effective_positions(config: HfConfig, rope: RopeParameters) -> int:
    return config.integer("max_position_embeddings")
