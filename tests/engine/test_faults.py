"""A step that fails ends its own requests; the others get their answers and no block is lost."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fusewright import LLM
from fusewright.config import NO_SLOT, EngineDeadError
from fusewright.engine.frontend.loop import EngineLoop
from fusewright.engine.frontend.outputs import RequestOutput
from fusewright.engine.messages.sampling_params import SamplingParams
from fusewright.engine.worker.model_runner import ModelRunner

from .toy import Setup, ToyRunner, check_invariants, solo
from .toy_slots import ToyStep

LONG = SamplingParams(max_tokens=20, ignore_eos=True)


@dataclass
class FaultyStep:
    """A step that ran but for its last part: nothing of it can be trusted."""

    step: ToyStep
    error: Exception

    @property
    def has_run(self) -> bool:
        return self.step.has_run

    def result(self) -> Any:
        self.step.result()
        raise self.error


@dataclass
class FaultyRunner(ToyRunner):
    """Fails at steps counted from 0: a failed launch writes no KV, a failed step wrong KV."""

    launches: dict[int, Exception] = field(default_factory=dict)
    results: dict[int, Exception] = field(default_factory=dict)
    lost: bool = False

    def launch(self, batch: Any) -> Any:
        number = len(self.batches)
        step = super().launch(batch)
        if number in self.launches:
            self.queue.remove(step)
            raise self.launches[number]
        if number in self.results:
            for entry in step.entries:
                entry.token_ids = [1 for _ in entry.token_ids]
                entry.feed = [NO_SLOT for _ in entry.feed]
            return FaultyStep(step, self.results[number])
        return step

    def check(self) -> None:
        super().check()
        if self.lost:
            raise RuntimeError("unspecified launch failure")


def faulty(setup: Setup, kind: type[FaultyRunner] = FaultyRunner, **faults: Any) -> EngineLoop:
    engine = setup.engine()
    engine.core.runner = setup.runner(kind, **faults)
    return engine


def run(engine: EngineLoop) -> dict[str, RequestOutput]:
    """To the end; what each request gave last."""
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.request_id not in last or not last[output.request_id].finished
            last[output.request_id] = output
        check_invariants(engine.core.scheduler)
    engine.step()
    assert all(output.finished for output in last.values())
    assert engine.core.scheduler.pool.num_free == engine.core.scheduler.pool.num_blocks
    return last


def failed(outputs: dict[str, RequestOutput]) -> set[str]:
    return {i for i, o in outputs.items() if o.outputs[0].finish_reason == "error"}


ERRORS = [RuntimeError("boom\nmore"), torch.OutOfMemoryError("CUDA out of memory")]


@pytest.mark.parametrize("error", ERRORS, ids=["exception", "out of memory"])
@pytest.mark.parametrize("where", ["launches", "results"])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_the_requests_of_a_failed_step_end_with_an_error(
    where: str, async_scheduling: bool, error: Exception
) -> None:
    """Two run when it fails; the third, which waits, is served."""
    setup = Setup(max_num_seqs=2, prefix_caching=True, async_scheduling=async_scheduling)
    engine = faulty(setup, **{where: {5: error}})
    for name in "abc":
        engine.add_request([1, 2, 3, 4, 5, 6], LONG, name)
    outputs = run(engine)
    assert failed(outputs) == {"a", "b"}
    right = solo([1, 2, 3, 4, 5, 6], LONG, 64).token_ids
    for name in "ab":
        (given,) = outputs[name].outputs
        assert given.error == f"{type(error).__name__}: {str(error).splitlines()[0]}"
        assert given.token_ids == right[: len(given.token_ids)] and len(given.token_ids) < 20
    assert outputs["c"].outputs[0].token_ids == right and outputs["c"].outputs[0].error is None


def test_a_step_behind_a_failed_one_is_computed_anew() -> None:
    """The second request starts one step later, on blocks that the failing step should have
    written."""
    setup = Setup(max_num_batched_tokens=64, prefix_caching=True)
    engine = faulty(setup, results={0: RuntimeError("boom")})
    engine.add_request([7] * 12, LONG, "a")
    engine.step()
    engine.add_request([7] * 12, LONG, "b")
    engine.step()
    assert engine.core.scheduler.num_prefix_hits > 0, "b shares what a should have written"
    outputs = run(engine)
    assert outputs["b"].outputs[0].token_ids == solo([7] * 12, LONG, 64).token_ids
    assert "a" not in outputs, "its error came with the second step"


def test_one_failed_output_of_several_ends_alone() -> None:
    engine = faulty(Setup(max_num_seqs=1), launches={0: RuntimeError("boom")})
    engine.add_request([1, 2], SamplingParams(n=2, max_tokens=3, ignore_eos=True), "pair")
    output = run(engine)["pair"]
    assert [c.finish_reason for c in output.outputs] == ["error", "length"]


@pytest.mark.product
@pytest.mark.parametrize("seed", range(20))
def test_random_faults_lose_no_block_and_spoil_no_answer(seed: int) -> None:
    rng = random.Random(seed)
    setup = Setup(
        num_blocks=16,
        max_num_seqs=4,
        prefix_caching=True,
        async_scheduling=rng.random() < 0.7,
        lazy=rng.random() < 0.5,
    )
    steps = rng.sample(range(150), 12)
    faults = {number: RuntimeError(f"step {number}") for number in steps}
    engine = faulty(
        setup,
        launches={n: e for n, e in faults.items() if n % 2},
        results={n: e for n, e in faults.items() if n % 2 == 0},
    )
    prompts = {f"{i}": [7] * rng.randint(1, 20) + [i] for i in range(60)}
    for name, prompt in prompts.items():
        engine.add_request(prompt, LONG, name, final_only=rng.random() < 0.5)
    outputs = run(engine)
    assert outputs.keys() == prompts.keys()
    assert 0 < len(failed(outputs)) < 50
    for name, prompt in prompts.items():
        (given,) = outputs[name].outputs
        right = solo(prompt, LONG, 64).token_ids
        if given.finish_reason == "error":
            assert given.token_ids == right[: len(given.token_ids)]
        else:
            assert given.token_ids == right


@pytest.mark.parametrize("where", ["launches", "results"])
def test_a_lost_device_ends_the_engine_with_one_message(where: str) -> None:
    error = RuntimeError("CUDA error: unspecified launch failure\nCUDA kernel errors might be …")
    engine = faulty(Setup(), lost=True, **{where: {3: error}})
    llm = LLM.from_engine(engine)
    message = (
        r"^the device failed and runs nothing more: RuntimeError: CUDA error: unspecified launch "
        r"failure; restart the engine$"
    )
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=message):
            llm.generate(["a", "b"], LONG, use_tqdm=False)
    with pytest.raises(EngineDeadError, match=message):
        engine.step()
    assert not engine.has_unfinished()
    assert engine.core.scheduler.pool.num_free == engine.core.scheduler.pool.num_blocks


@dataclass
class InterruptedRunner(FaultyRunner):
    """The user interrupts some launches, and some waits for steps, once each."""

    waits: set[int] = field(default_factory=set)

    def launch(self, batch: Any) -> Any:
        number = len(self.batches)
        step = super().launch(batch)
        if number in self.waits:
            wait = step.result

            def interrupted() -> Any:
                step.result = wait
                raise KeyboardInterrupt

            step.result = interrupted
        return step


@pytest.mark.parametrize("where", ["waits", "launches"])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_an_interrupt_costs_others_no_token(where: str, async_scheduling: bool) -> None:
    """One request is aborted by whoever interrupts; the other goes on as if nothing had been."""
    setup = Setup(prefix_caching=True, async_scheduling=async_scheduling)
    numbers = (4, 5, 6, 9)
    faults: Any = {n: KeyboardInterrupt() for n in numbers} if where == "launches" else {*numbers}
    engine = faulty(setup, InterruptedRunner, **{where: faults})
    for name in "ab":
        engine.add_request([1, 2, 3, 4, 5, 6], LONG, name)
    interrupts, last = 0, dict[str, RequestOutput]()
    while engine.has_unfinished():
        try:
            for output in engine.step():
                last[output.request_id] = output
        except KeyboardInterrupt:
            interrupts += 1
            engine.abort("a")
            if where == "launches":  # the step was theirs: both end
                engine.add_request([1, 2, 3, 4, 5, 6], LONG, f"c{interrupts}")
    assert interrupts == len(numbers)
    right = solo([1, 2, 3, 4, 5, 6], LONG, 64).token_ids
    served = "b" if where == "waits" else f"c{interrupts}"
    assert last[served].outputs[0].token_ids == right
    if where == "launches":
        assert last["b"].outputs[0].error == "KeyboardInterrupt: "
    engine.step()
    assert engine.core.scheduler.pool.num_free == engine.core.scheduler.pool.num_blocks


def test_a_listener_that_raises_does_not_repeat_a_step() -> None:
    engine = Setup().engine()
    engine.add_request([1, 2, 3], LONG, "a")
    calls = []

    def listen(tokens: Any) -> None:
        calls.append(tokens)
        if len(calls) == 3:
            raise ValueError("from outside")

    engine.on_tokens = listen
    given: list[int] = []
    for _ in range(40):
        try:
            for output in engine.step():
                given = output.outputs[0].token_ids
        except ValueError:
            assert len(calls) == 3
    assert given == solo([1, 2, 3], LONG, 64).token_ids


def test_a_failed_capture_ends_the_requests_that_needed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The real runner asks for the graph of a step before anything else."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    llm = LLM("abacus", optimization_level=0, device="cpu", dtype="float32", max_num_seqs=2)
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    right = llm.generate(["12+34="] * 3, greedy, use_tqdm=False)
    runner = llm.engine.core.runner
    assert isinstance(runner, ModelRunner)
    ensure, calls = runner.graphs.ensure, []

    def fail_once(dispatch: Any) -> None:
        calls.append(dispatch)
        if len(calls) == 2:
            raise RuntimeError("capture failed: operation not permitted")
        ensure(dispatch)

    monkeypatch.setattr(runner.graphs, "ensure", fail_once)
    outputs = llm.generate(["12+34="] * 3, greedy, use_tqdm=False)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["error", "error", "stop"]
    assert "capture failed" in (outputs[0].outputs[0].error or "")
    assert outputs[2].outputs[0].token_ids == right[2].outputs[0].token_ids
    pool = llm.engine.core.scheduler.pool
    assert pool.num_free == pool.num_blocks
