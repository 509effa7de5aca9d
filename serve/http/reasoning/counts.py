"""Counts the tokens of the thinking."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .forms import IdsOf
from .parsers import Marks, Opening
from .thought_reader import first_of

_MOST_BLANKS = 4
"""Tokens of white space that may stand before a start mark."""
Decode = Callable[[Sequence[int]], str]
"""The text of token ids, special tokens shown."""


def num_thoughts(
    token_ids: Sequence[int], marks: Marks, opening: Opening, ids_of: IdsOf, decode: Decode
) -> int:
    """Number of tokens of an output's thinking, without its marks.

    Where the end mark is no token of its own, the token with the mark's first character counts as
    the mark's.
    """
    starts = [ids_of(start) for start in marks.starts]
    begins = [
        at + len(start)
        for start in starts
        for at in range(_MOST_BLANKS)
        if list(token_ids[at : at + len(start)]) == start
    ]
    if opening is Opening.CLOSED or (opening is Opening.FREE and not begins):
        return 0
    begin = min(begins, default=0)
    for end in marks.ends:
        if len(ids := ids_of(end)) == 1:
            # One call for all tokens: there may be many thousands.
            try:
                return [*token_ids].index(ids[0], begin) - begin
            except ValueError:
                return len(token_ids) - begin
    return _num_before(token_ids[begin:], marks.ends, decode)


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
