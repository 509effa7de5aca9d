"""Measures tiles of the experts' GEMMs: the candidates of a shape and a number of tokens.

The incumbent is the tile of the rule.  Where it wins, it is written down too, so that no
neighbour's serves in its place.  ``ExpertMeasure`` times both layers of the experts behind the
sort, in a CUDA graph, their weights in memory.  ``tune_for`` searches for a program that is
compiled at ``-O3``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ... import ops
from ...config import CompileConfig
from ...config.arch import HOPPER
from ...config.expert_tables import Experts, ExpertTable, ExpertTile
from ...ops import KERNELS, Launch, Variant, variants_of
from ...ops.core.device_table import gpu_of
from ...ops.core.float8 import E4M3
from ...ops.core.tiles import cdiv, next_power_of_2
from ...ops.experts.kernels import MOST_UNSORTED, plan_gemm
from ...ops.launches import experts as plans
from .search import Found, Times, graph_us, search

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_MOST_ACCUMULATORS = 128
"""Sums that a thread holds; more spill."""
_CALLS, _GROUP = 6, 8

Measure: TypeAlias = Callable[[int, Sequence[ExpertTile]], list[float]]
"""(tokens, tiles) -> microseconds of each; infinite for a tile that does not run."""
Tiles: TypeAlias = Mapping[int, ExpertTile]


def table_of(experts: Experts, tiles: Tiles) -> ExpertTable:
    """The tiles that were found, as an entry of a device table."""
    return ExpertTable(*experts.shape, tuple(sorted(tiles.items())))


def rule_tile(experts: Experts, tokens: int) -> ExpertTile:
    """The tile of the rule for a layer's experts."""
    counted = 1 if tokens <= MOST_UNSORTED else tokens
    of_layer = (experts.experts, experts.top_k, experts.intermediate, experts.itemsize)
    return plans.rule_tile(counted, plans.Shape(*of_layer))


def candidates(experts: Experts, tokens: int) -> Iterator[ExpertTile]:
    """The tiles worth measuring: rows for about what an expert gets, and what fits a block."""
    of_expert = next_power_of_2(cdiv(tokens * experts.top_k, experts.experts))
    rows = [r for r in (16, 32, 64, 128) if r <= max(16, 2 * of_expert) and 4 * r >= of_expert]
    rows = rows or [128]
    rows = rows if tokens > MOST_UNSORTED else [16]
    depths = (128,) if experts.kind == "fp8 block" else (64, 128, 256)
    columns = (64, 128) if experts.kind == "fp8 block" else (64, 128, 256)
    for r, n, k, w, s in product(rows, columns, depths, (4, 8), (2, 3, 4, 5)):
        tile = ExpertTile(r, n, k, _GROUP, w, s)
        if tile.shared_bytes(experts.itemsize) > HOPPER.shared_bytes:
            continue
        if r * n // (32 * w) > _MOST_ACCUMULATORS or k > experts.hidden:
            continue
        if n > 2 * next_power_of_2(experts.intermediate) or (w == 8 and r * n < 8192):
            continue
        yield tile


def tune(
    experts: Experts, measures: Sequence[Measure], *, tokens: Sequence[int] = TOKENS, **how: Any
) -> Found[int, ExpertTile]:
    """Time the tiles of each number of tokens on a GPU a measure; ``how``: as of ``search``."""

    def at(measure: Measure, count: int) -> Times[ExpertTile]:
        rule = rule_tile(experts, count)
        tiles = [rule, *(tile for tile in candidates(experts, count) if tile != rule)]
        return dict(zip(tiles, measure(count, tiles), strict=True))

    return search(tokens, [partial(at, measure) for measure in measures], **how)


def tune_for(
    experts: Experts,
    config: CompileConfig,
    measure: Callable[[Experts], Any],
    *,
    on_point: Callable[[int, int], None],
) -> tuple[ExpertTable | None, Found[int, ExpertTile]]:
    """Measure the tiles of a program's experts, in half of the time for tuning.  Experts that have
    tiles already keep them.  ``measure`` makes a ``Measure``, which holds memory until ``free``.

    Returns:
        The tiles that belong into the program's artifact, also those that another stage of a
        pipeline measured, but not a configuration's, which are in its key; what was measured.
    """
    there = ops.expert_table(experts.shape)
    if there is not None:
        of_config = any(there in table.experts for table in config.tables)
        return None if of_config else there, Found(known=len(TOKENS))
    # Up to eight tokens csrc's kernels serve most models, so these come last.
    tokens = sorted(TOKENS, key=lambda count: (count <= MOST_UNSORTED, count))
    own = measure(experts)
    try:
        outcome = tune(
            experts, [own], tokens=tokens, seconds=config.tune_seconds / 2, on_point=on_point
        )
    finally:
        own.free()
    return table_of(experts, outcome.winners()) if outcome.times else None, outcome


