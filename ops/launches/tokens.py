"""Describes the launches that move token ids and step inputs on the device."""

from __future__ import annotations

from torch import Tensor

from ..core.launch import Launch, Launches
from ..core.tiles import cdiv, next_power_of_2

_BLOCK = 256


def write_inputs(
    columns: int, packed: Tensor, last_tokens: Tensor, tokens: Tensor, rows: Tensor, tables: Tensor
) -> Launches[None]:
    num_tokens, (num_seqs, num_tables, _) = tokens.shape[1], tables.shape
    sizes = {
        "num_tokens": num_tokens,
        "num_seqs": num_seqs,
        "columns": columns,
        "tokens_stride": tokens.stride(0),
        "rows_stride": rows.stride(0),
        "sequence_stride": tables.stride(0),
        "table_stride": tables.stride(1),
    }
    items = max(num_tokens, num_seqs + 1, num_seqs * num_tables * columns)
    launch = Launch(
        kernel="tokens:_write_inputs_kernel",
        grid=(cdiv(items, _BLOCK),),
        args={
            "packed_ptr": packed,
            "last_ptr": last_tokens,
            "tokens_ptr": tokens,
            "rows_ptr": rows,
            "tables_ptr": tables,
            **sizes,
        },
        constexprs={
            "TOKEN_FIELDS": tokens.shape[0],
            "ROW_FIELDS": rows.shape[0],
            "TABLES": num_tables,
            "FIELDS": next_power_of_2(max(tokens.shape[0], rows.shape[0])),
            "BLOCK": _BLOCK,
        },
        dynamic=tuple(sizes),
    )
    return [launch], None


def keep_tokens(
    last_tokens: Tensor, token_ids: Tensor, slots: Tensor, read: Tensor
) -> Launches[None]:
    launch = Launch(
        kernel="tokens:_keep_tokens_kernel",
        grid=(cdiv(slots.shape[0], _BLOCK),),
        args={
            "last_ptr": last_tokens,
            "ids_ptr": token_ids,
            "slots_ptr": slots,
            "read_ptr": read,
            "num_seqs": slots.shape[0],
        },
        constexprs={"BLOCK": _BLOCK},
        dynamic=("num_seqs",),
    )
    return [launch], None
