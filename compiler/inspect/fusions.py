"""Lists the fusions: which neighbouring ops are made into one kernel, and what cannot be and why.

Each is a sequence of steps that models have; ``op`` is the semantic op that does all of it, which
some pass of the pipeline puts in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TypeAlias

from ...ops.chain.chain import CUDA, OVER_RANKS
from ...ops.chain.row_stages import Add, AddNorm, Norm, Scale
from ...ops.chain.stages import Act, Experts, Linear, Stage, parse
from ...ops.norm.gated_act import ACTIVATIONS, GATED_ACTS
from ...ops.norm.norm import NORMS

QUANTS = ("static", "token", "group")
"""The ways to quantize activations to FP8: one scale, a scale a token, a scale a group of 128."""

Pattern: TypeAlias = tuple[type[Stage], ...]
_KINDS = {
    "": ((),),
    "static": (("FP8 static",),),
    "dynamic": (("FP8 token",), ("FP8 group",)),
    "int8_static": (("int8 static",),),
    "int8_dynamic": (("int8 token",),),
}
_BLOCKS = "the scale follows from values that several blocks of the kernel compute"
_HIDDEN = "the norm that follows adds at no cost, while the next weights are read"
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


_PARTS: dict[type[Stage], tuple[str, ...]] = {
    Linear: ("linear",),
    AddNorm: ("add", "RMSNorm"),
    Act: ("SiLU-mul or GELU-mul",),
    Norm: ("RMSNorm",),
    Scale: ("product",),
    Add: ("add",),
    Experts: ("router", "top-k", "experts", "sum"),
}


@cache
def chain_fusions() -> tuple[tuple[tuple[str, ...], str, Pattern], ...]:
    """For each pattern of the table of chain kernels: its parts, the op, and the pattern."""
    fusions_of = {}
    for op, kernels in (("chain", CUDA.kernels), ("chain_over_ranks", OVER_RANKS)):
        for pattern in (p for kernel in kernels for p in kernel.patterns if len(p) > 1):
            parts = tuple(part for stage in pattern for part in _PARTS[stage])
            if op == "chain_over_ranks" and Scale in pattern:
                continue  # the sum would come behind the product
            if op == "chain_over_ranks":
                at = parts.index("add")
                parts = (*parts[:at], "all-reduce", *parts[at:])
            fusions_of[parts, op] = (parts, op, pattern)
    return tuple(fusions_of.values())


def has_pattern(text: str, pattern: Pattern) -> bool:
    """Whether a chain has stages of these kinds one behind the other."""
    stages, length = parse(text).stages, len(pattern)
    heads = (stages[at : at + length] for at in range(len(stages) - length + 1))
    return any(all(map(isinstance, head, pattern)) for head in heads)


def _named() -> Iterator[Fusion]:
    for axes, op in NORMS.items():
        steps = (("all-reduce", axes.reduce), ("add", axes.add))
        parts = tuple(part for part, done in steps if done)
        parts += ("layer norm" if axes.center else "RMSNorm",)
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
    yield Fusion(("experts' linear", "SiLU-mul or GELU-mul"), "expert_linear")
    yield Fusion(("router", "top-k", "experts", "sum"), "fused_moe")
    yield from (Fusion(parts, op) for parts, op, _ in chain_fusions())
    yield Fusion(("linear", "add"), reason=_HIDDEN)
    for kind in QUANTS[1:]:
        reason = _ROWS.format("token" if kind == "token" else "group")
        yield Fusion(("linear", f"FP8 {kind}"), reason=reason)
