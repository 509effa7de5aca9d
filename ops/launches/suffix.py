"""Describes the launches that look for drafts in a sequence and in a ring of earlier outputs."""

from __future__ import annotations

from torch import Tensor

from ...config.speculative import MOST_DRAFTS
from ..core.launch import Launch, Launches
from ..core.tiles import cdiv, next_power_of_2
from .tokens import PLACES

_RING_PLACES = 2048
"""Places of the ring that a program compares at once."""
_ROWS = 8
"""Rows for which it compares them."""


def propose_suffix(
    history: Tensor,
    lengths: Tensor,
    slots: Tensor,
    order: Tensor,
    shortest: int,
    longest: int,
    ring: Tensor,
    owners: Tensor,
    head: Tensor,
    salts: Tensor,
    found: Tensor,
    drafts: Tensor,
    has_drafts: Tensor,
) -> Launches[None]:
    num_seqs, capacity = slots.shape[0], ring.shape[0]
    sizes = {
        "width": history.shape[1],
        "history_stride": history.stride(0),
        "shortest": shortest,
        "longest": longest,
        "capacity": capacity,
    }
    sequences = {
        "history_ptr": history,
        "lengths_ptr": lengths,
        "slots_ptr": slots,
        "order_ptr": order,
        "ring_ptr": ring,
        "head_ptr": head,
        "found_ptr": found,
    }
    search = Launch(
        kernel="suffix:_search_ring_kernel",
        grid=(cdiv(capacity, _RING_PLACES), cdiv(num_seqs, _ROWS)),
        args={
            **sequences,
            "owners_ptr": owners,
            "salts_ptr": salts,
            "num_seqs": num_seqs,
            **sizes,
        },
        constexprs={"ROWS": _ROWS, "BLOCK": _RING_PLACES},
        dynamic=("num_seqs", *sizes),
        num_warps=8,
    )
    more = {"drafts_stride": drafts.stride(0), "most": drafts.shape[0]}
    choose = Launch(
        kernel="suffix:_propose_suffix_kernel",
        grid=(num_seqs,),
        args={**sequences, "drafts_ptr": drafts, "has_ptr": has_drafts, **sizes, **more},
        constexprs={"MOST": next_power_of_2(MOST_DRAFTS), "BLOCK": PLACES},
        dynamic=(*sizes, *more),
        num_warps=8,
    )
    return [search, choose], None
