"""Turns what the scheduler chose into the ``Batch`` that a worker gets."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from ...config import NO_SLOT
from ..messages.step import NO_TARGET, Batch, BlockTableUpdate, Ints, NewSequence
from .masks import only, permitted
from .prefix_cache import salt_of
from .request import Request

NO_DRAFT, ON_DEVICE = -1, -2
IN_PLACE = -1


class ScheduledRequest(Struct):
    """The part of one request that one step computes.

    Positions ``start`` to ``start + num_tokens`` of the request are the query tokens.
    ``num_sampled`` is 1 if a token is sampled after the last of them, and 0 where more of the
    request's tokens follow.  ``target`` is then the next token of the prompt, if its log
    probability is asked for.  ``draft`` is the guessed token at ``start`` of a row behind others of
    its request, whose samples show whether it is right; ``ON_DEVICE`` if the host does not know it.
    ``ahead``: as many drafts are in flight that the row may be so many positions behind ``start``;
    the device knows by how many.  ``IN_PLACE``: it is at ``start``.
    """

    request: Request
    start: int
    num_tokens: int
    num_sampled: int
    target: int = NO_TARGET
    draft: int = NO_DRAFT
    ahead: int = IN_PLACE


class Drafted(Struct):
    """The ``num_drafts`` drafts of a request that a step tries; it might have had ``asked``, as one
    of the class ``name``.  ``num_known``: the tokens of it that are known before the step's."""

    request: Request
    num_drafts: int
    asked: int
    name: str
    on_device: bool = False
    num_known: int = 0

    def arrive(self) -> None:
        """The tokens of the step are about to be applied to the request."""
        self.num_known = self.request.num_known_tokens
        self.request.num_drafts -= self.num_drafts


class ScheduledStep(Struct):
    """A step as the core remembers it until its result comes, and what the worker gets of it."""

    scheduled: list[ScheduledRequest]
    batch: Batch
    drafted: list[Drafted] = []
    launched_at: float = 0.0
    """Time of the launch, by ``time.perf_counter()``."""
    read_bytes: float = 0.0
    """The least that it has to read, see ``StepReads``; counted once it is launched."""
    seconds: float | None = None
    whole_s: float | None = None
    """See ``StepClock.ended``; of a step that has ended."""


def make_batch(
    scheduled: list[ScheduledRequest], vocab_size: int, *, device_drafts: bool = False
) -> Batch:
    """The worker's view of a step.  It includes what the worker has not yet been told about the
    requests, such as new blocks, and marks that as told.

    Args:
        device_drafts: the device makes drafts, so it is told of a request's tokens.
    """
    rows: list[int] = []
    known_ids: list[int] = []
    changed: list[tuple[int, Request]] = []
    masked: list[int] = []
    masks: list[Ints] = []
    banned: list[tuple[int, int]] = []
    drafts: list[int] = []
    query_len, total = scheduled[0].num_tokens, 0
    for row, entry in enumerate(scheduled):
        request, start, num_tokens = entry.request, entry.start, entry.num_tokens
        known = request.num_known_tokens - start
        if known > 0:
            known_ids += request.tokens(start, start + num_tokens)
        elif entry.draft == ON_DEVICE:
            known = 1
            known_ids.append(0)
        elif entry.draft != NO_DRAFT:
            known = 1
            known_ids.append(entry.draft)
            drafts = [*drafts, entry.draft] if start > request.num_known_tokens else [entry.draft]
        rows += (request.slot, start, num_tokens, entry.num_sampled, known)
        total += num_tokens
        if num_tokens != query_len:
            query_len = 0
        behind = () if entry.draft < 0 else drafts
        forced = None
        if request.thinking is not None and entry.num_sampled:
            forced = request.forced_id()
        if forced is not None:
            masked.append(row)
            masks.append(only(forced, vocab_size))
        elif request.matcher is not None and entry.num_sampled:
            masked.append(row)
            masks.append(permitted(request, request.matcher, behind))
        elif request.bad_word_ids and entry.num_sampled:
            banned += [(row, token_id) for token_id in request.banned_ids(behind)]
        blocks = request.blocks
        if blocks.num_entries != blocks.num_sent and not (changed and changed[-1][1] is request):
            changed.append((row, request))
    slots, starts, query_lens, num_sampled, num_known = _ints(rows).reshape(-1, 5).T.copy()
    if query_len == 1 and not known_ids:  # a step of decodes alone
        input_ids, feed_slots = np.zeros(total, np.int32), slots
    elif total == len(known_ids):  # a step of prefills alone
        input_ids, feed_slots = _ints(known_ids), np.full(total, NO_SLOT, np.int32)
    else:
        input_ids, feed_slots = _inputs(slots, query_lens, num_known, known_ids)
    return Batch(
        slots=slots,
        starts=starts,
        query_lens=query_lens,
        num_sampled=num_sampled,
        input_ids=input_ids,
        feed_slots=feed_slots,
        new=[
            _new_sequence(request, device_drafts)
            for _, request in changed
            if request.blocks.num_sent == 0
        ],
        block_tables=[
            _block_table_update(changed, group)
            for group in range(len(scheduled[0].request.blocks.tables))
        ],
        query_len=query_len,
        targets=_targets(scheduled),
        masked_rows=_ints(masked) if masked else _NONE,
        masks=np.stack(masks) if masks else _NONE,
        banned=np.array(banned, np.int32) if banned else _NO_PAIRS,
        ahead=_ahead(scheduled) if device_drafts else _NONE,
    )


