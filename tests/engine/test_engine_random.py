"""Whatever is added, aborted or preempted in whatever order: every request gets its own answer."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from fusewright.engine.frontend.loop import EngineLoop
from fusewright.engine.frontend.outputs import CompletionOutput, RequestOutput
from fusewright.engine.messages.sampling_params import SamplingParams

from .toy import (
    TOKENIZER,
    Setup,
    Solo,
    ToyRunner,
    check_invariants,
    in_windows,
    logprobs_of,
    next_token,
    solo,
)

CHUNKS = (1, 7, 16, 64)


def runner_of(engine: EngineLoop) -> ToyRunner:
    runner: Any = engine.core.runner
    return runner


@dataclass
class Client:
    """Adds requests to an engine and checks everything that comes back."""

    setup: Setup
    tokenizer: bool = True
    sent: dict[str, tuple[list[int], SamplingParams, bool]] = field(default_factory=dict)
    last: dict[str, RequestOutput] = field(default_factory=dict)
    likely: dict[str, list[Any]] = field(default_factory=dict)
    """``logprobs_of`` each token of a request's whole answer."""
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.engine = self.setup.engine(TOKENIZER if self.tokenizer else None)

    @property
    def open_ids(self) -> list[str]:
        return [i for i in self.sent if i not in self.last or not self.last[i].finished]

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        final_only: bool = False,
        priority: int = 0,
        salt: str | None = None,
    ) -> str:
        given = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        request_id = self.engine.add_request(
            given, params, final_only=final_only, priority=priority
        )
        self.sent[request_id] = (prompt, params, final_only)
        return request_id

    def step(self) -> None:
        self.num_steps += 1
        for output in self.engine.step():
            self._receive(output)
        check_invariants(self.engine.core.scheduler)

    def drain(self) -> None:
        while self.engine.has_unfinished():
            before = len(runner_of(self.engine).batches), len(self.open_ids)
            for _ in range(2):
                self.step()
            assert (len(runner_of(self.engine).batches), len(self.open_ids)) != before, "stuck"
        assert not self.open_ids
        assert self.engine.core.scheduler.pool.num_free == self.setup.num_blocks

    def abort(self, request_id: str) -> None:
        """Aborts; what the request has must be the beginning of its answer."""
        output = self.engine.abort(request_id)
        assert output is not None and output.finished
        for completion in output.outputs:
            right = self._solo(request_id).token_ids
            assert completion.token_ids == right[: len(completion.token_ids)]
            assert completion.finish_reason in ("abort", "stop", "length")
        self.last[request_id] = output
        check_invariants(self.engine.core.scheduler)

    def _solo(self, request_id: str) -> Solo:
        prompt, params, _ = self.sent[request_id]
        return solo(prompt, params, self.setup.max_model_len, self.setup.windows)

    def _logprobs(self, request_id: str, count: int) -> list[Any]:
        if request_id not in self.likely:
            tokens = [*self.sent[request_id][0], *(right := self._solo(request_id).token_ids)]
            self.likely[request_id] = [
                logprobs_of(in_windows(tokens[:end], self.setup.windows), count)
                for end in range(len(tokens) - len(right), len(tokens))
            ]
        return self.likely[request_id]

    def _receive(self, output: RequestOutput) -> None:
        prompt, params, final_only = self.sent[output.request_id]
        before = self.last.get(output.request_id)
        assert before is None or not before.finished, "an output after the last"
        assert output.prompt_token_ids == prompt
        assert len(output.outputs) == params.n
        assert output.finished == all(c.finished for c in output.outputs)
        assert output.finished or not final_only
        for i, completion in enumerate(output.outputs):
            assert completion.index == i
            if before is not None:
                known = before.outputs[i]
                assert completion.text.startswith(known.text), "text was taken back"
                assert completion.token_ids[: len(known.token_ids)] == known.token_ids
            self._check_against_solo(output.request_id, completion)
        self.last[output.request_id] = output

    def _check_against_solo(self, request_id: str, completion: CompletionOutput) -> None:
        _, params, _ = self.sent[request_id]
        right = self._solo(request_id)
        if completion.finished:
            assert completion.token_ids == right.token_ids
            assert completion.text == (right.text if self.tokenizer else "")
            assert completion.finish_reason == right.finish_reason
            assert completion.stop_reason == right.stop_reason
        else:
            assert completion.token_ids == right.token_ids[: len(completion.token_ids)]
            assert right.text.startswith(completion.text)
        if params.logprobs is None:
            assert completion.logprobs is None and completion.cumulative_logprob is None
            return
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids)
        total = 0.0
        expected = self._logprobs(request_id, params.logprobs)
        entries = zip(completion.token_ids, completion.logprobs, expected, strict=False)
        for token, entry, (logprob, rank, _, likeliest) in entries:
            assert next(iter(entry)) == token
            assert (entry[token].logprob, entry[token].rank) == (logprob, rank)
            assert set(entry) == {token, *likeliest}
            total += logprob
        assert completion.cumulative_logprob == pytest.approx(total)


