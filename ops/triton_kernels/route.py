"""The router's choice of experts: one program a token, whose scores are one tile in registers.

The tile is groups by experts of a group.  The best are taken one after the other; what was taken
counts as less than anything that may be chosen, so ids are always in range, also for NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import start_next_and_wait

_NEVER = tl.constexpr(float("-inf"))
_LEAST = tl.constexpr(-3.4028234663852886e38)
_MOST = tl.constexpr(float("inf"))


@triton.jit
def _take_best(choice, ids, NONE: tl.constexpr):
    """The lowest of ``ids`` with the largest ``choice``; both are one-dimensional."""
    best = tl.max(choice, axis=0)
    return tl.min(tl.where(choice == best, ids, NONE), axis=0)


@triton.jit
def _comparable(values, exists):
    """``values`` with NaN above all numbers, infinities among them, and what is not there below."""
    values = tl.where(values == values, tl.maximum(values, _LEAST), _MOST)
    return tl.where(exists, values, _NEVER)


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, row_stride, scaling, TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    start_next_and_wait(PROGRAMMATIC)
    token = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS_BLOCK)
    within = tl.arange(0, SIZE_BLOCK)
    ids = groups[:, None] * GROUP_SIZE + within[None, :]
    exists = (groups < NUM_GROUPS)[:, None] & (within < GROUP_SIZE)[None, :]
    NONE: tl.constexpr = NUM_GROUPS * GROUP_SIZE
    logits = tl.load(logits_ptr + token * row_stride + ids, mask=exists, other=_NEVER)
    logits = logits.to(tl.float32)
    if SCORING == "softmax":
        scores = tl.exp(logits - tl.max(tl.max(logits, axis=1), axis=0))
        scores = tl.where(exists, scores, 0.0)
        scores /= tl.sum(tl.sum(scores, axis=1), axis=0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    if bias_ptr is None:
        choice = _comparable(logits, exists)
    else:
        bias = tl.load(bias_ptr + ids, mask=exists, other=0.0)
        choice = _comparable(scores + bias, exists)
    if NUM_GROUPS > 1:
        of_group = tl.max(choice, axis=1)
        if bias_ptr is not None:
            first = tl.min(tl.where(choice == of_group[:, None], ids, NONE), axis=1)
            of_group += tl.max(tl.where(ids == first[:, None], _NEVER, choice), axis=1)
        of_group = tl.where(groups < NUM_GROUPS, of_group, _NEVER)
        kept = groups < 0
        for _ in tl.static_range(TOPK_GROUPS):
            taken = groups == _take_best(of_group, groups, NUM_GROUPS)
            kept = kept | taken
            of_group = tl.where(taken, _NEVER, of_group)
        choice = tl.where(kept[:, None], choice, _NEVER)
    choice = tl.reshape(choice, (GROUPS_BLOCK * SIZE_BLOCK,))
    scores = tl.reshape(scores, (GROUPS_BLOCK * SIZE_BLOCK,))
    ids = tl.reshape(ids, (GROUPS_BLOCK * SIZE_BLOCK,))
    exists = tl.reshape(exists, (GROUPS_BLOCK * SIZE_BLOCK,))
    places = tl.arange(0, TOP_K_BLOCK)
    chosen = tl.zeros((TOP_K_BLOCK,), dtype=tl.int32)
    weights = tl.zeros((TOP_K_BLOCK,), dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        best = _take_best(choice, ids, NONE)
        taken = exists & (ids == best)
        chosen = tl.where(places == place, best, chosen)
        score = tl.sum(tl.where(taken, scores, 0.0), axis=0)
        weights = tl.where(places == place, score, weights)
        choice = tl.where(taken, _NEVER, choice)
    if RENORMALIZE:
        weights /= tl.sum(weights, axis=0) + 1e-20
    mask = places < TOP_K
    tl.store(weights_ptr + token * TOP_K + places, weights * scaling, mask=mask)
    tl.store(ids_ptr + token * TOP_K + places, chosen, mask=mask)
