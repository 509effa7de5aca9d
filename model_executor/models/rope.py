"""Rope settings of a config: ``rope_parameters`` of transformers 5, ``rope_theta`` and
``rope_scaling`` of transformers 4.

The engine has one table of cosines and sines for all requests, and keeps rotated keys.  So a kind
whose frequencies change with a sequence's length is served up to the length where they change.
"""

from __future__ import annotations

from typing import cast

from ...config.errors import UserError
from ...config.rope import ROPE_KINDS, STRETCHED_KINDS, RopeKind, RopeParameters
from ..hf_json import HfConfig

_MOST_POSITIONS = 2**24
"""Their cosines and sines are in memory; no model has more than ten million."""
_ORIGINAL = "original_max_position_embeddings"


def rope_parameters(config: HfConfig, head_dim: int) -> RopeParameters:
    """Read and check the rotary embedding of a config.

    Raises:
        UserError: the kind is not supported, or a setting is missing or out of range.
    """
    rope = _section(config)
    field = "rope_type" if rope.has("rope_type") else "type"
    kind = rope.text(field, "default")
    if kind not in ROPE_KINDS:
        raise rope.error(field, kind, f"one of {', '.join(ROPE_KINDS)}")
    original = _original_positions(config, rope) if kind in STRETCHED_KINDS else None

    def optional(name: str) -> float | None:
        return rope.number(name) if rope.has(name) else None

    try:
        parameters = RopeParameters(
            theta=rope.number("rope_theta", config.number("rope_theta")),
            kind=cast(RopeKind, kind),
            factor=_factor(config, rope, kind, original),
            original_max_position=original,
            low_freq_factor=rope.number("low_freq_factor") if kind == "llama3" else 1.0,
            high_freq_factor=rope.number("high_freq_factor") if kind == "llama3" else 4.0,
            beta_fast=rope.number("beta_fast", 32.0, least=1e-6),
            beta_slow=rope.number("beta_slow", 1.0, least=1e-6),
            short_factor=_short_factor(rope, head_dim) if kind == "longrope" else (),
            attention_factor=optional("attention_factor"),
            mscale=optional("mscale"),
            mscale_all_dim=optional("mscale_all_dim"),
            truncate=rope.flag("truncate", True),
            partial_rotary_factor=_partial_rotary_factor(config, rope, kind),
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
    positions = _positions(config)
    if rope.kind == "longrope" and rope.original_max_position is not None:
        return min(positions, rope.original_max_position)
    if rope.kind == "yarn" and rope.original_max_position is not None:
        positions = max(positions, int(rope.original_max_position * rope.factor))
        if positions > _MOST_POSITIONS:
            raise config.error(
                "rope factor", rope.factor, f"one that reaches {_MOST_POSITIONS} positions at most"
            )
    return positions


def why_no_longer(rope: RopeParameters) -> str:
    """Why a model of this rope serves no more than ``effective_positions``; "": it could not."""
    reasons = {
        "dynamic": "beyond max_position_embeddings, rope type 'dynamic' has other frequencies for "
        "every length of a sequence",
        "longrope": f"beyond {_ORIGINAL}, rope type 'longrope' has other frequencies (long_factor)",
    }
    reason = reasons.get(rope.kind, "")
    return reason and f"{reason}, and cached keys have been rotated by those of the shorter one"


def rope_notes(config: HfConfig, rope: RopeParameters) -> tuple[str, ...]:
    """Warnings for the settings of the config's rope that are not used."""
    notes = []
    factor = _section(config).number(
        "partial_rotary_factor", config.number("partial_rotary_factor", 1.0)
    )
    if factor != rope.partial_rotary_factor:
        notes.append(
            f"partial_rotary_factor is {factor:g}, but heads rotate whole: the family's class in "
            "transformers does not read it under rope type 'default'"
        )
    served, stated = effective_positions(config, rope), _positions(config)
    if served < stated:
        notes.append(f"{served} of {stated} positions are served: {why_no_longer(rope)}")
    return tuple(notes)


def _section(config: HfConfig) -> HfConfig:
    rope = (
        config.section("rope_scaling")
        or config.section("rope_parameters")
        or HfConfig(config.path, {}, "rope_parameters.")
    )
    for name, value in rope.values.items():
        if isinstance(value, dict):
            raise rope.error(name, value, "one rope for all layers; one a layer type is not served")
    return rope


def _positions(config: HfConfig) -> int:
    return config.integer("max_position_embeddings", most=_MOST_POSITIONS)


def _original_positions(config: HfConfig, rope: HfConfig) -> int:
    """The context length before stretching.  The config's own field goes before the section's."""
    section = config if config.has(_ORIGINAL) else rope
    return section.integer(_ORIGINAL, _positions(config), most=_MOST_POSITIONS)


def _factor(config: HfConfig, rope: HfConfig, kind: str, original: int | None) -> float:
    if kind in ("default", "proportional"):
        return rope.number("factor", 1.0) if kind == "proportional" else 1.0
    stated = rope.has("factor") or (kind == "yarn" and "factor" not in rope.values)
    if stated or kind not in ("yarn", "longrope"):
        return rope.number("factor")
    assert original is not None
    return max(1.0, _positions(config) / original)


def _short_factor(rope: HfConfig, head_dim: int) -> tuple[float, ...]:
    """Longrope's factors of the original context, one for each frequency."""
    factors = rope.values.get("short_factor")
    expected = f"a list of {head_dim // 2} numbers above 0"
    if not isinstance(factors, list) or len(factors) != head_dim // 2:
        raise rope.error("short_factor", factors, expected)
    if not all(type(f) in (int, float) and 0 < f < float("inf") for f in factors):
        raise rope.error("short_factor", factors, expected)
    return tuple(map(float, factors))


def _partial_rotary_factor(config: HfConfig, rope: HfConfig, kind: str) -> float:
    """The families' classes in transformers 5.23 rotate whole heads.  Under ``default`` they do not
    read the factor, and under the other kinds they fail with any but 1; proportional has it."""
    factor = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if kind == "proportional":
        return factor
    if factor != 1 and kind != "default":
        raise rope.error(
            "partial_rotary_factor", factor, f"1 under rope type {kind!r}: heads rotate whole"
        )
    return 1.0
