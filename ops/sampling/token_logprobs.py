"""``token_logprobs`` gives log-probabilities of sampled tokens and of the most probable ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..core import rowwise as _rowwise
from ..core.desc import TOLERANCES, Case, Cost, Draw, OpDesc, Tolerance, drawn
from ..core.launch import Launches
from ..core.op import Implementation, SemanticOp, definition, dispatched, on_cpu, triton
from ..launches import logprobs
from .noise import clean_logits, ordered_bits


@dispatched
def token_logprobs(
    logits: Tensor, token_ids: Tensor, num_logprobs: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-softmax of the raw logits at the chosen tokens and at the ``num_logprobs`` best.

    Tokens are ordered by descending logit, the lower index first among equals; a token's rank is
    its place in that order, from 1, so ``top_ids[s, chosen_rank[s] - 1]`` is the chosen token.

    Args:
        logits: [num_seqs, vocab], floating point, last dimension contiguous, before temperature.
        token_ids: [num_seqs] int32; ids outside the vocabulary give unspecified rows.
        num_logprobs: K, at least 0 and at most vocab.

    Returns:
        chosen_logprob [num_seqs] float32, chosen_rank [num_seqs] int32, top_logprobs
        [num_seqs, K] float32, top_ids [num_seqs, K] int32.  A logit of -inf or NaN has -inf.
    """
    vocab = logits.shape[-1]
    _check(vocab, num_logprobs)
    values = clean_logits(logits)
    chosen_id = token_ids.long().clamp(0, vocab - 1)[:, None]
    chosen = values.gather(-1, chosen_id)
    normalizer = values.logsumexp(-1, keepdim=True)
    index = torch.arange(vocab, device=logits.device)
    ahead = (values > chosen) | ((values == chosen) & (index < chosen_id))
    # Unique keys, value first and then lower index: top-k has no ties left to break at will.
    keys = (ordered_bits(values) << 32) | (0xFFFFFFFF - index)
    top_ids = 0xFFFFFFFF - (keys.topk(num_logprobs, dim=-1).values & 0xFFFFFFFF)
    top = values.gather(-1, top_ids)
    return (
        _minus(chosen, normalizer).squeeze(-1),
        1 + ahead.sum(-1, dtype=torch.int32),
        _minus(top, normalizer),
        top_ids.int(),
    )


def _check(vocab: int, num_logprobs: int) -> None:
    if not 0 <= num_logprobs <= vocab:
        raise ValueError(f"num_logprobs is {num_logprobs}, expected 0 to the vocabulary, {vocab}")


def _minus(values: Tensor, normalizer: Tensor) -> Tensor:
    return torch.where(values.isneginf(), values, values - normalizer)


def _fake(
    logits: Tensor, token_ids: Tensor, num_logprobs: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_seqs = logits.shape[0]
    return (
        logits.new_empty(num_seqs, dtype=torch.float32),
        logits.new_empty(num_seqs, dtype=torch.int32),
        logits.new_empty((num_seqs, num_logprobs), dtype=torch.float32),
        logits.new_empty((num_seqs, num_logprobs), dtype=torch.int32),
    )


def _launches(
    logits: Tensor, token_ids: Tensor, num_logprobs: int
) -> Launches[tuple[Tensor, Tensor, Tensor, Tensor]]:
    _check(logits.shape[-1], num_logprobs)
    return logprobs.token_logprobs(logits, token_ids, num_logprobs)


def _triton_supports(desc: OpDesc) -> str:
    k = desc["num_logprobs"]
    return (
        ""
        if k <= logprobs.MAX_LOGPROBS
        else f"num_logprobs {k} > {logprobs.MAX_LOGPROBS}: one selection round each"
    )


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    for num_seqs, vocab, k in [(1, 1, 1), (5, 33, 32), (9, 1003, 0), (4, 9001, 5), (2, 32003, 20)]:
        logits = 4 * draw.randn(num_seqs, vocab)
        token_ids = draw.integers(0, vocab, num_seqs).int()
        token_ids[0] = logits[0].argmax()
        yield Case(f"{num_seqs} x {vocab}, top {k}", (logits.to(draw.dtype), token_ids, k))
    special = 4 * draw.randn(4, 5001)
    special[0] = -torch.inf
    special[0, 4999] = -2.0
    special[1, ::2] = torch.nan
    special[2] = special[2].round()
    special[3] = -torch.inf
    token_ids = torch.tensor([4999, 3, 17, 5], dtype=torch.int32, device=draw.device)
    yield Case("ties, nan and inf", (special.to(draw.dtype), token_ids, 7))


def _cost(desc: OpDesc) -> Cost:
    logits, k = desc["logits"], desc["num_logprobs"]
    num_seqs = logits.shape[0]
    return Cost(bytes=logits.nbytes + num_seqs * (12 + 8 * k), flops=4 * logits.numel)


_by_row = _rowwise.each_row(definition(token_logprobs))
_TOLERANCE = Tolerance(2e-5, 1e-5)  # float32 sums over the vocabulary, whatever the input dtype

OP = SemanticOp(
    reference=token_logprobs,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        triton(_launches, _triton_supports),
        Implementation("native", token_logprobs, inline=True),
        on_cpu("rowwise", _by_row, opt_in=True),
    ),
    tolerances=dict.fromkeys(TOLERANCES, _TOLERANCE),
)