class ExpertMeasure:
    """Times tiles on a GPU, every expert as likely as any.

    Args:
        device: the GPU; None: that in use.
    """

    @torch.inference_mode()
    def __init__(self, experts: Experts, device: torch.device | None = None) -> None:
        self._experts = experts
        self._device = device or torch.device("cuda", torch.cuda.current_device())
        self._sm = gpu_of(self._device)[1]
        e = experts
        self._layers = [
            self._weight(2 * e.intermediate, e.hidden),
            self._weight(e.hidden, e.intermediate),
        ]

    @torch.inference_mode()
    def __call__(self, tokens: int, tiles: Sequence[ExpertTile]) -> list[float]:
        with torch.cuda.device(self._device):  # a thread begins on GPU 0
            return self._measured(tokens, tiles)

    def free(self) -> None:
        """Give the memory of the weights back."""
        self._layers.clear()
        torch.cuda.empty_cache()

    def _measured(self, tokens: int, tiles: Sequence[ExpertTile]) -> list[float]:
        e = self._experts
        drawn = torch.rand((tokens, e.experts), device=self._device)
        ids = drawn.argsort(-1)[:, : e.top_k].to(torch.int32).contiguous()
        inputs = [self._input(tokens, e.hidden), self._input(tokens * e.top_k, e.intermediate)]
        variants = [variants_of(self._launches(ids, inputs, tile)) for tile in tiles]
        compiled = self._compile(variants)
        return [
            self._time(self._launches(ids, inputs, tile)) if fits else torch.inf
            for tile, fits in zip(tiles, compiled, strict=True)
        ]

    def _compile(self, variants: Sequence[set[Variant]]) -> list[bool]:
        """Which of the sets of variants compile; all at once if they all do."""

        def compiles(these: set[Variant]) -> bool:
            try:
                KERNELS.precompile(these, self._sm)
            except Exception:  # the compiler's errors have no common class
                return False
            return True

        all_compile = compiles(set().union(*variants))
        return [all_compile or compiles(these) for these in variants]

    def _time(self, launches: list[Launch]) -> float:
        def run() -> None:
            for launch in launches:
                launch.run()

        return graph_us([run], calls=_CALLS)

    def _launches(
        self, ids: Tensor, inputs: list[tuple[Tensor, Tensor | None]], tile: ExpertTile
    ) -> list[Launch]:
        launches: list[Launch] = []
        by_expert = None
        if ids.shape[0] > MOST_UNSORTED:
            launches, by_expert = plans.sort_by_expert(ids, self._experts.experts)
        for (x, x_scale), (weight, scale), activation in zip(
            inputs, self._layers, ("silu", None), strict=True
        ):
            operands = (x, weight, ids, x_scale, scale, torch.bfloat16, activation)
            planned, _ = plan_gemm(by_expert, *operands, forced=tile)
            launches += planned
        return launches

    def _weight(self, n: int, k: int) -> tuple[Tensor, Tensor | None]:
        shape, kind = (self._experts.experts, n, k), self._experts.kind
        weight = torch.randn(shape, device=self._device, dtype=torch.bfloat16)
        if kind == "bfloat16":
            return weight, None
        scales: tuple[int, ...] = (shape[0], n, 1)
        if kind == "fp8 block":
            scales = (shape[0], cdiv(n, 128), cdiv(k, 128))
        return weight.to(E4M3), torch.ones(scales, device=self._device)

    def _input(self, rows: int, columns: int) -> tuple[Tensor, Any]:
        x = torch.randn((rows, columns), device=self._device, dtype=torch.bfloat16)
        if self._experts.kind == "bfloat16":
            return x, None
        groups = cdiv(columns, 128) if self._experts.kind == "fp8 block" else 1
        return x.to(E4M3), torch.ones((groups, rows), device=self._device).t()
