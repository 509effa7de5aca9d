"""A tiny deterministic model behind the runner's seam, and what each request must give alone.

The next token is a hash of every (position, token) that the request sees through its KV blocks, so
a wrong block table, a wrong recompute, a lost or a doubled token changes the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import msgpack

import fusewright.model_executor.abacus as abacus
from fusewright.config import NO_SLOT
from fusewright.engine.core.chunks import StepLimits
from fusewright.engine.core.kv_blocks import BlockPool
from fusewright.engine.core.loop import EngineCore
from fusewright.engine.core.request import Request
from fusewright.engine.core.scheduler import Scheduler
from fusewright.engine.frontend.inputs import InputProcessor
from fusewright.engine.frontend.loop import EngineLoop
from fusewright.engine.frontend.tokenizer import Tokenizer
from fusewright.engine.messages.cache_group import CacheGroup
from fusewright.engine.messages.sampling_params import SamplingParams
from fusewright.engine.messages.step import Batch, Logprobs, StepResult

from .toy_slots import Entry, Guess, Row, Slots, ToyStep

TOKENIZER = Tokenizer(Path(abacus.__file__).parent)
VOCAB_SIZE = 272
MOST_LOGPROBS = 3
EOS = 257
# What the model may say, some in parts of a character.  Token ids are byte values.
ALPHABET = [*b"aaabbbccd  ", 0xC3, 0xA9, EOS]


def first_seen(position: int, window: int) -> int:
    """The first position that a query sees in a layer of ``Setup.windows``."""
    if window < 0:
        return position // -window * -window
    return max(0, position - window + 1) if window else 0


def in_windows(tokens: Sequence[int], windows: Sequence[int]) -> list[tuple[int, int]]:
    """(position, token) of all that layers of these windows see behind ``tokens``."""
    known = list(enumerate(tokens))
    return [entry for window in windows for entry in known[first_seen(len(tokens) - 1, window) :]]


def next_token(seen: Sequence[tuple[int, int] | None], seed: int | None = None) -> int:
    h = hash(tuple(seen)) if seed is None else hash((seed, *seen))
    return ALPHABET[h % len(ALPHABET)]


def logprobs_of(
    seen: Sequence[tuple[int, int] | None], count: int
) -> tuple[float, int, list[float], list[int]]:
    """(logprob, rank, the likeliest logprobs, their ids)."""
    h = hash((1, *seen))
    top = [-float(h % (i + 5)) for i in range(count)]
    return -float(h % 7), 1 + h % 3, top, [ALPHABET[-i - 1] for i in range(count)]


@dataclass
class ToyRunner:
    """Steps run in launch order, as late as possible (``lazy``) or at once."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    lazy: bool = True
    shares: bool = False
    windows: tuple[int, ...] = (0,)
    max_num_rows: int = 0
    batches: list[Batch] = field(default_factory=list)
    guess: Guess | None = None

    def __post_init__(self) -> None:
        self.slots = Slots(self.max_num_seqs, self.guess)
        self.kv: list[tuple[int, int] | None] = [None] * (self.num_blocks * self.block_size)
        self.last_tokens = self.slots.last_tokens
        self.rows: dict[int, Row] = {}
        self.queue: list[ToyStep] = []

    def launch(self, batch: Batch) -> ToyStep:
        self._check(batch)
        for sequence in batch.new:
            self.rows[sequence.slot] = Row(sequence.sampling_params, [[] for _ in self.windows])
        for group, gained in enumerate(batch.block_tables):
            block_ids = gained.block_ids.tolist()
            for row, start, count in zip(gained.rows, gained.starts, gained.counts, strict=True):
                table = self.rows[int(batch.slots[row])].tables[group]
                assert start <= len(table), "an entry without those before it"
                table[start:], block_ids = block_ids[:count], block_ids[count:]
            assert not block_ids
        begins = {each.slot: [*each.prompt_token_ids, *each.output_token_ids] for each in batch.new}
        step = ToyStep(self, self._entries(batch), begins)
        self.queue.append(step)
        self.batches.append(batch)
        if not self.lazy:
            self.run_next()
        return step

    def check(self) -> None:
        while self.queue:
            self.run_next()

    def run_next(self) -> None:
        """Run the oldest launched step."""
        step = self.queue.pop(0)
        written: set[int] = set()
        lacking = [self.slots.place(entry) for entry in step.entries]
        for slot, tokens in step.begins.items():
            self.slots.history[slot] = tokens
        for entry in step.entries:
            for offset, (token, feed) in enumerate(zip(entry.token_ids, entry.feed, strict=True)):
                position = entry.start + offset
                known = token if feed == NO_SLOT else self.last_tokens[feed]
                assert known is not None, "no token was ever sampled in this slot"
                for table in entry.tables:
                    address = self._address(table, position)
                    assert address not in written, "two tokens of a step in one place"
                    written.add(address)
                    self.kv[address] = (position, known)
        token_ids: list[int] = []
        logprobs: list[tuple[float, int, list[float], list[int]]] = []
        for entry in step.entries:
            self._check_what_is_seen(entry)
            seen = self.seen(entry)
            logprobs.append(logprobs_of(seen, MOST_LOGPROBS))
            token_ids.append(next_token(seen, entry.seed) if entry.num_sampled else -1)
        token_ids = self.slots.accept(step.entries, token_ids, lacking)
        chosen, ranks, top, top_ids = zip(*logprobs, strict=True)
        found = [bool(self.slots.drafts[entry.slot]) for entry in step.entries]
        step.output = StepResult(
            np.array(token_ids, np.int32),
            Logprobs(
                np.array(chosen, np.float32),
                np.array(ranks, np.int32),
                np.array(top, np.float32),
                np.array(top_ids, np.int32),
            ),
            None if self.guess is None else np.array(found, np.int32),
        )

    def seen(self, entry: Entry) -> list[tuple[int, int] | None]:
        """Returns the entries of the KV blocks that the last query of a request reads."""
        end = entry.start + len(entry.token_ids)
        found: list[tuple[int, int] | None] = []
        for window, table in zip(self.windows, entry.tables, strict=True):
            first = first_seen(end - 1, window)
            found += [self.kv[self._address(table, position)] for position in range(first, end)]
        return found

    def _address(self, table: list[int], position: int) -> int:
        block = table[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _check_what_is_seen(self, entry: Entry) -> None:
        """Every query of the step, not the last alone, finds each position of its windows."""
        for window, table in zip(self.windows, entry.tables, strict=True):
            for position in range(first_seen(entry.start, window), entry.start):
                found = self.kv[self._address(table, position)]
                assert found is not None and found[0] == position

    def _check(self, batch: Batch) -> None:
        counts = batch.query_lens.tolist()
        assert (
            counts and min(counts) >= 1 and len(counts) <= (self.max_num_rows or self.max_num_seqs)
        )
        assert sum(counts) <= self.max_num_batched_tokens
        assert all(count > 1 for count in counts[counts.count(1) :]), "decodes come first"
        assert batch.query_len == (counts[0] if len({*counts}) == 1 else 0)
        assert batch.num_tokens == sum(counts) == len(batch.feed_slots)
        slots = batch.slots.tolist()
        assert len([*groupby(slots)]) == len({*slots}), "rows of a slot follow each other"
        assert set(slots) <= set(range(self.max_num_seqs))
        assert {sequence.slot for sequence in batch.new} <= {*slots}

    def _entries(self, batch: Batch) -> list[Entry]:
        entries, token_ids, feed = [], batch.input_ids.tolist(), batch.feed_slots.tolist()
        aheads = batch.ahead if len(batch.ahead) else np.full(batch.num_seqs, -1)
        columns = (batch.slots, batch.starts, batch.query_lens, batch.num_sampled, aheads)
        for slot, start, count, num_sampled, ahead in zip(
            *(c.tolist() for c in columns), strict=True
        ):
            row, number = self.rows[slot], 0
            if row.num_tokens is None:
                shared = start // self.block_size
                assert start % self.block_size == 0 and (shared == 0 or self.shares), (
                    "a request that is new in its slot starts at 0 or behind shared blocks"
                )
            elif entries and entries[-1].slot == slot:
                assert start == row.num_tokens and count == num_sampled == 1, "a draft"
                row.num_drafts, number = row.num_drafts + 1, entries[-1].number + 1
            else:
                # Of drafts in flight that the device makes, the host counts none.
                assert row.num_tokens - start <= row.num_drafts, "it computes what comes next"
                assert row.num_tokens >= start or self.slots.guess is not None
                row.num_drafts = 0
            row.num_tokens = start + count
            most = row.num_tokens + max(ahead, 0)
            assert all(len(table) * self.block_size >= most for table in row.tables)
            entries.append(
                Entry(
                    slot,
                    [table[:] for table in row.tables],
                    start,
                    token_ids[:count],
                    feed[:count],
                    num_sampled,
                    row.sampling_params.seed,
                    number,
                    ahead,
                )
            )
            assert all(token == 0 for token, of in zip(token_ids, feed, strict=True) if of >= 0)
            del token_ids[:count], feed[:count]
        return entries


@dataclass
class Solo:
    """The only right output of a request."""

    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None


def solo(
    prompt: Sequence[int],
    params: SamplingParams,
    max_model_len: int,
    windows: Sequence[int] = (0,),
) -> Solo:
    """Generate one token after the other with no engine at all."""
    asked = msgpack.encode(params)
    return _solo(tuple(prompt), asked, max_model_len, tuple(windows))


@lru_cache(1024)
def _solo(
    prompt: tuple[int, ...], asked: bytes, max_model_len: int, windows: tuple[int, ...]
) -> Solo:
    params = msgpack.decode(asked, type=SamplingParams)
    out: list[int] = []
    room = max_model_len - len(prompt)
    limit = room if params.max_tokens is None else min(room, params.max_tokens)
    while True:
        out.append(next_token(in_windows([*prompt, *out], windows), params.seed))
        eos = out[-1] == EOS and not params.ignore_eos
        if len(out) >= params.min_tokens and (eos or out[-1] in params.stop_ids):
            visible = out if params.include_stop_str_in_output else out[:-1]
            text = TOKENIZER.decode(visible, params.skip_special_tokens)
            return Solo(out, text, "stop", None if eos else out[-1])
        text = TOKENIZER.decode(out, params.skip_special_tokens)
        ends = [
            (text.index(s) + len(s), text.index(s), s) for s in params.stop_strings if s in text
        ]
        if ends:
            end, start, stop = min(ends)
            return Solo(
                out, text[: end if params.include_stop_str_in_output else start], "stop", stop
            )
        if len(out) >= limit:
            return Solo(out, text, "length", None)


@dataclass(frozen=True)
class Setup:
    """The size of a toy engine."""

    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 16
    max_model_len: int = 64
    enable_chunked_prefill: bool = True
    async_scheduling: bool = True
    lazy: bool = True
    prefix_caching: bool = False
    heed_priority: bool = False
    long_prefill_token_threshold: int = 0
    max_num_mixed_tokens: int = 0
    max_num_rows: int = 0
    windows: tuple[int, ...] = (0,)
    """One group of layers each; 0: no window, -n: chunks of n, as in a window of n."""

    def pool(self) -> BlockPool:
        groups = [CacheGroup(abs(window)) for window in self.windows]
        return BlockPool(self.num_blocks, self.block_size, groups)

    def scheduler(self) -> Scheduler:
        return Scheduler(
            self.pool(),
            StepLimits(
                self.max_num_seqs,
                self.max_num_batched_tokens,
                self.max_model_len,
                self.enable_chunked_prefill,
                self.long_prefill_token_threshold,
                self.max_num_mixed_tokens,
                max_num_rows=self.max_num_rows,
            ),
            prefix_caching=self.prefix_caching,
            heed_priority=self.heed_priority,
        )

    def runner(self, kind: type[ToyRunner] = ToyRunner, **faults: Any) -> ToyRunner:
        return kind(
            self.num_blocks,
            self.block_size,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.lazy,
            self.prefix_caching,
            self.windows,
            self.max_num_rows,
            **faults,
        )

    def engine(self, tokenizer: Tokenizer | None = TOKENIZER) -> EngineLoop:
        folder = Path("/no/such/folder") if tokenizer is None else tokenizer.folder
        return EngineLoop(
            core=EngineCore(
                self.scheduler(), self.runner(), async_scheduling=self.async_scheduling
            ),
            inputs=InputProcessor(tokenizer, folder, VOCAB_SIZE, self.max_model_len),
            eos_token_ids=frozenset({EOS}),
        )


def in_order(scheduler: Scheduler) -> list[Request]:
    """Waiting requests in the order in which those of one call will start."""
    heed = scheduler.heed_priority
    return sorted(scheduler.waiting, key=lambda r: (r.priority if heed else 0, r.arrival))


def check_invariants(scheduler: Scheduler) -> None:
    """What must hold between any two steps."""
    running, waiting = list(scheduler.running.values()), in_order(scheduler)
    pool = scheduler.pool
    holds = Counter(block for request in running for block in request.blocks.held())
    assert all(pool.ref_count(block) == holds[block] for block in range(pool.num_blocks))
    if not scheduler.prefix_caching:
        assert not holds or max(holds.values()) == 1, "a block with two owners"
        assert pool.num_cached == 0
    assert len(holds) + pool.num_free == pool.num_blocks, "a block was lost"
    assert sum(pool.num_held) == len(holds)
    slots = [request.slot for request in running]
    assert len(set(slots)) == len(slots) <= scheduler.step_limits.max_num_seqs
    if not scheduler.heed_priority:
        for call in {request.call for request in running + waiting}:  # "": asked for alone
            arrivals = [each.arrival for each in running + waiting if each.call == call]
            assert arrivals == sorted(arrivals), "first come, first served"
    for call in scheduler.waiting._calls.values():
        assert call.num_running == sum(request.call == call.name for request in running)
        assert call.num_running or call.num_waiting
    for request in running:
        assert bool(request.num_drafts) <= request.num_in_flight <= 1
        assert 0 <= request.num_drafts <= request.max_total_tokens - request.num_tokens
        tables = zip(pool.groups, request.blocks.tables, request.blocks.num_freed, strict=True)
        for group, table, freed in tables:
            computed = request.num_computed_tokens, pool.block_size
            assert len(table) >= group.num_blocks(*computed)
            assert freed <= group.num_behind(*computed)
        full = min(request.num_computed_tokens, request.num_known_tokens) // pool.block_size
        assert request.num_cached_blocks == (full if scheduler.prefix_caching else 0)
    if not scheduler.step_limits.long_prefill_token_threshold:
        lefts = [request.num_tokens - request.num_computed_tokens for request in running]
        assert all(left <= 1 for left in lefts[:-1]), "only the last prefills"
    for request in waiting:
        assert request.slot == -1 and not request.blocks.tables and not request.num_cached_blocks
