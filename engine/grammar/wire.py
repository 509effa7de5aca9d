"""What a helper process is told and answers.  A frame is four bytes of length, then msgpack."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from msgspec import Struct

RECYCLED = 75
"""Exit code of a helper that ended itself: what was asked is to be asked again."""
BYTES = "byte"
"""Stands for a tokenizer's file where a grammar is tried without a model: tokens are bytes."""
UP = 0
"""Number of the job whose answer says that the helper has started."""
_LENGTH = 4


class Setup(Struct, frozen=True):
    """What a helper is started with.

    Attributes:
        tokenizer_file: ``tokenizer.json``.
        vocab_size: columns of the logits.
        eos_token_ids: ids that end an output.
        limit_s: most processor time of one job, in seconds.
        most_bytes: most memory that all grammars may take, in bytes.
        num_rows: masks that the shared memory holds, one an output.
    """

    tokenizer_file: str
    vocab_size: int
    eos_token_ids: list[int]
    limit_s: float = 5.0
    most_bytes: int = 2 << 30
    num_rows: int = 0

    @property
    def num_words(self) -> int:
        """32-bit words of a mask."""
        return -(-self.vocab_size // 32)


class Compile(Struct, frozen=True, tag=0, array_like=True):
    """Compile a grammar; the answer has the mask of the first token."""

    job: int
    grammar: int
    text: str


class Ask(Struct, frozen=True, tag=1, array_like=True):
    """Go on behind ``tokens`` with an output that has ``num_before``, and put the mask of the next
    token into a row of the shared memory, or into the answer if the row is -1.

    Up to ``most_drafts`` tokens ahead may be drafts: those that the grammar forces, or else the
    first of ``drafts`` that it permits."""

    job: int
    output: int
    grammar: int
    num_before: int
    tokens: list[int]
    row: int
    drafts: list[int] = []
    most_drafts: int = 0


class Drop(Struct, frozen=True, tag=2, array_like=True):
    """Outputs that have ended."""

    outputs: list[int]


class Answer(Struct, frozen=True, array_like=True):
    """The outcome of a job.

    Attributes:
        error: why it has none, or "".
        mask: for ``Compile``, the mask of the first token; for ``Ask``, see there.
        is_slow: masks of this grammar have taken long lately.
        is_lost: the helper does not have the grammar or the output: compile, and ask with all
            tokens.
        drafts: tokens that may follow each other.
        draft_masks: the mask behind each of them, one behind the other.
    """

    job: int
    error: str = ""
    mask: bytes = b""
    is_slow: bool = False
    is_lost: bool = False
    drafts: list[int] = []
    draft_masks: bytes = b""


Message: TypeAlias = Compile | Ask | Drop


def framed(message: Message | Answer) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(_LENGTH, "little") + body


def bodies(data: bytearray) -> list[bytes]:
    """Take the bodies of all frames that are complete from the beginning of ``data``."""
    complete, start = [], 0
    while len(data) >= (begin := start + _LENGTH):
        end = begin + int.from_bytes(data[start:begin], "little")
        if len(data) < end:
            break
        complete.append(bytes(data[begin:end]))
        start = end
    del data[:start]
    return complete
