"""Launches that move single token ids by slot."""

from __future__ import annotations

from torch import Tensor

from .._launch import Launch
from .tiles import cdiv

_BLOCK = 256


def feed_tokens(input_ids: Tensor, last_tokens: Tensor, slots: Tensor) -> list[Launch]:
    args = {"ids_ptr": input_ids, "last_ptr": last_tokens, "slots_ptr": slots}
    return [_launch("tokens:_feed_tokens_kernel", args, slots.shape[0])]


def keep_tokens(last_tokens: Tensor, token_ids: Tensor, slots: Tensor) -> list[Launch]:
    args = {"last_ptr": last_tokens, "ids_ptr": token_ids, "slots_ptr": slots}
    return [_launch("tokens:_keep_tokens_kernel", args, slots.shape[0])]


def _launch(kernel: str, args: dict[str, Tensor], num_seqs: int) -> Launch:
    return Launch(
        kernel=kernel,
        grid=(cdiv(num_seqs, _BLOCK),),
        args={**args, "num_seqs": num_seqs},
        constexprs={"BLOCK": _BLOCK},
        dynamic=("num_seqs",),
    )
