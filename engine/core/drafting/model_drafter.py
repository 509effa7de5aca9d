"""``ModelDrafter`` drafts with a smaller model or a head, whose KV cache lies under the target's
block ids.

Behind each step of the target come passes (``plan``) that wait for no token of it.  The first reads
what the step has computed of prompts, and whatever else the host knows and the model has not seen;
the next reads what the step has sampled, and drafts; the others draft on.  So a request that is
read up to a step is read up to the next, and its drafts lie on the device before that begins.

A request whose tokens the host must see has drafts of the host (``propose``): the model reads what
it has not seen, samples drafts one by one, each a pass of one row a request, and the host waits.

Nothing is taken on trust: which blocks hold its keys is known by the keys of their content, and
what was drafted beyond the accepted tokens is forgotten.

A head reads tokens with the hidden states that they follow: its row of a token is at the position
of the token before (``_behind``).  What it stored of drafts followed its own states, so accepted
ones are read again.  The last row of a block is of the first token of the next, which the block's
key does not cover, and is read again too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....config import NO_SLOT
from ...messages.draft_run import DraftRun
from ...messages.step import Batch, DraftPasses
from ..batch import unsent_blocks
from ..kv_blocks import SequenceBlocks
from ..request import Request
from .parts import Part
from .passes import drafting_rows, fresh_rows

_NEVER = 1 << 62
"""More tokens than any request has room for."""


@dataclass
class _Seen:
    """What the draft model has stored of a request.

    Attributes:
        blocks: the request's; others stand for a request that was preempted.
        num_tokens: its first tokens whose keys and values are stored.
        num_known: tokens that were known when it last drafted; 0: all that is stored is right.
        num_marked: leading blocks that ``_filled`` was told of.
        follows: what the last step computed is read behind it, whatever its tokens are; then all
            that is known is stored.
        num_made: drafts that the passes behind the last step make.
    """

    blocks: SequenceBlocks
    num_tokens: int
    num_known: int = 0
    num_marked: int = 0
    follows: bool = False
    num_made: int = 0


@dataclass(frozen=True)
class _Entry:
    """The rows of a request, from a first to an end, that a pass reads; ``is_ready``: up to the
    last token that is known, so that a draft follows."""

    request: Request
    start: int
    end: int
    is_ready: bool


class ModelDrafter:
    """Drafts by passes of a draft model.

    Who has more to read than a batch holds does so in several steps, and has no drafts meanwhile.
    """

    stores_drafts = True

    def __init__(self, model: DraftRun, method: str = "draft_model") -> None:
        self.method = method
        self._behind = int(model.reads_hidden)
        """How far a token's row is behind its position."""
        self._joins = self._behind
        """1: the pass that reads tokens makes the first draft too.  Of a head that is the next
        step's every token; a model mostly has one row, which a graph of decodes serves."""
        self._run, self._group, self._block_size = model.run, model.group, model.block_size
        self._failure = model.failure
        self._epoch_now, self._epoch = model.epoch, model.epoch()
        self._max_model_len, self._max_tokens = model.max_model_len, model.max_tokens
        self._seen: dict[str, _Seen] = {}
        self._filled: dict[int, bytes] = {}
        """Block id -> the key of the content that the draft model has stored there."""

    def wants(self, request: Request) -> bool:
        return request.num_tokens < self._max_model_len

    def propose(self, requests: Sequence[Request], most: int) -> list[list[int]]:
        """Drafts for each request.

        Raises:
            Exception: whatever the model raised.
        """
        self._renew()
        budget, entries, ready = self._max_tokens, list[_Entry](), list[Request]()
        for request in requests:
            room = self._room(request)
            last = self._last(request)
            if request.blocks.num_sent == 0 or room < 1 or last < 0:
                continue  # the worker has not been told of it, or it is too long or too short
            seen = self._seen_of(request)
            wanted = last + self._joins
            end = min(wanted, seen.num_tokens + budget)
            if end > seen.num_tokens:
                entries.append(_Entry(request, seen.num_tokens, end, end == wanted))
                budget -= end - seen.num_tokens
            elif end == wanted:
                ready.append(request)
        entries.sort(key=lambda entry: entry.end - entry.start)
        ready[:0] = [entry.request for entry in entries if entry.is_ready]
        rooms = [min(self._room(request), most) for request in ready]
        passes = [self._reading(entries)] if entries else []
        passes += self._drafting(ready, rooms)
        if not passes:
            return [[] for _ in requests]
        self._note(entries, ready, rooms)
        tokens = [each.tolist() for each in self._run(passes)]
        if self._joins and ready:
            rows = zip(tokens[0], entries, strict=True)
            tokens[0] = [token for token, entry in rows if entry.is_ready]
        drafts = _by_request(ready, rooms, tokens[len(passes) - max(rooms, default=0) :])
        return [drafts.get(request.request_id, []) for request in requests]

    def follows(self, request: Request) -> bool:
        """Whether passes behind the steps in flight read all that these compute of a request."""
        seen = self._seen.get(request.request_id)
        return seen is not None and seen.follows and seen.blocks is request.blocks

    def num_made(self, request: Request) -> int:
        """Drafts that the device has for the next step of a request."""
        seen = self._seen.get(request.request_id)
        return seen.num_made if seen is not None and seen.blocks is request.blocks else 0

    def needs(self, request: Request, depth: int) -> int:
        """``reach`` of a request that waits for what is in flight, behind the step that comes
        then."""
        return self._within(request.num_tokens - self._behind + depth)

    def reach(self, part: Part, depth: int) -> int:
        """Tokens that a request must have room for, so that it may have ``depth`` drafts behind a
        step if all that it tries are right; more than it may ever have, if that is too many."""
        return self._within(part.end - self._behind + part.num_ahead + depth)

    def _within(self, num_tokens: int) -> int:
        return num_tokens if num_tokens <= self._max_model_len else _NEVER

    def plan(self, parts: Sequence[Part], depth: int) -> DraftPasses | None:
        """The passes behind a step that computes ``parts``, each of another request; ``depth``
        drafts for each that has room for them.

        Raises:
            RuntimeError: the passes behind an earlier step have failed.
        """
        if failure := self._failure():
            raise RuntimeError(failure)
        self._renew()
        reading, drafting = list[_Entry](), list[Part]()
        budget = self._max_tokens
        for part in parts:
            request = part.request
            first, last = part.end - self._behind, self.reach(part, depth)
            has_room = not part.samples or last <= request.blocks.num_slots
            is_wanted = part.is_wanted and depth > 0 and last < _NEVER and has_room
            is_followed = self.follows(request)
            if not (is_wanted or is_followed):
                continue  # it may have drafts of the host, of which ``settle`` will tell
            seen = self._known_of(request) if is_followed else self._seen_of(request)
            if is_wanted and not seen.follows:
                end = min(part.end, request.num_known_tokens - self._behind)
                end = min(end, seen.num_tokens + budget)
                if end > seen.num_tokens:
                    reading.append(_Entry(request, seen.num_tokens, end, False))
                    budget -= end - seen.num_tokens
                    self._write(request, seen.num_tokens, end)
                seen.follows = seen.num_tokens == first
            seen.follows &= is_wanted and part.samples
            seen.num_made = depth if seen.follows else 0
            if seen.follows:
                drafting.append(part)
                num_tokens = seen.num_tokens
                self._write(request, first, last)
                seen.num_tokens = num_tokens
        reading.sort(key=lambda entry: entry.end - entry.start)
        if not reading and not drafting:
            return None
        return DraftPasses(
            depth,
            reading=self._reading(reading) if reading else None,
            fresh=fresh_rows(drafting, self._behind) if drafting else None,
            drafting=drafting_rows(drafting, self._behind, depth) if drafting else None,
        )

    def settle(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        seen = self._seen.get(request.request_id)
        if seen is not None and seen.num_known:
            accepted = 0 if self._behind else num_accepted
            seen.num_tokens = min(seen.num_tokens, seen.num_known - self._behind + accepted)
            seen.num_known = 0

    def forget(self, request: Request) -> None:
        self._seen.pop(request.request_id, None)

    def _last(self, request: Request) -> int:
        """The position of the row of the last token that is known."""
        return request.num_known_tokens - 1 - self._behind

    def _room(self, request: Request) -> int:
        """Most drafts that have a place: each but the last is stored where it follows."""
        known = request.num_known_tokens
        return min(request.blocks.num_slots, self._max_model_len) - known + 1

    def _renew(self) -> None:
        """Forget all if nothing that was stored is there any more."""
        if (epoch := self._epoch_now()) != self._epoch:
            self._seen.clear()
            self._filled.clear()
            self._epoch = epoch

    def _known_of(self, request: Request) -> _Seen:
        """Note that all known tokens of a followed request are stored; returns the note."""
        seen = self._seen[request.request_id]
        seen.num_tokens = request.num_known_tokens - self._behind
        self._mark(request, seen)
        return seen

    def _mark(self, request: Request, seen: _Seen) -> None:
        """Note which blocks are full of what their keys say."""
        full = min(seen.num_tokens // self._block_size, len(request.block_keys))
        table = request.blocks.tables[self._group]
        for number in range(seen.num_marked, full):
            self._filled[table[number]] = request.block_keys[number]
        seen.num_marked = max(seen.num_marked, full)

    def _write(self, request: Request, start: int, end: int) -> None:
        """Note that rows from ``start`` to ``end`` are about to be stored."""
        seen, first = self._seen[request.request_id], start // self._block_size
        seen.num_tokens, seen.num_marked = end, min(seen.num_marked, first)
        for block in request.blocks.tables[self._group][first : -(-end // self._block_size)]:
            self._filled.pop(block, None)

    def _seen_of(self, request: Request) -> _Seen:
        """What is stored of a request: of what was drafted, no more than turned out right."""
        seen = self._seen.get(request.request_id)
        table, last = request.blocks.tables[self._group], self._last(request)
        if seen is None or seen.blocks is not request.blocks:
            count = 0
            for block, key in zip(table, request.block_keys, strict=False):
                if self._filled.get(block) != key:
                    break
                count += 1
            tokens = max(min(count * self._block_size - self._behind, last), 0)
            seen = _Seen(request.blocks, tokens, num_marked=tokens // self._block_size)
            self._seen[request.request_id] = seen
        if seen.num_known:  # what became of the drafts was not told
            seen.num_tokens = min(seen.num_tokens, seen.num_known - self._behind)
            seen.num_known = 0
        seen.num_tokens = max(min(seen.num_tokens, last), 0)
        self._mark(request, seen)
        return seen

    def _note(self, entries: list[_Entry], ready: list[Request], rooms: list[int]) -> None:
        """Note what passes are about to store."""
        writes = [(entry.request, entry.start, entry.end) for entry in entries]
        for request, room in zip(ready, rooms, strict=True):
            last = self._last(request)
            writes.append((request, last, last + room))
        for request, start, end in writes:
            self._write(request, start, end)
        for request in ready:
            self._seen[request.request_id].num_known = request.num_known_tokens

    def _reading(self, entries: list[_Entry]) -> Batch:
        """The pass that reads tokens that are known.  Rows of one token come first."""
        lens = [entry.end - entry.start for entry in entries]
        input_ids = [
            token
            for each in entries
            for token in each.request.tokens(each.start + self._behind, each.end + self._behind)
        ]
        return _batch(
            [entry.request for entry in entries],
            starts=[entry.start for entry in entries],
            query_lens=lens,
            samples=[int(entry.is_ready) * self._joins for entry in entries],
            input_ids=input_ids,
            feed_slots=[NO_SLOT] * len(input_ids),
            query_len=lens[0] if lens[0] == lens[-1] else 0,
        )

    def _drafting(self, ready: list[Request], rooms: list[int]) -> list[Batch]:
        """A pass for each draft that no other makes, of the requests that have room for it.  The
        first takes the last token that is known, and the others what the pass before sampled."""
        passes = []
        for number in range(self._joins, max(rooms, default=0)):
            requests = [each for each, room in zip(ready, rooms, strict=True) if room > number]
            known = [
                each.tokens(each.num_known_tokens - 1, each.num_known_tokens)[0]
                for each in requests
            ]
            slots = [each.slot for each in requests]
            passes.append(
                _batch(
                    requests,
                    starts=[self._last(each) + number for each in requests],
                    query_lens=[1] * len(requests),
                    samples=[1] * len(requests),
                    input_ids=[0] * len(requests) if number else known,
                    feed_slots=slots if number else [NO_SLOT] * len(requests),
                    query_len=1,
                )
            )
        return passes


def _batch(
    requests: list[Request],
    *,
    starts: list[int],
    query_lens: list[int],
    samples: list[int],
    input_ids: list[int],
    feed_slots: list[int],
    query_len: int,
) -> Batch:
    """A batch of the draft model."""
    return Batch(
        slots=np.array([each.slot for each in requests], np.int32),
        starts=np.array(starts, np.int32),
        query_lens=np.array(query_lens, np.int32),
        num_sampled=np.array(samples, np.int32),
        input_ids=np.array(input_ids, np.int32),
        feed_slots=np.array(feed_slots, np.int32),
        new=[],
        block_tables=unsent_blocks(requests),
        query_len=query_len,
    )


def _by_request(
    ready: list[Request], rooms: list[int], tokens: list[list[int]]
) -> dict[str, list[int]]:
    """The drafts of each request, up to the first that is none: its logits gave no token."""
    drafts: dict[str, list[int]] = {each.request_id: [] for each in ready}
    for number, sampled in enumerate(tokens):
        names = [each.request_id for each, room in zip(ready, rooms, strict=True) if room > number]
        for name, token in zip(names, sampled, strict=True):
            if len(drafts[name]) == number and token >= 0:
                drafts[name].append(token)
    return drafts
