"""``write_inputs`` unpacks one packed tensor from the host into the static inputs of a step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...config import NO_SLOT, STEP
from ..core.desc import Case, Cost, Draw, OpDesc, drawn
from ..core.launch import Launches
from ..core.op import Implementation, SemanticOp, dispatched, nothing, triton
from ..launches import tokens as kernels


@dispatched
def write_inputs(
    packed: Tensor, last_tokens: Tensor, tokens: Tensor, rows: Tensor, tables: Tensor
) -> None:
    """Unpack a step's inputs, and put tokens that only the device knows into the token ids.

    Args:
        packed: [n] int32, the fields of a ``StepSchema`` one behind the other: those of tokens, the
            feed slots as the last of them; those of rows; the filled columns of the tables, row by
            row.  Token id i becomes ``last_tokens[feed slot i]`` where that is not -1.
        last_tokens: [max_num_seqs] int32, the newest sampled token of every slot.
        tokens: [T, num_tokens] int32, written: the fields of tokens without the feed slots, the
            token ids first.
        rows: [R, num_seqs + 1] int32, written.
        tables: [num_seqs, tables, max_blocks] int32, written in the first columns of each.

    Raises:
        ValueError: ``packed`` has not the size that these make.
    """
    columns = num_table_columns(packed, tokens, rows, tables)
    num_seqs, num_tables, _ = tables.shape
    given, ends, cells = packed.split(
        [(tokens.shape[0] + 1) * tokens.shape[1], rows.numel(), num_seqs * num_tables * columns]
    )
    *fields, feed = given.view(-1, tokens.shape[1]).unbind()
    fed = torch.where(feed == NO_SLOT, fields[0], last_tokens[feed.clamp(min=0)])
    tokens.copy_(torch.stack([fed, *fields[1:]]))
    rows.copy_(ends.view(rows.shape))
    tables[:, :, :columns].copy_(cells.view(num_seqs, num_tables, columns))


def num_table_columns(packed: Tensor, tokens: Tensor, rows: Tensor, tables: Tensor) -> int:
    """Filled columns of each table in ``packed``.

    Raises:
        ValueError: its size is not that of any number of columns up to ``max_blocks``.
    """
    num_seqs, num_tables, max_blocks = tables.shape
    cells = packed.shape[0] - (tokens.shape[0] + 1) * tokens.shape[1] - rows.numel()
    rest = num_seqs * num_tables
    if rows.shape[1] != num_seqs + 1 or cells < 0 or cells % rest or cells // rest > max_blocks:
        raise ValueError(
            f"packed has {packed.shape[0]} values for {tokens.shape[0]} + 1 fields of "
            f"{tokens.shape[1]} tokens, rows {list(rows.shape)} and {num_tables} tables of "
            f"{num_seqs} sequences of up to {max_blocks} blocks: expected the sum of these"
        )
    return cells // rest


def _launches(
    packed: Tensor, last_tokens: Tensor, tokens: Tensor, rows: Tensor, tables: Tensor
) -> Launches[None]:
    columns = num_table_columns(packed, tokens, rows, tables)
    return kernels.write_inputs(columns, packed, last_tokens, tokens, rows, tables)


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    dtype = draw.dtype

    def ints(*shape: int, most: int = 1000) -> Tensor:
        return draw.integers(0, most, *shape).to(dtype)

    fields = len(STEP.tokens) - 1, len(STEP.rows)
    for num_tokens, num_seqs, columns, max_blocks, num_tables, (per_token, per_row) in [
        (1, 1, 1, 1, 1, fields),
        (9, 5, 3, 8, 1, fields),
        (300, 257, 0, 4, 1, fields),
        (1500, 2, 700, 900, 1, fields),
        (3, 40, 2, 2, 1, fields),
        (70, 20, 3, 5, 3, (5, 4)),
    ]:
        given = ints(per_token, num_tokens)
        feed = torch.where(ints(num_tokens, most=3) > 0, ints(num_tokens, most=300), NO_SLOT)
        rest = ints(per_row * (num_seqs + 1) + num_seqs * num_tables * columns)
        packed = torch.cat((given.flatten(), feed.to(dtype), rest))
        tables = torch.full((num_tables, num_seqs, max_blocks), -7, dtype=dtype, device=draw.device)
        wide = ints(per_token, num_tokens + 3)[:, :num_tokens]
        label = f"{num_tokens} tokens, {num_seqs} sequences, {columns} of {max_blocks} columns"
        rows = ints(per_row, num_seqs + 1)
        yield Case(label, (packed, ints(300), wide, rows, tables.transpose(0, 1)))


def _cost(desc: OpDesc) -> Cost:
    return Cost(bytes=2 * desc["packed"].nbytes, flops=0)


OP = SemanticOp(
    reference=write_inputs,
    fake=nothing,
    cases=_cases,
    cost=_cost,
    mutates=("tokens", "rows", "tables"),
    dtypes=(torch.int32,),
    implementations=(
        triton(_launches),
        Implementation("native", write_inputs),
    ),
)
