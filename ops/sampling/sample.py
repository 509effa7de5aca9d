"""``sample`` draws a token a row after temperature, min-p, top-k and top-p; it keeps no state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..core.desc import Case, Cost, Draw, OpDesc, drawn
from ..core.op import Implementation, SemanticOp, dispatched, triton
from ..launches import sampling
from .noise import FLOAT32_MAX, GREEDY_TEMPERATURE, clean_logits, gumbel_noise, largest_of_rows
from .sample_cuda import BY_CUDA


@dispatched
def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Draw one token a row by Gumbel-max (Gumbel, 1954): argmax of logits / temperature + noise.

    The noise is a pure function of (seed, position, vocabulary index), so a draw does not depend
    on the batch, its order, preemption or the device, beyond float rounding at near-ties.  Each
    filter is a threshold on the logit, applied in the order min-p, top-k, top-p:
    min-p keeps tokens at least ``min_p`` as probable as the best; top-k keeps logits not below the
    k-th largest (so all that tie with it); top-p keeps logits not below the largest t for which
    tokens with a logit of t or more hold at least ``top_p`` of the mass left by the other two.
    The best token always stays.

    Args:
        logits: [num_seqs, vocab], floating point, last dimension contiguous.
        temperature: [num_seqs] float32; below 1e-5 the row is greedy, as in ``argmax``.
        top_k: [num_seqs] int32, or None: off for all rows; off for a row at <= 0 or >= vocab.
        top_p: [num_seqs] float32, or None; off for a row at >= 1.
        min_p: [num_seqs] float32, or None; off for a row at <= 0.
        seeds: [num_seqs] int64, any values.
        positions: [num_seqs] int32, absolute position of the token being sampled.

    Returns:
        [num_seqs] int32 token ids; -1 for a row with a NaN, or with +inf where it is not greedy
        (its probabilities are NaN), -2 for a row of only -inf: such a row has no token.
    """
    values = clean_logits(logits)
    greedy = (temperature < GREEDY_TEMPERATURE)[:, None]
    noisy = values / torch.where(greedy, 1.0, temperature[:, None])
    noisy = noisy + gumbel_noise(seeds, positions, values.shape[-1])
    if top_k is not None or top_p is not None or min_p is not None:
        threshold = keep_threshold(values, temperature, top_k, top_p, min_p)
        noisy = torch.where(values >= threshold, noisy, -torch.inf)
    chosen = torch.where(greedy, values, noisy)
    most = torch.where(greedy, torch.inf, FLOAT32_MAX)
    return largest_of_rows(torch.where(logits.float() <= most, chosen, torch.nan))


def _top_k_threshold(descending: Tensor, top_k: Tensor) -> Tensor:
    vocab = descending.shape[-1]
    on = (top_k > 0) & (top_k < vocab)
    kth = descending.gather(-1, (top_k.clamp(1, vocab) - 1).long()[:, None])
    return torch.where(on[:, None], kth, -torch.inf)


def _top_p_threshold(weights: Tensor, descending: Tensor, top_p: Tensor) -> Tensor:
    mass = weights.cumsum(-1)
    short = mass < top_p[:, None] * mass[:, -1:]
    last = short.sum(-1, keepdim=True).clamp(max=descending.shape[-1] - 1)
    return torch.where((top_p < 1)[:, None], descending.gather(-1, last), -torch.inf)


def keep_threshold(
    values: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> Tensor:
    """The smallest logit each row keeps: [num_seqs, 1] float32 of ``values`` [num_seqs, vocab].

    ``values`` are cleaned logits; the other arguments are those of ``sample``.
    """
    greedy = temperature < GREEDY_TEMPERATURE
    divisor = torch.where(greedy, 1.0, temperature)[:, None]
    best = values.amax(-1, keepdim=True)
    best = torch.where(best.isneginf(), 0.0, best)
    floor = torch.full_like(best, -torch.inf)
    if min_p is not None:
        relative = best + divisor * torch.log(min_p[:, None])
        floor = torch.where((min_p > 0)[:, None], torch.minimum(relative, best), floor)
    if top_k is None and top_p is None:
        return floor
    descending = values.sort(dim=-1, descending=True).values
    if top_k is not None:
        floor = torch.maximum(floor, _top_k_threshold(descending, top_k))
    if top_p is not None:
        weights = torch.exp((descending - best) / divisor)
        weights = torch.where(descending >= floor, weights, 0.0)
        floor = torch.maximum(floor, _top_p_threshold(weights, descending, top_p))
    return floor


def _fake(logits: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int32)


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    def rows(values: list[float], num_seqs: int, kind: torch.dtype = torch.float32) -> Tensor:
        cycled = [values[i % len(values)] for i in range(num_seqs)]
        return torch.tensor(cycled, dtype=kind, device=draw.device)

    def call(label: str, num_seqs: int, vocab: int, filters: str) -> Case:
        logits = draw.randn(num_seqs, vocab) * 3
        seeds = draw.integers(-(2**62), 2**62, num_seqs)
        positions = draw.integers(0, 10**6, num_seqs)
        args = (
            logits.to(draw.dtype),
            rows([0.0, 0.7, 1.0, 1.6], num_seqs) if num_seqs > 1 else rows([0.8], 1),
            rows([0, 1, 5, 40, 10**6, -1], num_seqs, torch.int32) if "k" in filters else None,
            # Not round: a cumulative mass equal to top_p up to rounding is improbable.
            rows([1.0, 0.9137, 0.5171, 0.0, 0.2311], num_seqs) if "p" in filters else None,
            rows([0.0, 0.0313, 0.2117], num_seqs) if "m" in filters else None,
            seeds,
            positions.int(),
        )
        return Case(f"{label} {num_seqs} x {vocab}", args)

    yield call("temperature", 1, 1, "")
    yield call("temperature", 9, 1003, "")
    yield call("temperature", 2, 32003, "")
    yield call("min-p", 9, 1003, "m")
    yield call("top-k", 13, 517, "k")
    yield call("top-p", 13, 517, "p")
    yield call("all", 31, 1003, "kpm")
    for filters in ("", "kpm"):
        special = call(f"nan and inf{filters and ', filtered'}", 16, 3001, filters)
        # The temperatures of four rows in turn are 0, 0.7, 1 and 1.6.
        logits = special.args[0]
        logits[0:2] = torch.nan
        logits[2:5] = -torch.inf
        logits[3, 2222] = -7.0
        logits[5:9, 77] = torch.inf
        logits[9:11, ::2] = torch.nan
        logits[11, 3000], logits[12, 0] = -torch.nan, -torch.nan
        logits[13, 5], logits[13, 50] = torch.inf, torch.nan
        logits[14], logits[14, 9] = -torch.inf, torch.nan
        yield special


def _cost(desc: OpDesc) -> Cost:
    """One read of the logits: the least, though Triton's searches read them again and again."""
    logits = desc["logits"]
    filters = sum(desc[name] is not None for name in ("top_k", "top_p", "min_p"))
    return Cost(
        bytes=logits.nbytes + (4 * (filters + 3) + 8) * logits.shape[0],
        flops=40 * logits.numel,
    )


OP = SemanticOp(
    reference=sample,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        BY_CUDA,
        triton(sampling.sample),
        Implementation("native", sample, inline=True),
    ),
)
