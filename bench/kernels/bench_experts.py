"""Mixtures of experts, router included, and their layers alone, with balanced and skewed routing,
in FP8 with scales of blocks, and with weights of four bits.

The rival of a layer is torch's grouped GEMM over rows that it has to gather first.  Weights of all
experts are made for a work, so they lie in memory and not in L2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ...config.weight_format import STORED_FORMATS
from ...ops import BY_NAME
from ...ops.core.float8 import E4M3
from ...ops.launches.quant import GROUP
from .harness import TOKENS, KernelWork, benchmark_of, randn


@dataclass(frozen=True)
class Mixture:
    """The experts of one layer of a model, or of a rank's share of it."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int


MIXTURES = (
    Mixture("Qwen3-30B-A3B", 2048, 768, 128, 8),
    Mixture("Mixtral-8x7B", 4096, 14336, 8, 2),
    Mixture("DeepSeek-V3, 1 of 8", 7168, 256, 256, 8),
)
FOUR_BITS = (
    (
        Mixture("gpt-oss-20b", 2880, 2880, 32, 4),
        "mxfp4",
        "silu(alpha=1.702, limit=7.0, up_offset=1.0, interleaved=True)",
    ),
    (MIXTURES[0], "int4_g128", "silu"),
)
KINDS = ((False, False, "balanced"), (True, False, "skewed"), (False, True, "FP8 blocks"))
MANY_TOKENS = (*TOKENS, 8192, 16384)
"""A prefill's numbers of tokens too, which the grouped GEMM is for."""
TRITON = BY_NAME["fused_moe"].implementation("triton").fn
"""Serves where csrc's kernels do not; ``-O2`` prefers these."""
_SKEW = 4.0
"""Bias of the first expert in units of a mean score; the bias of the others falls as 1 / rank."""


def make(
    mixture: Mixture, skewed: bool, fp8: bool, tokens: int, device: torch.device
) -> tuple[Any, ...]:
    """Arguments of ``fused_moe``.  A correction bias draws tokens to few experts."""
    m, bias = mixture, None
    if skewed:
        ranks = torch.arange(1, m.experts + 1, device=device, dtype=torch.float32)
        bias = _SKEW / (m.experts * ranks)
    router = randn(m.experts, m.hidden, device=device) * m.hidden**-0.5
    gate_up = randn(m.experts, 2 * m.intermediate, m.hidden, device=device)
    down = randn(m.experts, m.hidden, m.intermediate, device=device)
    x = randn(tokens, m.hidden, device=device)
    how = (m.top_k, "softmax", True, 1, 1, 1.0, "silu")
    if fp8:
        scales = (block_scales(gate_up), block_scales(down), None, None, GROUP)
        return x, router, bias, gate_up.to(E4M3), down.to(E4M3), *scales, None, None, *how
    layers = (gate_up.mul_(m.hidden**-0.5), down.mul_(m.intermediate**-0.5))
    return x, router, bias, *layers, *[None] * 4, 0, None, None, *how


def make_four_bits(
    mixture: Mixture, form: str, activation: str, tokens: int, device: torch.device
) -> tuple[Any, ...]:
    """Arguments of ``fused_moe`` with random integers, and scales that give sums of about one; with
    biases where gates and ups are pairs, as in gpt-oss."""
    m, stored = mixture, STORED_FORMATS[form]
    router = randn(m.experts, m.hidden, device=device) * m.hidden**-0.5
    x = randn(tokens, m.hidden, device=device)
    weights, scales, biases = [], [], []
    for n, k in ((2 * m.intermediate, m.hidden), (m.hidden, m.intermediate)):
        weights.append(torch.randint(0, 256, (m.experts, n, k // 2), device=device).byte())
        scale = torch.full((m.experts, n, k // stored.scale.unit[1]), 0.2 * k**-0.5, device=device)
        scales.append(scale.to(getattr(torch, stored.scale.dtype)))
        biases.append(randn(m.experts, n, device=device) if "interleaved" in activation else None)
    of_router = None if biases[0] is None else randn(m.experts, device=device) * 1e-3
    how = (m.top_k, "softmax", True, 1, 1, 1.0, activation, None, False)
    held = (of_router, *biases, None, None, form)
    return x, router, None, *weights, *scales, None, None, 0, None, None, *how, *held


def block_scales(weight: Tensor) -> Tensor:
    """Scales of blocks, by which numbers of one give results of one."""
    experts, n, k = weight.shape
    return torch.full((experts, n // GROUP, k // GROUP), k**-0.5, device=weight.device)


def make_layer(mixture: Mixture, tokens: int, device: torch.device) -> tuple[Any, ...]:
    """Arguments of ``expert_linear`` for gate and up, each expert as likely as any."""
    m = mixture
    ids = torch.rand((tokens, m.experts), device=device).argsort(-1)[:, : m.top_k]
    weight = randn(m.experts, 2 * m.intermediate, m.hidden, device=device)
    x = randn(tokens, m.hidden, device=device)
    topk_ids = ids.to(torch.int32).contiguous()
    return x, weight.mul_(m.hidden**-0.5), topk_ids, None, None, None, "silu"


def grouped_mm(x: Tensor, weight: Tensor, topk_ids: Tensor, *_: Any) -> Tensor:
    """Gather by expert, torch's grouped GEMM, the activation: rows stay sorted by expert."""
    of_slot = topk_ids.flatten()
    order = of_slot.argsort()
    ends = torch.bincount(of_slot, minlength=weight.shape[0]).cumsum(0).to(torch.int32)
    rows = x[order // topk_ids.shape[1]]
    gate, up = torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def works() -> Iterator[KernelWork]:
    for mixture in MIXTURES:
        for tokens in MANY_TOKENS:
            for skewed, fp8, kind in KINDS:
                label = f"{mixture.name}, {tokens} tokens, {kind}"
                make_args = partial(make, mixture, skewed, fp8, tokens)
                yield KernelWork("fused_moe", label, make_args, {}, {"triton": TRITON})
            label = f"{mixture.name} gate_up, {tokens} tokens"
            rivals = {"grouped_mm": grouped_mm}
            layer = partial(make_layer, mixture, tokens)
            yield KernelWork("expert_linear", label, layer, {}, rivals)

    for (mixture, form, activation), tokens in product(FOUR_BITS, MANY_TOKENS):
        make_args = partial(make_four_bits, mixture, form, activation, tokens)
        label = f"{mixture.name}, {tokens} tokens, {form}"
        yield KernelWork("fused_moe", label, make_args, {}, {"triton": TRITON})


test_experts = benchmark_of(works())
