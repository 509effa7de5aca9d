"""Lists the fusions: which neighbouring ops are made into one kernel, and what cannot be and why.

Each is a sequence of steps that models have; ``op`` is the semantic op that does all of it, which
some pass of the pipeline puts in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ...ops.norm.gated_act import ACTIVATIONS, GATED_ACTS
from ...ops.norm.norm import NORMS

QUANTS = ("static", "token", "group")
"""The ways to quantize activations to FP8: one scale, a scale a token, a scale a group of 128."""

_KINDS = {"": ((),), "static": (("FP8 static",),), "dynamic": (("FP8 token",), ("FP8 group",))}
_BLOCKS = "the scale follows from values that several blocks of the kernel compute"
_HIDDEN = "the norm that follows adds for nothing, hidden behind the next linear's weights"
_ROWS = "a scale a {} needs the largest value of a row, which several blocks of a linear compute"


@dataclass(frozen=True)
class Fusion:
    """A sequence of ``parts``: ``op`` computes it in one kernel, or ``reason`` says why not."""

    parts: tuple[str, ...]
    op: str = ""
    reason: str = ""

    @property
    def name(self) -> str:
        return " + ".join(self.parts)


def fusions() -> list[Fusion]:
    """Every fusion, whether a model has it or not."""
    return list(_named())


def linear_parts(scaled: bool, activation: bool, quant: bool) -> tuple[str, ...]:
    """The steps of a linear layer with FP8 operands, a gated activation, a quantized result."""
    steps = (("SiLU-mul or GELU-mul", activation), ("FP8 static", quant))
    return "FP8 linear" if scaled else "linear", *(part for part, done in steps if done)


def _named() -> Iterator[Fusion]:
    for axes, op in NORMS.items():
        steps = (("all-reduce", axes.reduce), ("add", axes.add), ("RMSNorm", True))
        parts = tuple(part for part, done in steps if done)
        yield from (Fusion((*parts, *kind), op.name) for kind in _KINDS[axes.quant])
    for (activation, quant), op in GATED_ACTS.items():
        name = f"{ACTIVATIONS[activation].title}-mul"
        yield from (Fusion((name, *kind), op.name) for kind in _KINDS[quant])
    yield Fusion(("attention", "FP8 static"), "paged_attention")
    for kind in QUANTS[1:]:
        yield Fusion(("attention", f"FP8 {kind}"), reason=_BLOCKS)
    yield Fusion(("rope", "KV store"), "rope_kv_store")
    yield Fusion(("QK-norm", "rope", "KV store"), "rope_kv_store")
    for scaled, gated, quantized in product((False, True), repeat=3):
        if gated or quantized:
            yield Fusion(linear_parts(scaled, gated, quantized), "linear")
    yield Fusion(("linear", "add", "RMSNorm", "linear"), "linear_add_norm_linear")
    summed = ("linear", "all-reduce", "add", "RMSNorm", "linear")
    yield Fusion(summed, "linear_all_reduce_add_norm_linear")
    parts = ("FP8 linear", "add", "RMSNorm", "FP8 linear", "SiLU-mul or GELU-mul", "FP8 linear")
    yield Fusion((*parts, "add", "RMSNorm", "FP8 linear"), "linear_add_norm_mlp")
    yield Fusion(("experts' linear", "SiLU-mul or GELU-mul"), "expert_linear")
    yield Fusion(("router", "top-k", "experts", "sum"), "fused_moe")
    parts = ("linear", "add", "RMSNorm", "router", "top-k", "experts", "sum")
    yield Fusion((*parts, "add", "RMSNorm", "linear"), "linear_add_norm_moe")
    yield Fusion(("linear", "add"), reason=_HIDDEN)
    for kind in QUANTS[1:]:
        reason = _ROWS.format("token" if kind == "token" else "group")
        yield Fusion(("linear", f"FP8 {kind}"), reason=reason)
