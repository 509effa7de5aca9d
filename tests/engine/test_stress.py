"""A crowd on a tenth of the KV cache that it needs: each request gets the answer it gets alone.

The toy model carries the crowd; the bundled model repeats it at a smaller size with real arithmetic
and sampling.  ``--fw-cases 5`` is a crowd of 20,000.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from fusewright import LLM
from fusewright.config import UserError
from fusewright.engine.engine import Engine
from fusewright.engine.frontend.loop import EngineLoop
from fusewright.engine.frontend.outputs import RequestOutput
from fusewright.engine.messages.sampling_params import SamplingParams
from fusewright.model_executor.abacus.problems import held_out

from .toy import Setup, check_invariants, solo

MAX_NUM_SEQS = 256
LONGEST = 48
MEAN_BLOCKS = 8
"""That a request ends with; all seats together need this times ``MAX_NUM_SEQS``."""
CROWDED = Setup(
    num_blocks=MAX_NUM_SEQS * MEAN_BLOCKS // 10,
    block_size=2,
    max_num_seqs=MAX_NUM_SEQS,
    max_num_batched_tokens=512,
    max_model_len=LONGEST,
    prefix_caching=True,
)
PREFIXES = [[first] * LONGEST for first in (7, 8, 9)]


@dataclass(frozen=True)
class Sent:
    """A request as it was asked for, and by which step it must have ended."""

    prompt: list[int]
    params: SamplingParams
    salt: str | None
    deadline: int


@dataclass
class Crowd:
    """Sends random requests and checks what comes back."""

    engine: EngineLoop
    rng: random.Random
    open: dict[str, Sent] = field(default_factory=dict)
    past: list[Sent] = field(default_factory=list)
    open_tokens: int = 0
    sent_tokens: int = 0
    num_sent: int = 0
    num_aborted: int = 0
    num_steps: int = 0

    def send(self) -> None:
        rng = self.rng
        if self.past and rng.random() < 0.2:
            old = rng.choice(self.past)
            prompt, params, salt = old.prompt, old.params, old.salt
        else:
            prompt, params = random_prompt(rng), random_params(rng)
            salt = rng.choice([None, None, "a", "b"])
        request_id = f"{self.num_sent}"
        given = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        self.engine.add_request(given, params, request_id, final_only=rng.random() < 0.9)
        self.open_tokens += total(prompt, params)
        # First come, first served: the oldest request is never preempted and advances with every
        # step, but for the two in which its tokens in flight are awaited.
        deadline = self.num_steps + self.open_tokens + 2 * (len(self.open) + 1)
        self.open[request_id] = Sent(prompt, params, salt, deadline)
        self.num_sent += 1
        self.sent_tokens += total(prompt, params)
        self.past = [*self.past[-500:], self.open[request_id]]

    def send_twice(self) -> None:
        taken = self.rng.choice(list(self.open))
        with pytest.raises(UserError, match=f"request_id '{taken}' is in use"):
            self.engine.add_request([1], SamplingParams(), taken)

    def abort(self) -> None:
        request_id = self.rng.choice(list(self.open))
        output = self.engine.abort(request_id)
        assert output is not None and output.finished
        sent = self._close(request_id)
        alone = solo(sent.prompt, sent.params, LONGEST).token_ids
        given = output.outputs[0].token_ids
        assert given == alone[: len(given)]
        self.num_aborted += 1

    def step(self) -> None:
        self.num_steps += 1
        for output in self.engine.step():
            if output.finished:
                self._check(output)
        check_invariants(self.engine.core.scheduler)
        assert self.engine.core.scheduler.num_unfinished == len(self.open)
        assert all(sent.deadline >= self.num_steps for sent in self.open.values()), "starved"

    def _check(self, output: RequestOutput) -> None:
        sent = self._close(output.request_id)
        assert self.num_steps <= sent.deadline, "starved"
        right, (given,) = solo(sent.prompt, sent.params, LONGEST), output.outputs
        assert given.token_ids == right.token_ids
        assert (given.text, given.finish_reason, given.stop_reason) == (
            right.text,
            right.finish_reason,
            right.stop_reason,
        )

    def _close(self, request_id: str) -> Sent:
        sent = self.open.pop(request_id)
        self.open_tokens -= total(sent.prompt, sent.params)
        return sent


def total(prompt: list[int], params: SamplingParams) -> int:
    assert params.max_tokens is not None
    return min(len(prompt) + params.max_tokens, LONGEST)


def random_prompt(rng: random.Random) -> list[int]:
    length = rng.randint(1, rng.choice([3, 3, 16]))
    shared = rng.choice([[], *PREFIXES])[: rng.randint(0, length)]
    return shared + [rng.randrange(256) for _ in range(length - len(shared))]


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.choice([rng.randint(1, 4), rng.randint(16, 32)]),
        seed=rng.choice([None, rng.randrange(1000)]),
        stop=rng.choice([(), (), (), ("ab",), ("c a", "é")]),
        stop_token_ids=rng.choice([(), (), (), (), (ord("d"),)]),
        ignore_eos=rng.random() < 0.9,
    )


@pytest.mark.slow
def test_a_crowd_on_a_tenth_of_the_cache_answers_as_if_alone(fw_cases: int) -> None:
    """All invariants are checked after every step."""
    engine, count = CROWDED.engine(), 2000 * fw_cases
    crowd = Crowd(engine, random.Random(0))
    while crowd.num_sent < count or crowd.open:
        # Bursts upon a short queue or none: those that start together grow together.
        if len(crowd.open) <= 20 * (crowd.num_sent // 1000 % 2):
            for _ in range(min(crowd.rng.randint(1, 800), count - crowd.num_sent)):
                crowd.send()
        if crowd.open and crowd.rng.random() < 0.3:
            crowd.send_twice()
            crowd.abort()
        crowd.step()
    assert engine.step() == []
    check_invariants(engine.core.scheduler)
    assert not engine.has_unfinished() and engine.core.scheduler.pool.num_free == CROWDED.num_blocks
    assert crowd.sent_tokens / crowd.num_sent > MEAN_BLOCKS * CROWDED.block_size
    assert crowd.num_aborted > count / 40
    assert engine.core.scheduler.num_preemptions > count / 66
    assert engine.core.scheduler.num_prefix_hits > count / 2


@pytest.mark.thorough
def test_the_bundled_model_on_a_tenth_of_the_cache_answers_as_if_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy and seeded requests with salts, some aborted, at -O0 in float32."""
    # As users have it: interpreted Triton kernels would take minutes.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    rng = random.Random(1)
    prompts = [problem.prompt for problem in held_out(40, seed=5)]
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=24),
        SamplingParams(temperature=1.5, seed=7, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=1.2, top_p=0.9, top_k=20, seed=8, max_tokens=20),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=40, ignore_eos=True),
    ]
    asked = [(rng.choice(prompts), rng.randrange(len(kinds))) for _ in range(len(prompts))]
    crowded = abacus(num_gpu_blocks_override=40 * 5 // 10).engine
    ids = []
    for prompt, kind in asked:
        given = {"prompt": prompt, "cache_salt": rng.choice("ab")}
        ids.append(crowded.add_request(given, kinds[kind]))
    answers: dict[str, list[int]] = {}
    while crowded.has_unfinished():
        if rng.random() < 0.05:
            crowded.abort(rng.choice(ids))
        for output in crowded.step():
            if output.finished:
                answers[output.request_id] = output.outputs[0].token_ids
        check_invariants(crowded.core.scheduler)
    assert crowded.core.scheduler.pool.num_free == crowded.core.scheduler.pool.num_blocks
    assert len(answers) > 30 and crowded.core.scheduler.num_preemptions > 0
    ample, distinct = abacus(enable_prefix_caching=False), list(dict.fromkeys(asked))
    params = [kinds[kind] for _, kind in distinct]
    outputs = ample.generate([prompt for prompt, _ in distinct], params, use_tqdm=False)
    assert isinstance(ample.engine, Engine) and not ample.engine.core.scheduler.num_preemptions
    pairs = zip(distinct, outputs, strict=True)
    right = {asked_for: output.outputs[0].token_ids for asked_for, output in pairs}
    for prompt, kind in distinct[::10]:  # what they are beside each other, they are alone
        (output,) = ample.generate(prompt, kinds[kind], use_tqdm=False)
        assert output.outputs[0].token_ids == right[prompt, kind]
    for request_id, key in zip(ids, asked, strict=True):
        assert answers.get(request_id, right[key]) == right[key]


def abacus(**options: Any) -> LLM:
    settings: dict[str, Any] = {"max_num_seqs": 64, "max_model_len": 64, "block_size": 8}
    return LLM(
        "abacus",
        optimization_level=0,
        device="cpu",
        dtype="float32",
        **{**settings, **options},
    )
