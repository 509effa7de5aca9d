"""What passes between the rooms of the engine survives as bytes: another process could be there."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec import ValidationError

from fusewright import LLM, SamplingParams
from fusewright.engine.messages.codec import decode, encode
from fusewright.engine.messages.requests import AbortRequests, AddRequest, StepOutputs
from fusewright.engine.messages.step import Batch, StepResult

from .grammar_waits import wait_for_grammars
from .test_engine_random import Client, random_params, random_prompt
from .toy import Setup


def through_bytes(message: Any) -> Any:
    data = encode(message)
    again = decode(data, type(message))
    assert encode(again) == data
    return again


@dataclass
class _Pending:
    pending: Any

    @property
    def has_run(self) -> bool:
        return bool(self.pending.has_run)

    def result(self) -> StepResult:
        return through_bytes(self.pending.result())


class RemoteRunner:
    """A runner behind a wire."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def launch(self, batch: Batch) -> _Pending:
        return _Pending(self.runner.launch(through_bytes(batch)))


class RemoteCore:
    """A core behind a wire."""

    def __init__(self, core: Any) -> None:
        self.core = core
        core.runner = RemoteRunner(core.runner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)

    def check_size(self, request: AddRequest) -> None:
        self.core.check_size(through_bytes(request))

    def add(self, request: AddRequest) -> None:
        self.core.add(through_bytes(request))

    def abort(self, request: AbortRequests) -> None:
        self.core.abort(through_bytes(request))

    def step(self) -> StepOutputs:
        return through_bytes(self.core.step())


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=8),
    SamplingParams(seed=3, top_p=0.9, top_k=20, min_p=0.01, max_tokens=12, n=2),
    SamplingParams(max_tokens=12, logprobs=3, min_tokens=4, prompt_logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, stop=["7", "99"], ignore_eos=True),
    SamplingParams(seed=5, max_tokens=12, grammar="start: /[0-9]{8}/", logit_bias={50: 2.0}),
    SamplingParams(
        seed=1, repetition_penalty=1.3, presence_penalty=0.5, stop_token_ids=[50], max_tokens=12
    ),
]


@pytest.mark.product(2)
@pytest.mark.parametrize("num_blocks", [64, 5], ids=["", "with preemption"])
def test_a_model_answers_alike_when_all_passes_as_bytes(num_blocks: int) -> None:
    def answers(remote: bool) -> Any:
        llm = LLM(
            "abacus",
            optimization_level=0,
            device="cpu",
            dtype="float32",
            max_num_seqs=4,
            max_num_batched_tokens=16,
            block_size=8,
            max_model_len=64,
            num_gpu_blocks_override=num_blocks,
        )
        wait_for_grammars(llm)
        if remote:
            llm.engine.core = RemoteCore(llm.engine.core)
        prompts = [f"{12 + i}+{34 * i}=" for i in range(10)]
        params = [PARAMS[i % len(PARAMS)] for i in range(10)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        preemptions = llm.report()["num_preemptions"]
        assert (preemptions > 0) == (num_blocks < 64)
        assert sum(o.metrics.num_preemptions for o in outputs) == preemptions
        return [(o.outputs, o.prompt_logprobs) for o in outputs]

    assert answers(remote=True) == answers(remote=False)


def test_random_requests_end_alike_when_all_passes_as_bytes() -> None:
    setup = Setup(num_blocks=40, prefix_caching=True)
    client = Client(setup)
    client.engine.core = RemoteCore(client.engine.core)
    rng = random.Random(7)
    for _ in range(80):
        client.add(random_prompt(rng, 20), random_params(rng, 20))
        if client.open_ids and rng.random() < 0.1:
            client.abort(rng.choice(client.open_ids))
        client.step()
    client.drain()


def test_bytes_of_another_message_are_refused() -> None:
    data = encode(AbortRequests(["a"]))
    with pytest.raises(ValidationError):
        decode(data, AddRequest)


def test_sampling_params_come_back_as_they_were() -> None:
    for params in PARAMS:
        assert params.plain_greedy in (True, False), "a cached property is no field"
        request = AddRequest("a", [1, 2], params, 10, frozenset({257}), -1, "salt")
        assert through_bytes(request) == request
