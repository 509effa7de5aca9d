"""In steady decode the host never waits for the device, but for the tokens of the step before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from fusewright import LLM, SamplingParams
from fusewright.engine.frontend.outputs import RequestOutput

pytestmark = pytest.mark.gpu
STEPS = 100
LONG: dict[str, Any] = {"max_tokens": STEPS + 25, "ignore_eos": True}
KINDS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.2, "seed": 3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
    "stop strings": {"temperature": 0.0, "stop": ["no such text", "nor this"]},
    "penalties": {
        "temperature": 0.7,
        "seed": 4,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
    },
    "least length": {"temperature": 0.8, "seed": 5, "min_tokens": STEPS + 20, "ignore_eos": False},
}
ALL = list(KINDS)


def steady(llm: LLM, kinds: list[str], *, watched: bool, num_steps: int = STEPS) -> dict[str, Any]:
    """Tokens of a request of each kind; the middle steps with every synchronization an error."""
    engine, last = llm.engine, dict[str, RequestOutput]()

    def step() -> None:
        for output in engine.step():
            last[output.request_id] = output

    for kind in kinds:
        engine.add_request("12+34=", SamplingParams(**(LONG | KINDS[kind])), kind)
    for _ in range(10):
        step()
    torch.cuda.set_sync_debug_mode("error" if watched else "default")
    try:
        for _ in range(num_steps):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(last) == len(kinds) and not any(output.finished for output in last.values())
    while engine.has_unfinished():
        step()
    assert all(output.error is None for output in last.values())
    return {kind: last[kind].outputs[0].token_ids for kind in kinds}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("abacus", max_num_seqs=8, max_model_len=160)


@pytest.mark.parametrize("kinds", [*([kind] for kind in ALL), ALL], ids=[*ALL, "all together"])
def test_steady_steps_never_synchronize(llm: LLM, kinds: list[str]) -> None:
    given = steady(llm, kinds, watched=True)
    assert given == steady(llm, kinds, watched=False)


def test_steps_with_drafts_of_the_device_never_synchronize() -> None:
    """Of each request two tokens a step at most, so none ends meanwhile."""
    config = {"method": "ngram", "num_speculative_tokens": 1, "adaptive": False}
    config |= {"prompt_lookup_max": 2, "prompt_lookup_min": 1}
    llm = LLM("abacus", max_num_seqs=32, max_model_len=160, speculative_config=config)
    given = steady(llm, ALL, watched=True, num_steps=40)
    assert given == steady(llm, ALL, watched=False, num_steps=40)
    report = llm.report()["drafts"]
    assert report["drafted"] > 100 and not report["error"]


@pytest.mark.parametrize(("method", "model"), [("eagle3", "eagle3"), ("draft_model", "draft")])
def test_passes_of_a_draft_model_never_synchronize(method: str, model: str) -> None:
    """A step is launched while the one before and its passes run, also for requests that sample."""
    config = {"method": method, "model": f"abacus-{model}", "num_speculative_tokens": 1}
    config |= {"adaptive": False}
    llm = LLM("abacus", max_num_seqs=32, max_model_len=160, speculative_config=config)
    given = steady(llm, ALL, watched=True, num_steps=40)
    assert given == steady(llm, ALL, watched=False, num_steps=40)
    report = llm.report()["drafts"]
    assert report["drafted"] > 100 and not report["error"]


def test_the_driver_sees_no_synchronization_either(llm: LLM) -> None:
    """Neither of the device nor of a stream; waiting for an event of the step before is meant."""
    for kind in ALL:
        llm.engine.add_request("12+34=", SamplingParams(**(LONG | KINDS[kind])), kind)
    for _ in range(10):
        llm.engine.step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        torch.cuda.synchronize()
        with record_function("steady"):
            for _ in range(20):
                llm.engine.step()
    for kind in ALL:
        llm.engine.abort(kind)
    llm.engine.step()
    events = profiler.events()
    (span,) = [e.time_range for e in events if e.name == "steady" and e.device_type.name == "CPU"]
    waits = [e for e in events if "Synchronize" in e.name]
    assert any(e.time_range.start < span.start for e in waits), "the profiler sees them"
    inside = {e.name for e in waits if span.start <= e.time_range.start <= span.end}
    assert inside <= {"cudaEventSynchronize"}, inside
