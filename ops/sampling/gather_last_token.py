"""``gather_last_token`` takes the one row of each sequence that needs logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.desc import EXACT, Case, Cost, Draw, OpDesc, drawn
from ..core.launch import Launches
from ..core.op import Implementation, SemanticOp, dispatched, triton
from ..launches import tokens as kernels


@dispatched
def gather_last_token(hidden: Tensor, query_start_loc: Tensor) -> Tensor:
    """``hidden[query_start_loc[1:] - 1]``: the last query token of each sequence.

    Args:
        hidden: [num_tokens, hidden], at least one row; rows past ``query_start_loc[-1]`` are
            padding.
        query_start_loc: [num_seqs + 1] int32, prefix sums of query lengths.

    Returns:
        [num_seqs, hidden], contiguous.  A sequence without query tokens gets some existing row.
    """
    last = (query_start_loc[1:] - 1).clamp(0, hidden.shape[0] - 1)
    return hidden.index_select(0, last)


def _fake(hidden: Tensor, query_start_loc: Tensor) -> Tensor:
    return hidden.new_empty((query_start_loc.shape[0] - 1, hidden.shape[1]))


def _launches(hidden: Tensor, query_start_loc: Tensor) -> Launches[Tensor]:
    num_seqs = query_start_loc.shape[0] - 1
    return kernels.gather_rows(query_start_loc, hidden, num_seqs, index_offset=1, row_offset=-1)


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    def call(label: str, lengths: list[int], hidden: int, padding: int = 0) -> Case:
        total = sum(lengths)
        x = draw.randn(total + padding, hidden).to(draw.dtype)
        start = torch.tensor([0, *lengths], device=draw.device).cumsum(0).int()
        return Case(label, (x, start))

    yield call("one sequence", [5], 64)
    yield call("decode", [1] * 7, 130)
    yield call("mixed, padded", [1, 1, 9, 4, 1], 96, padding=8)
    yield call("wide", [3, 2], 4096)
    yield call("empty sequences", [0, 2, 0, 3, 0], 64, padding=3)
    yield call("only padding", [0, 0], 64, padding=4)


def _cost(desc: OpDesc) -> Cost:
    hidden, start = desc["hidden"], desc["query_start_loc"]
    num_seqs = start.shape[0] - 1
    rows = 2 * num_seqs * hidden.shape[1] * hidden.dtype.itemsize
    return Cost(bytes=start.nbytes + rows, flops=0)


OP = SemanticOp(
    reference=gather_last_token,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        triton(_launches),
        Implementation("native", gather_last_token, inline=True),
    ),
    tolerances=EXACT,
)
