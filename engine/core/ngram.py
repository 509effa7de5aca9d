"""``NgramDrafter`` guesses that a sequence goes on as it did behind the same tokens before.

That is prompt lookup decoding (Saxena, 2023): summaries, edits and code repeat their prompt.  The
index of a sequence grows with it, so that a step costs as much as it has new tokens, however long
the sequence is.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...config.step_fields import MOST_LOOKS
from .request import Request

_MOST_NEW = 4096
"""Tokens of a request that are indexed at once: of a longer prompt the rest follows in later steps,
so that nobody waits for it."""


class _Index:
    """The places of all n-grams of ``length`` tokens in a growing sequence.

    ``tokens``: all that is indexed.  ``latest``: n-gram -> the position behind its last place.
    ``before[p - length]``: the position behind the place before that which ends at ``p``, or 0.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self.tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}
        self._before: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        known, length, latest = self.tokens, self._length, self._latest
        first = max(length, len(known) + 1)
        known += tokens
        begin = known[first - length :]
        grams = zip(*(begin[i:] for i in range(length)), strict=False)
        for end, gram in enumerate(grams, first):
            self._before.append(latest.get(gram, 0))
            latest[gram] = end

    def place(self, longest: int) -> int:
        """The position behind an earlier place of the last tokens: of as many as there are, up to
        ``longest``, and the latest of these.  0: there is none."""
        tokens, length = self.tokens, self._length
        end = len(tokens)
        if end <= length:
            return 0
        best, most, at = 0, length - 1, self._before[end - length]
        for _ in range(MOST_LOOKS):
            if not at:
                break
            count = length
            limit = min(longest, at)
            while count < limit and tokens[at - 1 - count] == tokens[end - 1 - count]:
                count += 1
            if count > most:
                best, most = at, count
                if count == longest:
                    break
            at = self._before[at - length]
        return best


class NgramDrafter:
    """Drafts what followed the longest run of ``shortest`` to ``longest`` last tokens."""

    is_quick, stores_drafts = True, False

    def __init__(self, longest: int, shortest: int, method: str = "ngram") -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"{shortest=}, {longest=}: expected 1 <= shortest <= longest")
        self._longest, self._shortest, self.method = longest, shortest, method
        self._indices: dict[str, _Index] = {}

    def wants(self, request: Request) -> bool:
        return self._place(request, self._index(request)) > 0

    def propose(self, requests: Sequence[Request], most: int) -> list[list[int]]:
        return [self._continue(request, most) for request in requests]

    def settle(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        pass

    def forget(self, request: Request) -> None:
        self._indices.pop(request.request_id, None)

    def _index(self, request: Request) -> _Index:
        """The index of what is known of a request, or of the beginning of that."""
        index = self._indices.get(request.request_id)
        if index is None:
            index = self._indices[request.request_id] = _Index(self._shortest)
        start, end = len(index.tokens), request.num_known_tokens
        if start < end:
            index.extend(request.tokens(start, min(end, start + _MOST_NEW)))
        return index

    def _place(self, request: Request, index: _Index) -> int:
        """``_Index.place``; 0 while the index is not complete."""
        if len(index.tokens) < request.num_known_tokens:
            return 0
        return index.place(self._longest)

    def _continue(self, request: Request, most: int) -> list[int]:
        index = self._index(request)
        at, tokens = self._place(request, index), index.tokens
        if not at:
            return []
        drafts = tokens[at : at + most]
        period = len(tokens) - at
        while len(drafts) < most:  # what repeats itself goes on repeating itself
            drafts.append(drafts[len(drafts) - period])
        return drafts
