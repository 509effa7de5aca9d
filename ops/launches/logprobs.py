"""Describes the launches of log-probabilities: log-sum-exp, rank and top-K of rows of logits.

Programs compute them for parts of a row and leave partial results in scratch memory, which one
more launch reduces to a result for each row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.launch import Launch, Launches
from ..core.tiles import cdiv, next_power_of_2
from .sampling import RowSplit, rows_of

# Each takes one round of selection, and a round sees all keys of a row at once.
MAX_LOGPROBS = 32
# Most programs of a row: so many that a few rows fill a GPU.
_SPLITS = 64


def _split_row(vocab: int) -> RowSplit:
    """The split, independent of the number of rows: a row's sum has the same bits in any batch."""
    block = min(1024, next_power_of_2(vocab))
    blocks = cdiv(vocab, block)
    num_blocks = cdiv(blocks, _SPLITS)
    splits = cdiv(blocks, num_blocks)
    return RowSplit(block, num_blocks, splits, next_power_of_2(splits))


def token_logprobs(
    logits: Tensor, token_ids: Tensor, num_logprobs: int
) -> Launches[tuple[Tensor, Tensor, Tensor, Tensor]]:
    logits = rows_of(logits)
    num_seqs, vocab = logits.shape
    chosen = torch.empty(num_seqs, dtype=torch.float32, device=logits.device)
    rank = torch.empty(num_seqs, dtype=torch.int32, device=logits.device)
    shape = (num_seqs, num_logprobs)
    top = torch.empty(shape, dtype=torch.float32, device=logits.device)
    top_ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    split = _split_row(vocab)
    partial, scratch = _logsumexp_partial(logits, token_ids, split)
    blocks = cdiv(vocab, _top_block(vocab))
    keys = torch.empty((num_seqs, blocks * num_logprobs), dtype=torch.int64, device=logits.device)
    tops = [_top_partial(logits, keys, num_logprobs)] if num_logprobs else []
    reduce = Launch(
        kernel="logprobs:_logprobs_reduce_kernel",
        grid=(num_seqs,),
        args={
            "logits_ptr": logits,
            "token_ids_ptr": token_ids,
            **scratch,
            "keys_ptr": keys,
            "chosen_logprob_ptr": chosen,
            "chosen_rank_ptr": rank,
            "top_logprobs_ptr": top,
            "top_ids_ptr": top_ids,
            "vocab": vocab,
            "row_stride": logits.stride(0),
            "splits": split.splits,
            "num_keys": keys.shape[1],
            "num_logprobs": num_logprobs,
        },
        constexprs={
            "SPLITS_BLOCK": split.lanes,
            "KEYS_BLOCK": next_power_of_2(blocks * MAX_LOGPROBS),
        },
        num_warps=4,
        dynamic=("splits", "num_keys", "num_logprobs"),
    )
    return [partial, *tops, reduce], (chosen, rank, top, top_ids)


def _logsumexp_partial(
    logits: Tensor, token_ids: Tensor, split: RowSplit
) -> tuple[Launch, dict[str, Tensor]]:
    num_seqs, vocab = logits.shape
    shape, device = (num_seqs, split.splits), logits.device
    scratch = {
        "best_ptr": torch.empty(shape, dtype=torch.float32, device=device),
        "sum_ptr": torch.empty(shape, dtype=torch.float32, device=device),
        "ahead_ptr": torch.empty(shape, dtype=torch.int32, device=device),
    }
    launch = Launch(
        kernel="logprobs:_logsumexp_partial_kernel",
        grid=shape,
        args={
            "logits_ptr": logits,
            "token_ids_ptr": token_ids,
            **scratch,
            "vocab": vocab,
            "row_stride": logits.stride(0),
            "num_blocks": split.num_blocks,
        },
        constexprs={"BLOCK": split.block},
        num_warps=4 if split.block <= 1024 else 8,
        dynamic=("num_blocks",),
    )
    return launch, scratch


def _top_block(vocab: int) -> int:
    return min(4096, next_power_of_2(vocab))


def _top_partial(logits: Tensor, keys: Tensor, num_logprobs: int) -> Launch:
    num_seqs, vocab = logits.shape
    block = _top_block(vocab)
    return Launch(
        kernel="logprobs:_top_partial_kernel",
        grid=(num_seqs, cdiv(vocab, block)),
        args={
            "logits_ptr": logits,
            "keys_ptr": keys,
            "vocab": vocab,
            "row_stride": logits.stride(0),
            "num_logprobs": num_logprobs,
        },
        constexprs={"BLOCK": block},
        num_warps=8,
        dynamic=("num_logprobs",),
    )
