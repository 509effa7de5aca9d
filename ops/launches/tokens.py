"""Describes the launches that move token ids, step inputs and the rows that ids pick."""

from __future__ import annotations

import torch
from torch import Tensor

from ...config.step_fields import MOST_DRAFTS
from ..core.launch import Launch, Launches
from ..core.tiles import cdiv, dense_rows, next_power_of_2

_BLOCK = 256
_PLACES = 2048
"""Places of a sequence, or of a ring of outputs, that a program compares at once."""
_ROWS = 8
"""Rows for which a program searches its part of the ring."""


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


def accept_tokens(
    last_tokens: Tensor,
    lengths: Tensor,
    history: Tensor,
    chances: Tensor | None,
    judged: Tensor,
    token_ids: Tensor,
    input_ids: Tensor,
    slots: Tensor,
    order: Tensor,
    seq_lens: Tensor,
    kept: Tensor,
    read: Tensor,
) -> Launches[None]:
    sizes = {
        "num_seqs": slots.shape[0],
        "width": history.shape[1],
        "history_stride": history.stride(0),
    }
    launch = Launch(
        kernel="tokens:_accept_tokens_kernel",
        grid=(cdiv(slots.shape[0], _BLOCK),),
        args={
            "last_ptr": last_tokens,
            "lengths_ptr": lengths,
            "history_ptr": history,
            "chances_ptr": last_tokens if chances is None else chances,
            "judged_ptr": judged,
            "ids_ptr": token_ids,
            "inputs_ptr": input_ids,
            "slots_ptr": slots,
            "order_ptr": order,
            "lens_ptr": seq_lens,
            "kept_ptr": kept,
            "read_ptr": read,
            **sizes,
        },
        constexprs={"IS_JUDGED": chances is not None, "BLOCK": _BLOCK},
        dynamic=tuple(sizes),
    )
    return [launch], None


def place_rows(
    lengths: Tensor,
    drafts: Tensor,
    slots: Tensor,
    tables: Tensor,
    block_size: int,
    order: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    mappings: Tensor,
) -> Launches[None]:
    sizes = {
        "num_seqs": slots.shape[0],
        "block_size": block_size,
        "max_blocks": tables.shape[2],
        "drafts_stride": drafts.stride(0),
        "sequence_stride": tables.stride(0),
        "table_stride": tables.stride(1),
        "mapping_stride": mappings.stride(0),
    }
    launch = Launch(
        kernel="tokens:_place_rows_kernel",
        grid=(cdiv(slots.shape[0], _BLOCK),),
        args={
            "lengths_ptr": lengths,
            "drafts_ptr": drafts,
            "slots_ptr": slots,
            "tables_ptr": tables,
            "order_ptr": order,
            "ids_ptr": input_ids,
            "positions_ptr": positions,
            "lens_ptr": seq_lens,
            "mappings_ptr": mappings,
            **sizes,
        },
        constexprs={"GROUPS": mappings.shape[0], "BLOCK": _BLOCK},
        dynamic=tuple(sizes),
    )
    return [launch], None


def propose_ngrams(
    history: Tensor,
    lengths: Tensor,
    slots: Tensor,
    order: Tensor,
    shortest: int,
    longest: int,
    drafts: Tensor,
    has_drafts: Tensor,
) -> Launches[None]:
    sizes = {
        "width": history.shape[1],
        "history_stride": history.stride(0),
        "drafts_stride": drafts.stride(0),
        "shortest": shortest,
        "longest": longest,
        "most": drafts.shape[0],
    }
    launch = Launch(
        kernel="tokens:_propose_ngrams_kernel",
        grid=(slots.shape[0],),
        args={
            "history_ptr": history,
            "lengths_ptr": lengths,
            "slots_ptr": slots,
            "order_ptr": order,
            "drafts_ptr": drafts,
            "has_ptr": has_drafts,
            **sizes,
        },
        constexprs={"MOST": next_power_of_2(MOST_DRAFTS), "BLOCK": _PLACES},
        dynamic=tuple(sizes),
        num_warps=8,
    )
    return [launch], None


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
        kernel="tokens:_search_ring_kernel",
        grid=(cdiv(capacity, _PLACES), cdiv(num_seqs, _ROWS)),
        args={
            **sequences,
            "owners_ptr": owners,
            "salts_ptr": salts,
            "num_seqs": num_seqs,
            **sizes,
        },
        constexprs={"ROWS": _ROWS, "BLOCK": _PLACES},
        dynamic=("num_seqs", *sizes),
        num_warps=8,
    )
    more = {"drafts_stride": drafts.stride(0), "most": drafts.shape[0]}
    choose = Launch(
        kernel="tokens:_propose_suffix_kernel",
        grid=(num_seqs,),
        args={**sequences, "drafts_ptr": drafts, "has_ptr": has_drafts, **sizes, **more},
        constexprs={"MOST": next_power_of_2(MOST_DRAFTS), "BLOCK": _PLACES},
        dynamic=(*sizes, *more),
        num_warps=8,
    )
    return [search, choose], None


def gather_rows(
    index: Tensor,
    table: Tensor,
    num_items: int,
    *,
    index_offset: int = 0,
    row_offset: int = 0,
    first: Tensor | None = None,
) -> Launches[Tensor]:
    """``out[i] = table[clamp(index[i + index_offset] + row_offset)]``.

    With ``first`` [1] int32 the table's rows count from there, and rows outside of it are zeros
    instead of clamped.
    """
    num_rows, width = table.shape
    out = torch.empty((num_items, width), dtype=table.dtype, device=table.device)
    table = dense_rows(table)
    block = min(next_power_of_2(width), 2048)
    launch = Launch(
        kernel="tokens:_gather_rows_kernel",
        grid=(num_items, cdiv(width, block)),
        args={
            "index_ptr": index,
            "first_ptr": index if first is None else first,
            "table_ptr": table,
            "out_ptr": out,
            "num_rows": num_rows,
            "width": width,
            "table_stride": table.stride(0),
        },
        constexprs={
            "INDEX_OFFSET": index_offset,
            "ROW_OFFSET": row_offset,
            "IS_PART": first is not None,
            "BLOCK": block,
        },
        num_warps=min(max(block // 512, 1), 4),
        dynamic=("num_rows",),
    )
    return [launch], out
