"""``step_schema`` declares what a step takes from the host, once; ``STEP`` is that of models whose
layers are one group.

The host's packed memory, the device's static inputs, the kernel that unpacks one into the other,
the example that is traced and the inputs that a bisection makes all derive from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property


class Per(StrEnum):
    """The things of which a field has one value each.  ``BOUNDARY`` are the ends of the sequences,
    with a leading zero; ``TABLE`` is each KV block of each sequence."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    BOUNDARY = "boundary"
    TABLE = "table"

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of a field's dimensions, as programs have them."""
        return _DIMS[self]


_DIMS = {
    Per.TOKEN: ("num_tokens",),
    Per.SEQUENCE: ("num_seqs",),
    Per.BOUNDARY: ("num_seqs_plus_1",),
    Per.TABLE: ("num_seqs", "max_blocks"),
}


@dataclass(frozen=True)
class StepField:
    """One input of a step.

    Attributes:
        dtype: "int32" or "float32"; the host sends words of four bytes.
        padding: the value of tokens and rows that only pad a step to a captured size.
        program: whether the compiled program reads it, or only what runs beside the program.
    """

    name: str
    per: Per
    dtype: str = "int32"
    padding: int = 0
    program: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in ("int32", "float32"):
            raise ValueError(f"step field {self.name}: dtype {self.dtype}, expected int32, float32")


@dataclass(frozen=True)
class StepSchema:
    """The fields of a step.  In packed memory, those of tokens come first, of which ``TOKEN_IDS``
    is the first and ``FEED`` the last, then those of rows (sequences and boundaries, both with a
    word for each boundary), then the filled columns of the tables, row by row."""

    fields: tuple[StepField, ...]

    def _of(self, *kinds: Per) -> tuple[StepField, ...]:
        return tuple(field for field in self.fields if field.per in kinds)

    @cached_property
    def tokens(self) -> tuple[StepField, ...]:
        ends = {TOKEN_IDS: -1, FEED: 1}
        return tuple(sorted(self._of(Per.TOKEN), key=lambda field: ends.get(field.name, 0)))

    @cached_property
    def rows(self) -> tuple[StepField, ...]:
        return self._of(Per.SEQUENCE, Per.BOUNDARY)

    @cached_property
    def tables(self) -> tuple[StepField, ...]:
        return self._of(Per.TABLE)

    @cached_property
    def program(self) -> tuple[StepField, ...]:
        return tuple(field for field in self.fields if field.program)

    def packed_size(self, num_tokens: int, num_seqs: int, columns: int) -> int:
        """Number of words of a packed step whose tables have ``columns`` filled columns."""
        rows = len(self.rows) * (num_seqs + 1)
        return len(self.tokens) * num_tokens + rows + len(self.tables) * num_seqs * columns


NO_SLOT = -1
TOKEN_IDS = "input_ids"
HIDDEN = "hidden_states"
"""What a later pipeline stage reads in place of token ids: a row a token, which no host sends."""
FEED = "feed_slots"
"""The slot whose newest sampled token, on the device alone, is the token's id; or ``NO_SLOT``."""

FED_SLOTS = "fed_slots"
"""A draft head keeps the hidden state of each sequence in this slot.  The last one belongs to no
sequence, so that there are as many as ends of sequences."""


ORDER = "order"
"""The number of a row among those of its request that sample in the step: 0 for the first, 1 for
the row of its first draft.  ``NO_SAMPLE``: a row that samples nothing; ``NO_DRAFT``: a row where
no draft is there; ``ON_DEVICE`` is added where the device alone knows position and draft."""
NO_SAMPLE, NO_DRAFT, ON_DEVICE = -1, -2, 1 << 16
REJECTED, NOT_DRAFTED = -3, -4
"""In place of the token of a row behind a wrong draft, and of a row whose draft is not there."""
MOST_DRAFTS = 64
"""Most drafts of a request in a step."""
MOST_LOOKS = 16
"""Earlier places of the last tokens that ``ngram`` compares, the latest first."""


def slot_mapping_of(group: int) -> str:
    """The field that says where a group's layers store each token of the step."""
    return f"slot_mapping/{group}" if group else "slot_mapping"


def block_table_of(group: int) -> str:
    """The field with the block ids of each sequence in a group."""
    return f"block_table/{group}" if group else "block_table"


def step_schema(num_groups: int, *, is_head: bool = False) -> StepSchema:
    """The fields of a step of a model whose layers make ``num_groups`` groups of KV caches.

    Args:
        is_head: the model is a draft head, which keeps a state for each slot.
    """
    groups = range(num_groups)
    return StepSchema(
        (
            StepField(TOKEN_IDS, Per.TOKEN),
            StepField("positions", Per.TOKEN),
            *(StepField(slot_mapping_of(group), Per.TOKEN, padding=NO_SLOT) for group in groups),
            StepField(FEED, Per.TOKEN, padding=NO_SLOT, program=False),
            StepField("seq_lens", Per.SEQUENCE),
            StepField("slots", Per.SEQUENCE, program=False),
            StepField(ORDER, Per.SEQUENCE, padding=NO_SAMPLE, program=False),
            StepField("query_start_loc", Per.BOUNDARY),
            *([StepField(FED_SLOTS, Per.BOUNDARY, padding=NO_SLOT)] if is_head else []),
            *(StepField(block_table_of(group), Per.TABLE) for group in groups),
        )
    )


STEP = step_schema(1)
