"""Counts the tokens of the thinking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from .forms import IdsOf
from .marks import Marks, Opening
from .thought_reader import first_of

_START_TOKENS = 64
"""Tokens within which a start mark ends, at the beginning of an output."""
Decode = Callable[[Sequence[int]], str]
"""The text of token ids, special tokens shown."""


def num_thoughts(
    token_ids: Sequence[int], marks: Marks, opening: Opening, ids_of: IdsOf, decode: Decode
) -> int:
    """Number of tokens of an output's thinking, without its marks.

    Where an end mark is no token of its own, the token with its first character counts as the
    mark's.
    """
    if opening is Opening.CLOSED:
        return 0
    begin = _num_started(token_ids[:_START_TOKENS], marks.starts, decode)
    if begin == 0 and opening is Opening.FREE:
        return 0
    for end in marks.ends:
        if len(ids := ids_of(end)) == 1:
            # One call for all tokens: there may be many thousands.
            with suppress(ValueError):
                return [*token_ids].index(ids[0], begin) - begin
    return _num_before(token_ids[begin:], marks.ends, decode)


def _num_started(token_ids: Sequence[int], starts: Sequence[str], decode: Decode) -> int:
    """Number of tokens of a start mark and the white space before it; 0 if there is none."""
    if not decode(token_ids).lstrip().startswith(tuple(starts)):
        return 0
    for number in range(1, len(token_ids) + 1):
        if decode(token_ids[:number]).lstrip().startswith(tuple(starts)):
            return number
    return 0


def _num_before(token_ids: Sequence[int], ends: Sequence[str], decode: Decode) -> int:
    """Number of tokens before an end mark of several tokens."""
    text = decode(token_ids)
    place, mark = first_of(text, ends)
    if not mark:
        return len(token_ids)
    low, high = 0, len(token_ids)
    while low < high:  # the most tokens whose text ends before the mark
        middle = (low + high + 1) // 2
        if len(decode(token_ids[:middle])) <= place:
            low = middle
        else:
            high = middle - 1
    return low
