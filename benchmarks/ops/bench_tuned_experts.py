"""Times of the experts' GEMMs by tuned tiles and by the rule, for the shipped shapes of models.

``python -m fusewright.benchmarks.ops.bench_tuned_experts [--shapes MODEL:TP ...] [--output FILE]``.
Each shape is tuned as ``fusewright tune moe`` does it: the first at every number of tokens, and how
long that took is in the file; the others at few.  The tiles that were chosen are then timed again
beside the rule's, in turn and with another routing, so that no figure is the best of many.  These
are Triton's kernels, which csrc's replace for few tokens, and for bfloat16 where experts have many
rows; ``grouped_us`` is the time of csrc's for these, behind the same sort.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from ...bench.environment import environment
from ...compiler.lowering.search import graph_us
from ...compiler.lowering.tune_experts import (
    TOKENS,
    ExpertMeasure,
    Measure,
    Tiles,
    rule_tile,
    tune,
)
from ...config.expert_tables import Experts
from ...ops import load_cuda_library
from ...ops.experts.kernels import MOST_UNSORTED
from ...ops.launches.experts import sort_by_expert
from .bench_grouped import Shape, make_layer, make_weights

MODELS = {
    "qwen3-30b-a3b": (128, 768, 2048, 8, "bfloat16"),
    "mixtral-8x7b": (8, 14336, 4096, 2, "bfloat16"),
    "qwen3-235b-a22b": (128, 1536, 4096, 8, "bfloat16"),
    "deepseek-v3": (256, 2048, 7168, 8, "fp8 block"),
}
"""Experts, their intermediate size, hidden size, choices of a token, and the weights' dtype."""
SHAPES = tuple(f"{model}:{tp}" for model in MODELS for tp in (1, 2, 4, 8))
FEW_TOKENS = {"bfloat16": (16, 64, 256, 384), "fp8 block": (16, 64, 256, 1024, 4096)}
"""Token counts to measure, by dtype.  Triton's kernels serve them, csrc's for some models."""
_REPEATS = 5


def experts_of(shape: str) -> Experts:
    """A rank's share of a model's experts."""
    model, _, tp = shape.partition(":")
    experts, intermediate, hidden, top_k, dtype = MODELS[model]
    return Experts(experts, intermediate // int(tp), hidden, top_k, dtype)


class GroupedMeasure:
    """Times csrc's grouped GEMMs of both layers with the sort ahead of them."""

    def __init__(self, experts: Experts) -> None:
        self._shape = Shape(experts.hidden, experts.intermediate, experts.experts, experts.top_k)
        self._weights = make_weights(self._shape)
        self._multiply = torch.ops.fw_cuda.moe_grouped_linear.default

    def __call__(self, tokens: int) -> float:
        layer = make_layer(self._shape, self._weights, tokens, "uniform")
        top_k = self._shape.top_k

        def run() -> None:
            launches, by_expert = sort_by_expert(layer.ids, self._shape.experts)
            for launch in launches:
                launch.run()
            h = self._multiply(layer.x, layer.gate_up, *by_expert, top_k, "silu", False, True)
            self._multiply(h, layer.down, *by_expert, 1, "", True, False)

        return statistics.median(graph_us([run]) for _ in range(_REPEATS))


def compare(experts: Experts, tiles: Tiles, measure: Measure) -> list[dict[str, Any]]:
    """One row a number of tokens: medians of both tiles in turn, and the tuned one."""
    grouped = None
    if experts.kind == "bfloat16" and load_cuda_library():
        grouped = GroupedMeasure(experts)
    rows = []
    for tokens, tile in tiles.items():
        rule = rule_tile(experts, tokens)
        times = measure(tokens, [rule, tile] * _REPEATS)
        by_rule, by_tile = statistics.median(times[::2]), statistics.median(times[1::2])
        row: dict[str, Any] = {"tokens": tokens, "rule_us": round(by_rule, 2)}
        row |= {"tuned_us": round(by_tile, 2), "gain": round(by_rule / by_tile, 3)}
        if grouped is not None and tokens > MOST_UNSORTED:
            row["grouped_us"] = round(grouped(tokens), 2)
        rows.append(row | {"is_rule": tile == rule, "tile": tile.to_json()})
    return rows


def tune_shape(shape: str, measure: Measure, tokens: tuple[int, ...], end: float) -> dict[str, Any]:
    """The row of a shape, tuned until the time ``end`` at the latest."""
    experts = experts_of(shape)
    start = time.monotonic()
    tuned = tune(experts, [measure], tokens=tokens, seconds=end - start)
    seconds = time.monotonic() - start
    rows = compare(experts, tuned.winners(), measure)
    print(f"{shape}: tuned in {seconds:.0f} s, no time for {tuned.skipped} tokens")
    for row in rows:
        us = f"{row['rule_us']:9.1f} -> {row['tuned_us']:9.1f} us, {row['gain']:.2f}x"
        us += f", grouped {row['grouped_us']:9.1f}" if "grouped_us" in row else ""
        print(f"  {row['tokens']:5} tokens: {us}", flush=True)
    found: dict[str, Any] = {"shape": shape, "experts": experts.experts}
    found |= {"intermediate": experts.intermediate, "tune_s": round(seconds, 1)}
    found |= {"rows": rows, "skipped": tuned.skipped}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--seconds", type=float, default=200.0, help="begin nothing after these")
    parser.add_argument("--output", type=Path, help="JSON, written after each shape")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    done: list[dict[str, Any]] = []
    for shape in options.shapes:
        with torch.inference_mode():
            measure = ExpertMeasure(experts_of(shape))
            few = FEW_TOKENS[MODELS[shape.partition(":")[0]][4]]
            found = tune_shape(shape, measure, TOKENS if not done else few, end)
        del measure
        done.append(found)
        if options.output:
            text = json.dumps({"environment": environment(), "shapes": done}, indent=1)
            options.output.write_text(text + "\n")
        if time.monotonic() >= end:
            print(f"no time left behind {shape}")
            break


if __name__ == "__main__":
    main()