PREFIXES = [[first] * 40 for first in (7, 8)]


def random_prompt(rng: random.Random, longest: int) -> list[int]:
    """Some begin alike, to share blocks; some are equal."""
    length = rng.randint(1, longest)
    prefix = rng.choice([[], *PREFIXES])[: rng.choice([length, rng.randint(1, length)])]
    return prefix + [rng.randrange(256) for _ in range(length - len(prefix))]


def random_params(rng: random.Random, max_tokens: int) -> SamplingParams:
    stop = rng.choice([(), (), ("ab",), ("c a", "é"), ("bb", "abc", "b"), ("ca",)])
    count = rng.randint(1, max_tokens)
    return SamplingParams(
        n=rng.choice([1, 1, 1, 1, 2, 9]),
        max_tokens=count,
        # A stop string reads no text of the first tokens; test_loop has that case.
        min_tokens=0 if stop else rng.choice([0, 0, rng.randint(0, count)]),
        stop=stop,
        stop_token_ids=rng.choice([(), (), (ord("d"),)]),
        ignore_eos=rng.random() < 0.5,
        include_stop_str_in_output=rng.random() < 0.3,
        logprobs=rng.choice([None, None, 0, 3]),
        skip_special_tokens=rng.random() < 0.5,
    )


def play(setup: Setup, rng: random.Random, num_steps: int, busy: float) -> Client:
    """Adds, aborts and steps at random; then everything left must end."""
    client = Client(setup)
    # The largest request just fits: anything longer is refused, see test_loop.
    pool = setup.pool()
    most = max(
        total
        for total in range(2, setup.max_model_len + 1)
        if pool.most_blocks(total - 1, setup.max_num_batched_tokens) <= setup.num_blocks
    )
    for _ in range(num_steps):
        if rng.random() < busy:
            longest = max(1, most // 2)
            prompt = random_prompt(rng, rng.choice([min(3, longest), longest]))
            params = random_params(rng, most - len(prompt))
            client.add(
                prompt,
                params,
                final_only=rng.random() < 0.4,
                priority=rng.randint(-1, 1) if setup.heed_priority else 0,
                salt=rng.choice([None, None, "a"]),
            )
        if client.open_ids and rng.random() < 0.03:
            client.abort(rng.choice(client.open_ids))
        client.step()
    client.drain()
    if not setup.enable_chunked_prefill:
        for batch in runner_of(client.engine).batches:
            firsts = batch.num_sampled[batch.starts == 0]
            assert firsts.all(), "a prompt runs whole"
    return client


setups = (
    st.builds(
        Setup,
        num_blocks=st.integers(1, 30),
        block_size=st.sampled_from([1, 2, 4, 16]),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.sampled_from(CHUNKS),
        max_model_len=st.integers(2, 60),
        enable_chunked_prefill=st.booleans(),
        async_scheduling=st.booleans(),
        lazy=st.booleans(),
        prefix_caching=st.booleans(),
        heed_priority=st.booleans(),
        long_prefill_token_threshold=st.sampled_from([0, 0, 3]),
        max_num_mixed_tokens=st.sampled_from([0, 1, 5]),
        windows=st.sampled_from([(0,), (3,), (0, 5), (4, 0, 4), (1, 9), (-5,), (0, -7, 6)]),
    )
    .map(lambda s: replace(s, num_blocks=max(s.num_blocks, len(s.windows))))
    .map(
        lambda s: (
            s
            if s.enable_chunked_prefill
            else replace(
                s,
                max_num_batched_tokens=max(s.max_num_batched_tokens, s.max_model_len),
                long_prefill_token_threshold=0,
                max_num_mixed_tokens=0,
            )
        )
    )
)


def test_every_request_gets_its_solo_answer(fw_cases: int) -> None:
    @settings(max_examples=30 * fw_cases)
    @given(setups, st.integers(0, 2**32), st.sampled_from([0.1, 0.5, 1.0]))
    def plays(setup: Setup, seed: int, busy: float) -> None:
        play(setup, random.Random(seed), num_steps=40, busy=busy)

    plays()


# Two of each chunk, such that every two of the three axes meet with all their values.
@pytest.mark.product(6)
@pytest.mark.parametrize(
    ("chunk", "async_scheduling", "prefix_caching"),
    [
        (chunk, in_flight, in_flight == (place % 2 == 0))
        for place, chunk in enumerate(CHUNKS)
        for in_flight in (True, False)
    ],
)
def test_hundreds_of_steps_under_constant_preemption(
    chunk: int, async_scheduling: bool, prefix_caching: bool, fw_cases: int
) -> None:
    setup = Setup(
        num_blocks=24,
        block_size=2,
        max_num_seqs=6,
        max_num_batched_tokens=chunk,
        max_model_len=40,
        async_scheduling=async_scheduling,
        prefix_caching=prefix_caching,
    )
    steps = 300 * fw_cases
    client = play(setup, random.Random(chunk), num_steps=steps, busy=0.25)
    assert client.num_steps >= steps
    if chunk > 1:  # at one token a step, hardly two requests ever run together
        assert client.engine.core.scheduler.num_preemptions > 3
    assert bool(client.engine.core.scheduler.num_prefix_hits) == prefix_caching


def test_the_toy_model_tells_contexts_apart() -> None:
    """The oracle itself: another order, another token or a lost one gives another continuation."""
    rng = random.Random(0)
    same = 0
    for _ in range(200):
        tokens = [*random_prompt(rng, 20), 1, 2]
        changed = rng.choice([tokens[:-1], [*tokens[:-2], 2, 1], [3, *tokens], [*tokens[:-1], 3]])
        same += next_token(list(enumerate(tokens))) == next_token(list(enumerate(changed)))
    assert same < 60


def test_a_prompt_in_many_chunks_decodes_beside_others() -> None:
    setup = Setup(max_num_batched_tokens=7, max_model_len=200, num_blocks=100)
    client = Client(setup)
    client.add([1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True))
    client.step()
    client.add([*range(100)], SamplingParams(max_tokens=5))
    client.drain()
    mixed = [b for b in runner_of(client.engine).batches if b.num_seqs == 2 and b.num_tokens == 7]
    assert len(mixed) >= 16, "a decode and a chunk of 6 share each step"


def test_without_a_tokenizer_token_ids_go_in_and_come_out() -> None:
    client = Client(Setup(), tokenizer=False)
    client.add([5, 6, 7], SamplingParams(max_tokens=9, logprobs=1))
    client.add([8], SamplingParams(max_tokens=9), final_only=True)
    client.drain()
