"""Rope settings of a config: ``rope_parameters`` of transformers 5, ``rope_theta`` and
``rope_scaling`` of transformers 4."""

from __future__ import annotations

from typing import cast

from ...config.errors import UserError
from ...config.rope import ROPE_KINDS, RopeKind, RopeParameters
from ..hf_json import HfConfig

_MOST_POSITIONS = 2**24
"""Their cosines and sines are in memory; no model has more than ten million."""


def rope_parameters(config: HfConfig, head_dim: int) -> RopeParameters:
    """Read and check the rotary embedding of a config.

    Raises:
        UserError: the kind is not supported, or a setting is missing or out of range.
    """
    rope = (
        config.section("rope_scaling")
        or config.section("rope_parameters")
        or HfConfig(config.path, {}, "rope_parameters.")
    )
    field = "rope_type" if rope.has("rope_type") else "type"
    kind = rope.text(field, "default")
    if kind not in ROPE_KINDS:
        raise rope.error(field, kind, f"one of {', '.join(ROPE_KINDS)}")
    positions = config.integer("max_position_embeddings", most=_MOST_POSITIONS)
    original = None
    if kind in ("llama3", "yarn"):
        original = rope.integer("original_max_position_embeddings", positions, most=_MOST_POSITIONS)

    def optional(name: str) -> float | None:
        return rope.number(name) if rope.has(name) else None

    try:
        parameters = RopeParameters(
            theta=rope.number("rope_theta", config.number("rope_theta", 10000.0)),
            kind=cast(RopeKind, kind),
            factor=1.0 if kind == "default" else rope.number("factor"),
            original_max_position=original,
            low_freq_factor=rope.number("low_freq_factor") if kind == "llama3" else 1.0,
            high_freq_factor=rope.number("high_freq_factor") if kind == "llama3" else 4.0,
            beta_fast=rope.number("beta_fast", 32.0, least=1e-6),
            beta_slow=rope.number("beta_slow", 1.0, least=1e-6),
            attention_factor=optional("attention_factor"),
            mscale=optional("mscale"),
            mscale_all_dim=optional("mscale_all_dim"),
            truncate=rope.flag("truncate", True),
            partial_rotary_factor=rope.number(
                "partial_rotary_factor", config.number("partial_rotary_factor", 1.0)
            ),
        )
        parameters.rotary_dim(head_dim)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{config.path}: {error}; use the model's own config.json") from error
    return parameters


def effective_positions(config: HfConfig, rope: RopeParameters) -> int:
    """How many positions the model serves.  Yarn configs often state the length before stretching
    as ``max_position_embeddings``; other kinds state the final one."""
    positions = config.integer("max_position_embeddings", most=_MOST_POSITIONS)
    if rope.kind == "yarn" and rope.original_max_position is not None:
        positions = max(positions, int(rope.original_max_position * rope.factor))
        if positions > _MOST_POSITIONS:
            raise config.error(
                "rope factor", rope.factor, f"one that reaches {_MOST_POSITIONS} positions at most"
            )
    return positions
