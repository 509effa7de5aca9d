"""The decode layers of Llama-3-8B or Llama-3.2-1B in one graph, through the public ops: us a layer,
with and without programmatic launches of the Triton kernels, and whether these change a bit.

``python -m fusewright.bench.ops.bench_layer [--model llama3.2-1b] [--seqs 1 8]
[--forms skinny fused] [--output FILE]``.  Every layer has its own weights and cache, of 8B 14 GB
and, for 32 sequences of 256 tokens, 1 GB: nothing comes from L2.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...compiler.lowering.tune import graph_us
from ...ops import BY_NAME, load_cuda_library
from ..environment import environment
from ..kernels.figures import COPY_TB_S
from .bench_linear import LAYERS, SHAPES

CONTEXT, BLOCK, HEADS, KV_HEADS = 256, 16, 32, 8
SEQS = (1, 8, 16, 32, 64)
FORMS = ("native", "skinny", "gated", "fused")
"""Linear layers by cuBLAS; by the streaming kernels for few rows; with the gated activation; and
linear_add_norm_linear."""
ROUNDS, CHECKS = 15, 200

Layers = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Shape:
    layers: int
    dim: int
    linears: dict[str, tuple[int, int]]

    @property
    def hidden(self) -> int:
        return HEADS * self.dim


MODELS = {
    "llama3-8b": Shape(LAYERS, 128, SHAPES),
    "llama3.2-1b": Shape(
        16,
        64,
        {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)},
    ),
}


def draw(*shape: int) -> Tensor:
    bound = (3 / shape[-1]) ** 0.5
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").uniform_(-bound, bound)


@dataclass(frozen=True)
class Weights:
    linears: dict[str, list[Tensor]]
    norms: list[Tensor]
    table: Tensor

    @classmethod
    def make(cls, model: Shape) -> Weights:
        drawn = {n: [draw(*size) for _ in range(model.layers)] for n, size in model.linears.items()}
        norms = [draw(model.hidden) * model.hidden**0.5 for _ in range(2 * model.layers)]
        return cls(drawn, norms, torch.rand(CONTEXT, model.dim, device="cuda"))


@dataclass(frozen=True)
class Step:
    """What a decode step of sequences of CONTEXT tokens reads besides weights."""

    x: Tensor
    residual: Tensor
    caches: list[Tensor]
    positions: Tensor
    slots: Tensor
    blocks: Tensor
    lengths: Tensor
    starts: Tensor

    @classmethod
    def make(cls, model: Shape, seqs: int) -> Step:
        def filled(value: int) -> Tensor:
            return torch.full((seqs,), value, dtype=torch.int32, device="cuda")

        count = seqs * CONTEXT // BLOCK
        blocks = torch.randperm(count, device="cuda").int().view(seqs, -1)
        shape = (count, 2, BLOCK, KV_HEADS, model.dim)
        caches = [draw(*shape) for _ in range(model.layers)]
        return cls(
            draw(seqs, model.hidden),
            draw(seqs, model.hidden),
            caches,
            filled(CONTEXT - 1),
            blocks[:, -1] * BLOCK + BLOCK - 1,
            blocks,
            filled(CONTEXT),
            torch.arange(seqs + 1, dtype=torch.int32, device="cuda"),
        )


def triton_op(name: str, programmatic: bool) -> Callable[..., Any]:
    describe = BY_NAME[name].implementation("triton").launches
    assert describe is not None

    def run(*args: Any) -> Any:
        launches, result = describe(*args)
        for launch in launches:
            replace(launch, programmatic=programmatic).run()
        return result

    return run


def boundary_of(form: str, norm: Any, linear: Any, silu: Any) -> Callable[..., Any]:
    """From one linear into the residual stream to the next out of it: ``linear_add_norm_linear``
    in one op, or in as many as ``form`` has."""
    if form == "fused":
        return BY_NAME["linear_add_norm_linear"].overload("skinny")  # type: ignore[no-any-return]
    gated = BY_NAME["linear"].overload("skinny")

    def run(
        x: Tensor, weight: Tensor, _: Any, residual: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        norm_weight, eps, next_weight, _, activation = rest
        x, residual = norm(linear(x, weight, None), residual, norm_weight, eps)
        if activation and form == "gated":
            return gated(x, next_weight, None, None, None, None, activation), residual
        y = linear(x, next_weight, None)
        return (silu(y) if activation else y), residual

    return run


def layers_of(weights: Weights, step: Step, form: str, programmatic: bool) -> Layers:
    """All layers, one after the other; the results with two of the caches that they write."""
    names = ("add_rms_norm", "rope_kv_store", "silu_mul")
    norm, rope, silu = (triton_op(name, programmatic) for name in names)
    attention = BY_NAME["paged_attention"].overload("cuda")
    linear = BY_NAME["linear"].overload("native" if form == "native" else "skinny")
    boundary = boundary_of(form, norm, linear, silu)
    w, dim = weights.linears, weights.table.shape[1]
    hidden, last = HEADS * dim, len(step.caches) - 1

    def run() -> tuple[Tensor, ...]:
        x, residual = norm(step.x, step.residual, weights.norms[0], 1e-5)
        x = linear(x, w["qkv"][0], None)
        for i, cache in enumerate(step.caches):
            q, k, v = x.view(-1, HEADS + 2 * KV_HEADS, dim).split([HEADS, KV_HEADS, KV_HEADS], 1)
            stored = (weights.table, cache, step.slots, None, None, 0.0)
            q = rope(step.positions, q, k, v, *stored)
            out = torch.empty_like(q)
            sequences = (step.blocks, step.lengths, step.starts)
            attention(q, cache, *sequences, out, dim**-0.5, 0, 0.0)
            then: tuple[Any, ...] = (weights.norms[2 * i + 1], 1e-5, w["gate_up"][i], None, "silu")
            x, residual = boundary(out.view(-1, hidden), w["o"][i], None, residual, *then)
            if i == last:
                return linear(x, w["down"][i], None), residual, step.caches[0], cache
            then = (weights.norms[2 * i + 2], 1e-5, w["qkv"][i + 1], None, None)
            x, residual = boundary(x, w["down"][i], None, residual, *then)
        raise AssertionError("no layers")

    return run


def differing(plain: Layers, early: Layers, step: Step) -> int:
    """How many of CHECKS replays on changing inputs end with other bits than plain launches."""
    inputs = [draw(*step.x.shape) for _ in range(3)]
    wanted = []
    for x in inputs:
        step.x.copy_(x)
        wanted.append([t.clone() for t in plain()])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = early()
    wrong = 0
    for i in range(CHECKS):
        step.x.copy_(inputs[i % 3])
        graph.replay()
        wrong += not all(map(torch.equal, got, wanted[i % 3]))
    return wrong


def measure(model: Shape, weights: Weights, seqs: int, form: str) -> dict[str, Any]:
    step = Step.make(model, seqs)
    plain, early = (layers_of(weights, step, form, flag) for flag in (False, True))
    times = [graph_us([run], calls=1, rounds=ROUNDS) / model.layers for run in (plain, early)]
    nbytes = sum(group[0].nbytes for group in weights.linears.values()) + step.caches[0].nbytes
    return {
        "seqs": seqs,
        "form": form,
        "us_plain": round(times[0], 2),
        "us_programmatic": round(times[1], 2),
        "us_weights_and_kv_at_copy": round(nbytes / COPY_TB_S / 1e6, 2),
        "differing": differing(plain, early, step),
        "checks": CHECKS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--output", type=Path, help="write the figures there")
    parser.add_argument("--model", default="llama3-8b", choices=MODELS)
    parser.add_argument("--seqs", type=int, nargs="+", default=SEQS)
    parser.add_argument("--forms", nargs="+", default=FORMS, choices=FORMS)
    options = parser.parse_args()
    torch.manual_seed(0)
    if not load_cuda_library():
        raise SystemExit("bench_layer: csrc is not built into this installation")
    figures: list[dict[str, Any]] = []
    with torch.inference_mode():
        model = MODELS[options.model]
        weights = Weights.make(model)
        for seqs in options.seqs:
            for form in options.forms:
                figures.append(measure(model, weights, seqs, form))
                print(*figures[-1].values(), flush=True)
                torch.cuda.empty_cache()
    if options.output:
        about = {"model": options.model, "rounds": ROUNDS, "context": CONTEXT}
        report = {**environment(), **about, "figures": figures}
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
