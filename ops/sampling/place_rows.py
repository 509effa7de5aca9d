"""``place_rows`` makes the inputs of rows whose position and draft the device alone knows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...config.step_fields import NO_DRAFT, NO_SLOT, ON_DEVICE
from ..core.desc import Case, Cost, Draw, OpDesc, drawn
from ..core.op import Implementation, SemanticOp, dispatched, nothing, triton
from ..launches import tokens


@dispatched
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
) -> None:
    """Write the inputs of each row whose ``order`` has ``ON_DEVICE``: row ``i`` of a request is
    ``i`` positions behind the last of its tokens, and its token is draft ``i``, from 1 on.

    Args:
        lengths: [max_num_seqs] int32, the number of tokens of each slot.
        drafts: [most, max_num_seqs] int32, the drafts of each slot; -1 from the first that it has
            not.
        slots: [num_seqs] int32.
        tables: [num_seqs, groups, max_blocks] int32, the block tables.
        order: [num_seqs] int32, see ``config.ORDER``; written without ``ON_DEVICE``, and
            ``NO_DRAFT`` where there is none.
        input_ids: [num_seqs] int32, written in rows of drafts; 0 where there is none.
        positions, seq_lens: [num_seqs] int32, written: the row's position, and one more.
        mappings: [groups, num_seqs] int32, written but where it is ``NO_SLOT``: where each group
            stores K and V.
    """
    number = order - ON_DEVICE
    moves = number >= 0
    of, number = slots.long(), number.clamp(min=0).long()
    place = lengths[of] - 1 + number
    draft = drafts[(number - 1).clamp(min=0), of]
    is_draft = moves & (number > 0)
    input_ids.copy_(torch.where(is_draft, draft.clamp(min=0), input_ids))
    positions.copy_(torch.where(moves, place, positions))
    seq_lens.copy_(torch.where(moves, place + 1, seq_lens))
    block = (place // block_size).clamp(0, tables.shape[2] - 1)
    rows = torch.arange(slots.shape[0], device=slots.device)
    stored = tables[rows, :, block].T * block_size + place % block_size
    mappings.copy_(torch.where(moves & (mappings != NO_SLOT), stored, mappings))
    placed = torch.where(is_draft & (draft < 0), NO_DRAFT, number)
    order.copy_(torch.where(moves, placed, order))


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    def ints(low: int, high: int, *shape: int) -> Tensor:
        return draw.integers(low, high, *shape).to(torch.int32)

    for num_seqs, max_num_seqs, most, groups, max_blocks in [
        (1, 1, 1, 1, 4),
        (7, 5, 4, 1, 9),
        (300, 200, 3, 2, 33),
    ]:
        drafts = ints(0, 99, most, max_num_seqs)
        drafts[:, ints(0, 3, max_num_seqs) == 0] = -1
        order = ints(-1, most + 1, num_seqs)
        order = torch.where((ints(0, 4, num_seqs) > 0) & (order >= 0), order + ON_DEVICE, order)
        order[0] = most + ON_DEVICE
        mappings = ints(-1, 50, groups, num_seqs + 2)[:, :num_seqs]
        mappings[:, 0] = 0
        yield Case(
            f"{num_seqs} rows, {groups} groups, {max_blocks} blocks",
            (
                ints(1, 16 * max_blocks - most, max_num_seqs),
                drafts,
                ints(0, max_num_seqs, num_seqs),
                ints(0, 50, groups, num_seqs, max_blocks).transpose(0, 1),
                16,
                order.to(torch.int32),
                ints(0, 9, num_seqs),
                ints(0, 9, num_seqs),
                ints(0, 9, num_seqs),
                mappings,
            ),
        )


def _cost(desc: OpDesc) -> Cost:
    return Cost(bytes=8 * desc["slots"].nbytes, flops=0)


OP = SemanticOp(
    reference=place_rows,
    fake=nothing,
    cases=_cases,
    cost=_cost,
    mutates=("order", "input_ids", "positions", "seq_lens", "mappings"),
    dtypes=(torch.int32,),
    implementations=(
        triton(tokens.place_rows),
        Implementation("native", place_rows),
    ),
)
