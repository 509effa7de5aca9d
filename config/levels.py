"""The ``-O0..-O3`` table, as data: what each level turns on.  An explicit option wins over it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class CudagraphMode(StrEnum):
    """Which steps replay a captured CUDA graph."""

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"

    @property
    def full_decode(self) -> bool:
        """Uniform decode steps replay one graph of the whole step."""
        return self in (self.FULL, self.FULL_DECODE_ONLY, self.FULL_AND_PIECEWISE)

    @property
    def piecewise(self) -> bool:
        """Other steps replay one graph per piece, attention running between them."""
        return self in (self.PIECEWISE, self.FULL_AND_PIECEWISE)

    @property
    def without_full(self) -> CudagraphMode:
        """The mode for programs with a step that no graph can hold."""
        return CudagraphMode.NONE if self is self.FULL_DECODE_ONLY else CudagraphMode.PIECEWISE


PASSES: tuple[str, ...] = (
    "cleanup",
    "fuse_add_norm",
    "fuse_act",
    "fuse_gated_linear",
    "fuse_moe",
    "fuse_norm_quant",
    "fuse_all_reduce_norm",
    "fuse_act_quant",
    "fuse_chain",
    "fuse_attn_quant",
    "fuse_rope_store",
)
"""Every pass, in the order in which they run."""

BATCH_INVARIANT: dict[str, dict[str, str]] = {
    "cuda": dict.fromkeys(("linear", "expert_linear", "paged_attention"), "invariant"),
    "cpu": dict.fromkeys(
        ("linear", "expert_linear", "paged_attention", "token_logprobs"), "rowwise"
    ),
}
"""Implementations by device and op that ``batch_invariant`` forces: those of which a row's bits do
not depend on the other rows.  What ``-O2`` chooses of the other ops has that property anyhow, but
for those of ``LINEAR_FUSIONS``."""

LINEAR_FUSIONS = (
    "fuse_gated_linear",
    "fuse_moe",
    "fuse_chain",
)
"""Passes that attach more to a linear layer, whose kernels then follow the number of rows:
``batch_invariant`` leaves them out."""

BATCH_INVARIANT_LEVEL = 2


@dataclass(frozen=True)
class Level:
    """One row of the table."""

    summary: str
    trace: bool
    passes: tuple[str, ...]
    hand_kernels: bool
    tune: bool
    cudagraph_mode: CudagraphMode


_O2 = Level(
    summary="all proven fusion passes; hand kernels where they win",
    trace=True,
    passes=PASSES,
    hand_kernels=True,
    tune=False,
    cudagraph_mode=CudagraphMode.FULL_AND_PIECEWISE,
)
LEVELS: dict[int, Level] = {
    0: Level(
        summary="eager semantic ops, no trace, no graphs: for debugging",
        trace=False,
        passes=(),
        hand_kernels=False,
        tune=False,
        cudagraph_mode=CudagraphMode.NONE,
    ),
    1: Level(
        summary="trace, cleanup; ops lowered to native, Inductor fuses",
        trace=True,
        passes=("cleanup",),
        hand_kernels=False,
        tune=False,
        cudagraph_mode=CudagraphMode.PIECEWISE,
    ),
    2: _O2,
    3: replace(
        _O2,
        summary="-O2, with kernels chosen and tuned by measurement at compile time",
        tune=True,
    ),
}
