"""Describes the launches that move token ids and step inputs on the device."""

from __future__ import annotations

from torch import Tensor

from .._launch import Launch
from .tiles import cdiv

_BLOCK = 256


def write_inputs(
    columns: int,
    packed: Tensor,
    last_tokens: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    block_table: Tensor,
) -> list[Launch]:
    num_tokens, num_seqs = input_ids.shape[0], seq_lens.shape[0]
    sizes = {
        "num_tokens": num_tokens,
        "num_seqs": num_seqs,
        "columns": columns,
        "table_stride": block_table.stride(0),
    }
    launch = Launch(
        kernel="tokens:_write_inputs_kernel",
        grid=(cdiv(max(num_tokens, num_seqs + 1, num_seqs * columns), _BLOCK),),
        args={
            "packed_ptr": packed,
            "last_ptr": last_tokens,
            "ids_ptr": input_ids,
            "positions_ptr": positions,
            "slot_mapping_ptr": slot_mapping,
            "seq_lens_ptr": seq_lens,
            "slots_ptr": slots,
            "starts_ptr": query_start_loc,
            "table_ptr": block_table,
            **sizes,
        },
        constexprs={"BLOCK": _BLOCK},
        dynamic=tuple(sizes),
        programmatic=True,
    )
    return [launch]


def keep_tokens(
    last_tokens: Tensor, token_ids: Tensor, slots: Tensor, read: Tensor
) -> list[Launch]:
    args = {
        "last_ptr": last_tokens,
        "ids_ptr": token_ids,
        "slots_ptr": slots,
        "read_ptr": read,
    }
    launch = Launch(
        kernel="tokens:_keep_tokens_kernel",
        grid=(cdiv(slots.shape[0], _BLOCK),),
        args={**args, "num_seqs": slots.shape[0]},
        constexprs={"BLOCK": _BLOCK},
        dynamic=("num_seqs",),
        programmatic=True,
    )
    return [launch]
