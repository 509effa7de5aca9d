"""The core with drafts over a toy model, by the thousand steps: every request gets its own answer,
whatever is drafted, accepted, aborted or preempted, and no block is lost.

The toy's next token depends on all tokens that it reads, so keys of a rejected draft that are read,
or a draft that is wrongly taken, change the answer.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fusewright import ops
from fusewright.engine.core.batch import ScheduledRequest, ScheduledStep, make_batch
from fusewright.engine.core.drafting.seams import Always
from fusewright.engine.core.drafts import Drafts
from fusewright.engine.core.kv_blocks import SequenceBlocks
from fusewright.engine.core.ngram import NgramDrafter
from fusewright.engine.core.request import Request
from fusewright.engine.messages.sampling_params import SamplingParams
from fusewright.engine.messages.step import Batch

from .draft_toy import DraftSetup, Guesser
from .test_engine_random import Client, play, setups
from .toy import ALPHABET, Setup


def drafts_of(client: Client) -> Drafts:
    drafts = client.engine.core.scheduler.drafts  # type: ignore[attr-defined]
    assert isinstance(drafts, Drafts)
    return drafts


def check_counts(client: Client) -> None:
    """What is counted is what the drafter was told."""
    drafts = drafts_of(client)
    stats, guesser = drafts.stats(), drafts._drafter
    assert isinstance(guesser, Guesser) and not stats.error and not guesser.open
    assert stats.num_steps == len(guesser.told)
    assert stats.num_drafted == sum(num for num, _ in guesser.told)
    assert stats.num_accepted == sum(right for _, right in guesser.told)
    assert stats.drafted == [sum(num > i for num, _ in guesser.told) for i in range(stats.most)]
    assert stats.accepted == [sum(hit > i for _, hit in guesser.told) for i in range(stats.most)]
    assert drafts._num_in_flight == 0


def drafting(setup: Setup, rate: float, most: int, rows: int, on_device: bool) -> DraftSetup:
    """``rows``: as many rows a request at most."""
    fields = setup.__dict__ | {"max_num_rows": rows * setup.max_num_seqs}
    return DraftSetup(**fields, rate=rate, most=most, on_device=on_device)


def test_every_request_gets_its_solo_answer(fw_cases: int) -> None:
    rates, numbers = st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.integers(1, 6)
    setup = st.builds(drafting, setups, rates, numbers, st.integers(1, 4), st.booleans())

    @settings(max_examples=30 * fw_cases)
    @given(setup, st.integers(0, 2**32), st.sampled_from([0.1, 0.5, 1.0]))
    def plays(setup: DraftSetup, seed: int, busy: float) -> None:
        check_counts(play(setup, random.Random(seed), num_steps=40, busy=busy))

    plays()


@pytest.mark.product(2)
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize(("async_scheduling", "on_device"), [(False, 0), (True, 0), (True, 1)])
def test_hundreds_of_steps_under_constant_preemption(
    async_scheduling: bool, on_device: int, prefix_caching: bool, fw_cases: int
) -> None:
    setup = DraftSetup(
        num_blocks=24,
        block_size=2,
        max_num_seqs=12,
        max_num_batched_tokens=24,
        max_model_len=40,
        async_scheduling=async_scheduling,
        prefix_caching=prefix_caching,
        rate=0.8,
        on_device=bool(on_device),
    )
    client = play(setup, random.Random(3), num_steps=400 * fw_cases, busy=0.25)
    check_counts(client)
    stats = drafts_of(client).stats()
    assert client.engine.core.scheduler.num_preemptions > 3  # type: ignore[attr-defined]
    assert min(stats.accepted) > 0 and stats.num_accepted < stats.num_drafted
    assert stats.without["no free KV blocks"] > 0 and stats.without["no room in the step"] > 0


def test_drafts_save_steps() -> None:
    """With drafts that are all right, a step brings as many tokens as it has rows."""
    counts = {}
    for rate in (0.0, 1.0):
        client = Client(DraftSetup(rate=rate, async_scheduling=False, max_model_len=200))
        guesser = drafts_of(client)._drafter
        assert isinstance(guesser, Guesser)
        guesser.rng.randint = lambda low, high: high  # type: ignore[method-assign]
        client.add([1, 2, 3], SamplingParams(max_tokens=51, ignore_eos=True))
        client.drain()
        counts[rate] = client.num_steps
    assert counts[1.0] <= 12 < 40 < counts[0.0]


@pytest.mark.parametrize("num_requests", [1, 5])
def test_a_step_with_drafts_of_the_device_is_launched_while_the_one_before_runs(
    num_requests: int,
) -> None:
    """The toy runs a step when its result is asked for: until its last tokens no step is."""
    client = Client(DraftSetup(on_device=True, max_num_seqs=32, max_num_batched_tokens=64))
    runner: Any = client.engine.core.runner
    launch, waiting, rows = runner.launch, list[int](), list[int]()

    def listen(batch: Batch) -> Any:
        waiting.append(len(runner.queue))
        rows.append(batch.num_seqs)
        return launch(batch)

    runner.launch = listen
    for i in range(num_requests):
        client.add([1, 2, i], SamplingParams(max_tokens=45, ignore_eos=True))
    client.drain()
    first_end = next(i for i, count in enumerate(rows) if i > 1 and count < 5 * num_requests)
    assert first_end > 4 and waiting[:first_end] == [0] + [1] * (first_end - 1)
    assert drafts_of(client).stats().num_accepted > 20 * num_requests
    pool = client.engine.core.scheduler.pool
    assert pool.num_free == pool.num_blocks


def test_the_policy_tells_requests_apart_for_which_nothing_was_found() -> None:
    """Rows are scheduled blindly, so those that come to nothing count as wrong, in their class."""
    client = Client(DraftSetup(on_device=True, max_model_len=200, rate=1.0))
    drafts, told = drafts_of(client), dict[str, list[int]]()

    class Recorder(Always):
        def observe_drafts(self, name: str, asked: int, num_drafts: int, num_accepted: int) -> None:
            assert asked == 4 >= num_drafts > 0
            told.setdefault(name, []).append(num_accepted)

    drafts.policy = Recorder(4)
    runner: Any = client.engine.core.runner
    runner.slots.guess = lambda known, seed: [*ALPHABET[:4]] if len(known) // 20 % 2 else []
    client.add([1, 2, 3], SamplingParams(max_tokens=120, ignore_eos=True))
    client.drain()
    assert {*told} == {"sampled", "sampled, found none"}
    stats = drafts.stats()
    assert stats.num_steps > 5 and stats.without["nothing proposed"] > 5
    assert 3.5 * stats.num_steps < stats.num_drafted <= 4 * stats.num_steps


def test_drafts_take_no_requests_place() -> None:
    """Where a step has rows for them, as many requests run with drafts as without, and each has all
    of its drafts in every step."""
    steps = {}
    for rows in (1, 5):
        sizes = {"max_num_seqs": 3, "max_num_rows": 3 * rows, "max_num_batched_tokens": 64}
        client = Client(DraftSetup(rate=1.0, async_scheduling=False, max_model_len=60, **sizes))
        guesser = drafts_of(client)._drafter
        assert isinstance(guesser, Guesser)
        guesser.rng.randint = lambda low, high: high  # type: ignore[method-assign]
        for _ in range(3):
            client.add([1, 2, 3], SamplingParams(max_tokens=51, ignore_eos=True))
        client.drain()
        steps[rows] = client.num_steps
        without = drafts_of(client).stats().without
        assert ("no room in the step" in without) == (rows == 1)
    assert steps[5] <= 12 < 50 < steps[1]


def test_requests_without_drafts_keep_a_step_in_flight() -> None:
    """A request that has none runs in every step beside others, whose drafts share steps."""
    client = Client(DraftSetup(rate=1.0, max_num_seqs=32, max_num_batched_tokens=64))
    scheduler = client.engine.core.scheduler  # type: ignore[attr-defined]
    guesser = drafts_of(client)._drafter
    assert isinstance(guesser, Guesser)
    guesser.rng.randint = lambda low, high: high  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    names = {client.add([i], params) for i in (1, 2, 3)}
    guesser.wants = lambda request: request.request_id in names  # type: ignore[method-assign]
    alone, propose = client.add([9], params), guesser.propose

    def for_names(requests: Sequence[Request], most: int) -> list[list[int]]:
        drafts = zip(requests, propose(requests, most), strict=True)
        return [each if request.request_id in names else [] for request, each in drafts]

    guesser.propose = for_names  # type: ignore[method-assign]
    schedule, steps = scheduler.schedule, list[ScheduledStep]()

    def listen() -> ScheduledStep | None:
        step = schedule()
        if step is not None:
            steps.append(step)
        return step

    scheduler.schedule = listen
    while names & {*client.open_ids}:
        client.step()
    drafting = [{each.request.request_id for each in step.drafted} for step in steps]
    assert set(map(frozenset, drafting)) == {frozenset(names), frozenset()}
    assert drafting.count(names) >= 8
    running = [{entry.request.request_id for entry in step.scheduled} for step in steps]
    assert all(alone in ids for ids in running)
    client.drain()


def test_a_drafter_that_fails_is_switched_off(said: list[logging.LogRecord]) -> None:
    client = Client(DraftSetup(rate=1.0))
    drafts = drafts_of(client)
    guesser = drafts._drafter
    assert isinstance(guesser, Guesser)
    propose, calls = guesser.propose, []

    def failing(requests: Sequence[Request], most: int) -> list[list[int]]:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("no drafts today")
        return propose(requests, most)

    guesser.propose = failing  # type: ignore[method-assign]
    for i in range(5):
        client.add([i], SamplingParams(max_tokens=30))
    client.drain()
    assert len(calls) == 4 and drafts.stats().error == "RuntimeError: no drafts today"
    (record,) = [each for each in said if each.levelno >= logging.ERROR]
    assert "no drafts today" in record.getMessage()


@pytest.mark.parametrize("drafts", [[[272]], [[-1]], [[1], [2]], [["a"]]])
def test_drafts_that_are_no_tokens_switch_the_drafter_off(drafts: list[list[int]]) -> None:
    client = Client(DraftSetup(rate=1.0))
    scheduler = client.engine.core.scheduler  # type: ignore[attr-defined]
    scheduler.drafts = Drafts(Guesser(1.0), 4, vocab_size=272)
    scheduler.drafts._drafter.propose = lambda requests, most: drafts
    client.add([1, 2], SamplingParams(max_tokens=8))
    client.drain()
    assert "Error" in drafts_of(client).stats().error


def sequence(prompt: list[int], output: Sequence[int] = ()) -> Request:
    request = Request("a", prompt, SamplingParams(max_tokens=100), len(prompt) + 100)
    request.output_token_ids = [*output]
    return request


def test_bad_words_heed_the_drafts_before_a_row() -> None:
    request = sequence([1, 2], [5])
    request.bad_word_ids = [[5, 6], [6, 7, 8], [9]]
    request.blocks = SequenceBlocks([[0, 1]], [0], sent=[0])
    rows = [ScheduledRequest(request, 2, 1, 1)]
    rows += [ScheduledRequest(request, 3 + i, 1, 1, draft=d) for i, d in enumerate([6, 7, 5])]
    batch = make_batch(rows, vocab_size=16)
    banned = {(0, 6), (0, 9), (1, 9), (2, 8), (2, 9), (3, 6), (3, 9)}
    assert {(row, token_id) for row, token_id in batch.banned.tolist()} == banned
    assert batch.input_ids.tolist() == [5, 6, 7, 5] and set(batch.feed_slots.tolist()) == {-1}
    assert batch.query_len == 1 and batch.starts.tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("tokens", "longest", "shortest", "drafts"),
    [
        ([1, 2, 3, 4, 1, 2], 2, 2, [3, 4, 1, 2]),
        ([1, 2, 3, 4, 1, 2], 5, 1, [3, 4, 1, 2]),
        ([1, 2, 3, 4, 1, 2], 3, 3, []),
        ([5, 5, 5], 3, 1, [5, 5, 5, 5]),
        ([1, 2, 9, 8, 2, 7, 1, 2], 2, 1, [9, 8, 2, 7]),  # the longer of two
        ([1, 2, 9, 1, 2, 8, 1, 2], 2, 2, [8, 1, 2, 8]),  # the later of two
        ([1], 2, 1, []),
        ([1, 2], 2, 1, []),
    ],
)
def test_ngrams(tokens: list[int], longest: int, shortest: int, drafts: list[int]) -> None:
    drafter = NgramDrafter(longest, shortest)
    for cut in range(1, len(tokens) + 1):  # however the sequence has come
        request = sequence(tokens[:cut])
        drafter.wants(request)
        request.output_token_ids = tokens[cut:]
        assert drafter.wants(request) == bool(drafts)
        assert drafter.propose([request], 4) == [drafts]
        drafter.forget(request)


def test_an_index_costs_as_much_as_a_step_has_new_tokens() -> None:
    rng = random.Random(1)
    drafter, request = NgramDrafter(4, 2), sequence([rng.randrange(50) for _ in range(3000)])
    drafter.propose([request], 4)
    index = drafter._indices["a"]
    for _ in range(100):
        request.output_token_ids.append(rng.randrange(50))
        (drafts,) = drafter.propose([request], 4)
        tokens = request.tokens(0, request.num_known_tokens)
        assert index.tokens == tokens
        ends = range(2, len(tokens))
        alike = {at: common_end(tokens[:at], tokens, 4) for at in ends}
        most = max(alike.values())
        at = max((at for at in ends if alike[at] == most), default=0) if most >= 2 else 0
        assert index.place(4) == at
        assert drafts == (tokens[at : at + 4] if at else []) or at + 4 > len(tokens)


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    drafter, request = NgramDrafter(4, 2), sequence([1, 2, 3] * 4000)
    sizes = []
    while not drafter.wants(request):
        sizes.append(len(drafter._indices["a"].tokens))
        assert drafter._indices["a"].tokens == request.tokens(0, sizes[-1])
    assert sizes == [4096, 8192] and drafter.propose([request], 4) == [[1, 2, 3, 1]]


def common_end(first: list[int], second: list[int], most: int) -> int:
    """How many last tokens of two sequences are the same, up to ``most``."""
    pairs = zip(reversed(first[-most:]), reversed(second[-most:]), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@pytest.mark.parametrize(("longest", "shortest", "alphabet"), [(3, 1, 4), (5, 2, 3), (4, 4, 2)])
def test_the_device_finds_the_same_ngrams(longest: int, shortest: int, alphabet: int) -> None:
    """Sequences that grow, some of them with more earlier places than are compared."""
    rng, most = random.Random(alphabet), 4
    history, drafts = torch.zeros(4, 300, dtype=torch.int32), torch.zeros(most, 4).int()
    drafter, found = NgramDrafter(longest, shortest), torch.zeros(4, dtype=torch.int32)
    names = [str(slot) for slot in range(4)]
    known = [[rng.randrange(alphabet)] for _ in names]
    slots, order, hits = torch.arange(4).int(), torch.zeros(4, dtype=torch.int32), 0
    for _ in range(60):
        for slot, tokens in enumerate(known):
            tokens += [rng.randrange(alphabet) for _ in range(rng.randrange(1, 5))]
            history[slot, : len(tokens)] = torch.tensor(tokens)
        lengths = torch.tensor([*map(len, known)], dtype=torch.int32)
        ops.propose_ngrams(history, lengths, slots, order, shortest, longest, drafts, found)
        requests = [Request(n, t, SamplingParams(), 999) for n, t in zip(names, known, strict=True)]
        for slot, expected in enumerate(drafter.propose(requests, most)):
            assert drafts[:, slot].tolist() == (expected or [-1] * most)
            assert bool(found[slot]) == bool(expected)
            hits += bool(expected)
    assert hits > 100
