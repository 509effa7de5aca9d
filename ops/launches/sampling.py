"""Describes the launches of the sampling kernels over rows of logits [num_seqs, vocab].

Rows are split among programs by ``split_rows``.  ``argmax`` is two launches: one finds a candidate
for each split, the other reduces them.  ``sample`` is the same with noise added to the logits; a
launch before these finds the threshold of top-k, top-p and min-p, if one is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.launch import Launch, Launches
from ..core.tiles import cdiv, next_power_of_2

# This many programs fill an H200 several times over, so that reads overlap reductions.
_TARGET_PROGRAMS = 1056
_SEARCH_BLOCK = 8192


def rows_of(logits: Tensor) -> Tensor:
    if logits.dim() != 2:
        raise ValueError(f"logits have shape {list(logits.shape)}, expected [num_seqs, vocab]")
    return logits if logits.stride(-1) == 1 else logits.contiguous()


@dataclass(frozen=True)
class RowSplit:
    """How a row is divided among programs.

    Attributes:
        block: columns that a program reads at a time.
        num_blocks: blocks of one program.
        splits: programs of one row.
        lanes: a power of two, ``splits`` or more; the same for any number of rows above 4.
    """

    block: int
    num_blocks: int
    splits: int
    lanes: int


def split_rows(num_seqs: int, vocab: int, *, largest: int = 4096) -> RowSplit:
    """Split rows of ``vocab`` columns into enough programs to fill the device.  A block has at most
    ``largest`` columns."""
    block = min(1024 if num_seqs <= 4 else largest, next_power_of_2(vocab))
    blocks = cdiv(vocab, block)
    wanted = min(max(cdiv(_TARGET_PROGRAMS, max(num_seqs, 1)), 1), blocks)
    num_blocks = cdiv(blocks, wanted)
    return RowSplit(block, num_blocks, cdiv(blocks, num_blocks), next_power_of_2(blocks))


def _argmax_launches(
    logits: Tensor, sampling_args: dict[str, Tensor], *, draw: bool, filtered: bool
) -> Launches[Tensor]:
    num_seqs, vocab = logits.shape
    # Noise needs registers: with blocks of 4096 columns, only two programs would fit an SM.
    split = split_rows(num_seqs, vocab, largest=2048 if draw else 4096)
    best = torch.empty((num_seqs, split.splits), dtype=torch.float32, device=logits.device)
    index = torch.empty((num_seqs, split.splits), dtype=torch.int32, device=logits.device)
    out = torch.empty(num_seqs, dtype=torch.int32, device=logits.device)
    partial = Launch(
        kernel="sampling:_argmax_partial_kernel",
        grid=(num_seqs, split.splits),
        args={
            "logits_ptr": logits,
            **sampling_args,
            "best_ptr": best,
            "index_ptr": index,
            "vocab": vocab,
            "row_stride": logits.stride(0),
            "num_blocks": split.num_blocks,
        },
        constexprs={"SAMPLE": draw, "FILTER": filtered, "BLOCK": split.block},
        num_warps=4 if split.block <= 1024 else 8,
        dynamic=("num_blocks",),
    )
    reduce = Launch(
        kernel="sampling:_argmax_reduce_kernel",
        grid=(num_seqs,),
        args={"best_ptr": best, "index_ptr": index, "out_ptr": out, "splits": split.splits},
        constexprs={"BLOCK": split.lanes},
        num_warps=1,
        dynamic=("splits",),
    )
    return [partial, reduce], out


def argmax(logits: Tensor) -> Launches[Tensor]:
    logits = rows_of(logits)
    unused = ("temperature_ptr", "threshold_ptr", "seeds_ptr", "positions_ptr")
    return _argmax_launches(logits, dict.fromkeys(unused, logits), draw=False, filtered=False)


def _search_rounds(dtype: torch.dtype) -> int:
    """Number of two-bit rounds after which the radix search tells all values of a dtype apart."""
    return {torch.bfloat16: 8, torch.float16: 10}.get(dtype, 16)  # 16, 19 -> 20 and 32 bits


def sample(logits: Tensor, temperature: Tensor, *rest: Any) -> Launches[Tensor]:
    """The launches of ``ops.sample``; ``rest`` is its top_k, top_p, min_p, seeds and positions."""
    logits = rows_of(logits)
    num_seqs, vocab = logits.shape
    *given, seeds, positions = rest
    filters = dict(zip(("top_k", "top_p", "min_p"), given, strict=True))
    filtered = any(values is not None for values in given)
    threshold = torch.empty_like(temperature) if filtered else temperature
    sampling_args = {
        "temperature_ptr": temperature,
        "threshold_ptr": threshold,
        "seeds_ptr": seeds,
        "positions_ptr": positions,
    }
    launches, out = _argmax_launches(logits, sampling_args, draw=True, filtered=filtered)
    if not filtered:
        return launches, out
    block = min(_SEARCH_BLOCK, next_power_of_2(vocab))
    search = Launch(
        kernel="sampling:_threshold_kernel",
        grid=(num_seqs,),
        args={
            "logits_ptr": logits,
            "temperature_ptr": temperature,
            **{f"{n}_ptr": temperature if v is None else v for n, v in filters.items()},
            "threshold_ptr": threshold,
            "vocab": vocab,
            "row_stride": logits.stride(0),
        },
        constexprs={
            **{f"HAS_{name.upper()}": v is not None for name, v in filters.items()},
            "ROUNDS": _search_rounds(logits.dtype),
            "BLOCK": block,
        },
        num_warps=max(block // 256, 1),
    )
    return [search, *launches], out
