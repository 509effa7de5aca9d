"""``write_inputs`` unpacks one packed tensor from the host into the static inputs of a step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ._launch import Launch, run_launches
from ._op import Case, Cost, Implementation, OpDesc, SemanticOp
from .launches import tokens


def write_inputs(
    packed: Tensor,
    last_tokens: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    block_table: Tensor,
) -> None:
    """Unpack a step's inputs, and put tokens that only the device knows into ``input_ids``.

    Args:
        packed: [n] int32: input_ids, positions, slot_mapping of each token, then seq_lens, slots
            and feed slots of each sequence, query_start_loc, and the filled columns of the block
            table, row by row.  ``input_ids[i]`` becomes ``last_tokens[feed slot i]`` where that is
            not -1.
        last_tokens: [max_num_seqs] int32, the newest sampled token of every slot.
        input_ids, positions, slot_mapping: [num_tokens] int32, written.
        seq_lens, slots: [num_seqs] int32, written.
        query_start_loc: [num_seqs + 1] int32, written.
        block_table: [num_seqs, max_blocks] int32, written in its first columns.

    Raises:
        ValueError: ``packed`` has not the size that these make.
    """
    torch.ops.fw.write_inputs.default(
        packed,
        last_tokens,
        input_ids,
        positions,
        slot_mapping,
        seq_lens,
        slots,
        query_start_loc,
        block_table,
    )


def num_table_columns(packed: Tensor, num_tokens: int, num_seqs: int, max_blocks: int) -> int:
    """Columns of the block table in ``packed``.

    Raises:
        ValueError: its size is not that of any number of columns up to ``max_blocks``.
    """
    rest = packed.shape[0] - 3 * num_tokens - 3 * num_seqs - (num_seqs + 1)
    if rest < 0 or rest % num_seqs or rest // num_seqs > max_blocks:
        raise ValueError(
            f"packed has {packed.shape[0]} values for {num_tokens} tokens and {num_seqs} sequences "
            f"of up to {max_blocks} blocks, expected 3 a token, 4 a sequence, 1, and a block table"
        )
    return rest // num_seqs


def _reference(
    packed: Tensor,
    last_tokens: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    block_table: Tensor,
) -> None:
    num_tokens, num_seqs = input_ids.shape[0], seq_lens.shape[0]
    columns = num_table_columns(packed, num_tokens, num_seqs, block_table.shape[1])
    sizes = [num_tokens] * 3 + [num_seqs] * 3 + [num_seqs + 1, num_seqs * columns]
    ids, at, stored, lengths, rows, feed, starts, table = packed.split(sizes)
    outputs = (positions, slot_mapping, seq_lens, slots, query_start_loc)
    for output, values in zip(outputs, (at, stored, lengths, rows, starts), strict=True):
        output.copy_(values)
    block_table[:, :columns].copy_(table.view(num_seqs, columns))
    input_ids.copy_(ids)
    feed = feed[:num_tokens]
    fed = torch.where(feed >= 0, last_tokens[feed.clamp(min=0)], ids[: feed.shape[0]])
    input_ids[: feed.shape[0]].copy_(fed)


def _fake(packed: Tensor, *rest: Tensor) -> None:
    return None


def _launches(packed: Tensor, *rest: Tensor) -> tuple[list[Launch], None]:
    input_ids, seq_lens, table = rest[1], rest[4], rest[7]
    columns = num_table_columns(packed, input_ids.shape[0], seq_lens.shape[0], table.shape[1])
    return tokens.write_inputs(columns, packed, *rest), None


def _cases(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Iterator[Case]:
    def ints(size: int, most: int = 1000) -> Tensor:
        return torch.randint(0, most, (size,), generator=gen, device=device).to(dtype)

    for num_tokens, num_seqs, columns, max_blocks in [
        (1, 1, 1, 1),
        (9, 5, 3, 8),
        (300, 257, 0, 4),
        (1500, 2, 700, 900),
        (3, 40, 2, 2),
    ]:
        feed = torch.where(ints(num_seqs, 3) > 0, ints(num_seqs, 300), -1).to(dtype)
        fixed = ints(3 * num_tokens + 2 * num_seqs)
        packed = torch.cat((fixed, feed, ints(num_seqs + 1 + num_seqs * columns)))
        table = torch.full((num_seqs, max_blocks), -7, dtype=dtype, device=device)
        sizes = [num_tokens] * 3 + [num_seqs] * 2 + [num_seqs + 1]
        outputs = [ints(size) for size in sizes]
        label = f"{num_tokens} tokens, {num_seqs} sequences, {columns} of {max_blocks} columns"
        yield Case(label, (packed, ints(300), *outputs, table))


def _cost(desc: OpDesc) -> Cost:
    return Cost(bytes=2 * desc["packed"].nbytes, flops=0)


OP = SemanticOp(
    name="write_inputs",
    reference=_reference,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    mutates=(
        "input_ids",
        "positions",
        "slot_mapping",
        "seq_lens",
        "slots",
        "query_start_loc",
        "block_table",
    ),
    dtypes=(torch.int32,),
    implementations=(
        Implementation("triton", run_launches(_launches), devices=("cuda",), launches=_launches),
        Implementation("native", _reference),
    ),
)
