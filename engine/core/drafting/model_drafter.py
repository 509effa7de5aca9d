"""``ModelDrafter`` drafts with a smaller model, whose KV cache lies under the target's block ids.

The model sees no step of the target.  When it is asked, it first reads the tokens that it has not
seen (a prompt, what was accepted, what was generated without drafts), and then samples drafts one
by one, each a pass of one row a request.  It takes nothing on trust: which blocks hold its keys is
known by the keys of their content, and what was drafted beyond the accepted tokens is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....config import NO_SLOT
from ...messages.draft_run import DraftRun
from ...messages.step import Batch
from ..batch import unsent_blocks
from ..kv_blocks import SequenceBlocks
from ..request import Request


@dataclass
class _Seen:
    """What the draft model has stored of a request.

    Attributes:
        blocks: the request's; others stand for a request that was preempted.
        num_tokens: its first tokens whose keys and values are stored.
        num_known: tokens that were known when it last drafted; 0: all that is stored is right.
        num_marked: leading blocks that ``_filled`` was told of.
    """

    blocks: SequenceBlocks
    num_tokens: int
    num_known: int = 0
    num_marked: int = 0


class ModelDrafter:
    """Drafts by passes of a draft model.

    Who has more to read than a batch holds does so in several steps, and has no drafts meanwhile.
    """

    method = "draft_model"
    stores_drafts = True

    def __init__(self, model: DraftRun) -> None:
        self._run, self._group, self._block_size = model.run, model.group, model.block_size
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
        if (epoch := self._epoch_now()) != self._epoch:  # nothing that was stored is there any more
            self._seen.clear()
            self._filled.clear()
            self._epoch = epoch
        budget, behind, ready = self._max_tokens, list[tuple[Request, int, int]](), list[Request]()
        for request in requests:
            room = self._room(request)
            if request.blocks.num_sent == 0 or room < 1:
                continue  # the worker has not been told of it, or it is too long
            seen, last = self._seen_of(request), request.num_known_tokens - 1
            end = min(last, seen.num_tokens + budget)
            if end > seen.num_tokens:
                behind.append((request, seen.num_tokens, end))
                budget -= end - seen.num_tokens
            if end == last:
                ready.append(request)
        rooms = [min(self._room(request), most) for request in ready]
        passes = _reading(behind) + _drafting(ready, rooms)
        if not passes:
            return [[] for _ in requests]
        self._note(behind, ready, rooms)
        tokens = [each.tolist() for each in self._run(passes)]
        drafts = _by_request(ready, rooms, tokens[len(passes) - max(rooms, default=0) :])
        return [drafts.get(request.request_id, []) for request in requests]

    def settle(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        seen = self._seen.get(request.request_id)
        if seen is not None and seen.num_known:
            seen.num_tokens = min(seen.num_tokens, seen.num_known + num_accepted)
            seen.num_known = 0

    def forget(self, request: Request) -> None:
        self._seen.pop(request.request_id, None)

    def _room(self, request: Request) -> int:
        """Most drafts that have a place: each but the last is stored where it follows."""
        known = request.num_known_tokens
        return min(request.blocks.num_slots, self._max_model_len) - known + 1

    def _seen_of(self, request: Request) -> _Seen:
        """What is stored of a request: of what was drafted, no more than turned out right."""
        seen = self._seen.get(request.request_id)
        table, last = request.blocks.tables[self._group], request.num_known_tokens - 1
        if seen is None or seen.blocks is not request.blocks:
            count = 0
            for block, key in zip(table, request.block_keys, strict=False):
                if self._filled.get(block) != key:
                    break
                count += 1
            tokens = min(count * self._block_size, last)
            seen = _Seen(request.blocks, tokens, num_marked=tokens // self._block_size)
            self._seen[request.request_id] = seen
        if seen.num_known:  # what became of the drafts was not told
            seen.num_tokens = min(seen.num_tokens, seen.num_known)
            seen.num_known = 0
        seen.num_tokens = min(seen.num_tokens, last)
        full = min(seen.num_tokens // self._block_size, len(request.block_keys))
        for number in range(seen.num_marked, full):
            self._filled[table[number]] = request.block_keys[number]
        seen.num_marked = max(seen.num_marked, full)
        return seen

    def _note(
        self, behind: list[tuple[Request, int, int]], ready: list[Request], rooms: list[int]
    ) -> None:
        """Note what passes are about to store."""
        writes = [*behind]
        for request, room in zip(ready, rooms, strict=True):
            last = request.num_known_tokens - 1
            writes.append((request, last, last + room))
        for request, start, end in writes:
            seen = self._seen[request.request_id]
            first = start // self._block_size
            seen.num_tokens, seen.num_marked = end, min(seen.num_marked, first)
            for block in request.blocks.tables[self._group][first : -(-end // self._block_size)]:
                self._filled.pop(block, None)
        for request in ready:
            self._seen[request.request_id].num_known = request.num_known_tokens


def _reading(behind: list[tuple[Request, int, int]]) -> list[Batch]:
    """The pass that reads tokens from a first to an end, which are known; none if there are none.
    Rows of one token come first."""
    if not behind:
        return []
    behind = sorted(behind, key=lambda entry: entry[2] - entry[1])
    requests = [request for request, _, _ in behind]
    input_ids = [token for request, start, end in behind for token in request.tokens(start, end)]
    lens = [end - start for _, start, end in behind]
    return [
        _batch(
            requests,
            starts=[start for _, start, _ in behind],
            query_lens=lens,
            samples=0,
            input_ids=input_ids,
            feed_slots=[NO_SLOT] * len(input_ids),
            query_len=lens[0] if lens[0] == lens[-1] else 0,
        )
    ]


def _drafting(ready: list[Request], rooms: list[int]) -> list[Batch]:
    """A pass for each draft, of the requests that have room for it.  The first takes the last token
    that is known, and the others what the pass before has sampled."""
    passes = []
    for number in range(max(rooms, default=0)):
        requests = [each for each, room in zip(ready, rooms, strict=True) if room > number]
        lasts = [each.num_known_tokens - 1 for each in requests]
        slots = [each.slot for each in requests]
        known = [each.tokens(last, last + 1)[0] for each, last in zip(requests, lasts, strict=True)]
        passes.append(
            _batch(
                requests,
                starts=[last + number for last in lasts],
                query_lens=[1] * len(requests),
                samples=1,
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
    samples: int,
    input_ids: list[int],
    feed_slots: list[int],
    query_len: int,
) -> Batch:
    """A batch of the draft model."""
    return Batch(
        slots=np.array([each.slot for each in requests], np.int32),
        starts=np.array(starts, np.int32),
        query_lens=np.array(query_lens, np.int32),
        num_sampled=np.full(len(requests), samples, np.int32),
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