def _ahead(scheduled: list[ScheduledRequest]) -> Ints:
    ahead = [entry.ahead for entry in scheduled]
    return _ints(ahead) if max(ahead) > IN_PLACE else _NONE


def _targets(scheduled: list[ScheduledRequest]) -> Ints:
    targets = [entry.target for entry in scheduled]
    return _ints(targets) if max(targets) > NO_TARGET else _NONE


def _inputs(
    slots: Ints, query_lens: Ints, num_known: Ints, known_ids: list[int]
) -> tuple[Ints, Ints]:
    """``input_ids`` and ``feed_slots``.  The first ``num_known`` tokens of each row are known.  The
    step in flight samples the others, one a slot."""
    ends = np.cumsum(query_lens, dtype=np.int32)
    behind = np.arange(ends[-1], dtype=np.int32)
    behind -= np.repeat(ends - query_lens + num_known, query_lens)
    known = behind < 0
    input_ids = np.zeros_like(behind)
    input_ids[known] = known_ids
    behind += np.repeat(slots, query_lens)
    behind[known] = NO_SLOT
    return input_ids, behind


def unsent_blocks(requests: list[Request]) -> list[BlockTableUpdate]:
    """What the block tables of a batch's rows have gained since the workers were last told, by
    group.  They count as untold still: a batch of a draft model reaches one worker alone."""
    changed = [
        (row, request.blocks)
        for row, request in enumerate(requests)
        if request.blocks.num_entries != request.blocks.num_sent
    ]
    if not changed:
        return [_UNCHANGED] * len(requests[0].blocks.tables)
    updates = []
    for group in range(len(requests[0].blocks.tables)):
        starts = [blocks.sent[group] for _, blocks in changed]
        gained = [blocks.tables[group][blocks.sent[group] :] for _, blocks in changed]
        updates.append(
            BlockTableUpdate(
                rows=_ints([row for row, _ in changed]),
                starts=_ints(starts),
                counts=_ints([len(each) for each in gained]),
                block_ids=_ints([block for each in gained for block in each]),
            )
        )
    return updates


def _block_table_update(changed: list[tuple[int, Request]], group: int) -> BlockTableUpdate:
    if not changed:
        return _UNCHANGED
    starts = [request.blocks.sent[group] for _, request in changed]
    gained = [request.blocks.take_unsent(group) for _, request in changed]
    return BlockTableUpdate(
        rows=_ints([row for row, _ in changed]),
        starts=_ints(starts),
        counts=_ints([len(blocks) for blocks in gained]),
        block_ids=_ints([block for blocks in gained for block in blocks]),
    )


def _ints(values: list[int]) -> Ints:
    return np.array(values, np.int32)


_NONE = _ints([])
_NO_PAIRS = _NONE.reshape(0, 2)
_UNCHANGED = BlockTableUpdate(_NONE, _NONE, _NONE, _NONE)


def _new_sequence(request: Request, device_drafts: bool) -> NewSequence:
    params = request.sampling_params
    tells = params.has_penalties or (device_drafts and not request.needs_host)
    return NewSequence(
        slot=request.slot,
        sampling_params=params,
        arrival=request.arrival,
        num_prompt_tokens=len(request.prompt_token_ids),
        stop_ids=request.stop_ids,
        prompt_token_ids=request.prompt_token_ids if tells else [],
        output_token_ids=list(request.output_token_ids) if tells else [],
        salt=salt_of(request.cache_salt) if device_drafts else 0,
    )
