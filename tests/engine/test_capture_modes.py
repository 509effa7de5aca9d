"""The engine through captured graphs, on the recording backend, which replays stale inputs as a
real graph would: every mode gives what no graphs give."""

from __future__ import annotations

from typing import Any

import pytest

from fusewright import SamplingParams
from fusewright.config import EngineOptions, Hardware
from fusewright.engine.engine import Engine
from fusewright.engine.llm import LLM
from fusewright.model_executor.abacus.problems import held_out
from fusewright.serve.console.report import summary

PROBLEMS = held_out(24, seed=5)
RECORDING = Hardware(device="cpu", name="recording", graphs="recording")


def make(mode: str, **options: Any) -> LLM:
    settings = {"max_num_seqs": 5, "max_model_len": 64, "dtype": "float32", **options}
    if mode != "NONE":
        settings["cudagraph_capture_sizes"] = (1, 2, 5, 8, 16, 40)
    return LLM.from_engine(Engine(EngineOptions(cudagraph_mode=mode, **settings), RECORDING))


def make_level(mode: str, level: int, **options: Any) -> LLM:
    return make(mode, optimization_level=level, **options)


def answers(llm: LLM) -> list[str]:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    outputs = llm.generate([p.prompt for p in PROBLEMS], params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


@pytest.mark.product(2)
@pytest.mark.parametrize(
    ("mode", "decode", "mixed"),
    [
        ("NONE", {"NONE"}, {"NONE"}),
        ("PIECEWISE", {"PIECEWISE"}, {"PIECEWISE", "NONE"}),
        ("FULL_DECODE_ONLY", {"FULL"}, {"NONE"}),
        ("FULL_AND_PIECEWISE", {"FULL"}, {"PIECEWISE", "NONE"}),
        ("FULL", {"FULL"}, {"FULL", "NONE"}),
    ],
)
def test_every_mode_answers_the_same(mode: str, decode: set[str], mixed: set[str]) -> None:
    llm = make(mode)
    assert answers(llm) == [p.answer for p in PROBLEMS]
    counters = llm.report()["dispatch"]
    assert set(counters["decode"]) == decode and set(counters["mixed"]) == mixed


def test_a_prompt_by_itself_replays_one_graph() -> None:
    llm = make("FULL_AND_PIECEWISE", max_num_batched_tokens=8)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    for problem in PROBLEMS[:6]:  # of one chunk or two
        (output,) = llm.generate([problem.prompt], params, use_tqdm=False)
        assert output.outputs[0].text == problem.answer
    counters = llm.report()["dispatch"]
    assert set(counters["mixed"]) == {"FULL"} and counters["mixed"]["FULL"] > 6


@pytest.mark.product(2)
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL"])
def test_modes_hold_with_small_chunks_and_small_caches(mode: str) -> None:
    """Chunks put prefill and decode into one step; a cache of 5 blocks preempts."""
    llm = make(mode, max_num_batched_tokens=7, num_gpu_blocks_override=7, block_size=8)
    assert answers(llm) == [p.answer for p in PROBLEMS]
    assert llm.engine.core.scheduler.num_preemptions > 0


def test_stale_inputs_are_noticed() -> None:
    """The recording backend is no rubber stamp: a step that skips its write repeats old tokens."""
    llm = make("FULL_AND_PIECEWISE")
    runner = llm.engine.core.runner
    run, calls = runner.ops, []

    def sometimes(name: str, *args: Any) -> None:
        calls.append(1)
        if len(calls) % 5:
            run(name, *args)

    runner.ops = sometimes
    assert answers(llm) != [p.answer for p in PROBLEMS]


@pytest.mark.product(2)
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL"])
def test_graphs_captured_while_serving_answer_as_those_captured_before(mode: str) -> None:
    """A step captures the graph it needs; between steps the engine may capture one more."""
    eager = make(mode, lazy_capture=False)
    before = eager.report()["graphs"]
    assert before["pending"] == 0 and before["captured"] > 6
    lazy = make(mode)
    start = lazy.report()["graphs"]
    assert 0 < start["captured"] <= 2
    assert start["captured"] + start["pending"] == before["captured"]
    step, captured = lazy.engine.step, []

    def counting() -> Any:
        graphs = lazy.report()["graphs"]["captured"]
        outputs = step()
        captured.append(lazy.report()["graphs"]["captured"] - graphs)
        if len(captured) > 12:  # at rest, so to speak
            lazy.engine.capture_next()  # type: ignore[attr-defined]
        return outputs

    lazy.engine.step = counting  # type: ignore[method-assign]
    assert answers(lazy) == answers(eager) == [p.answer for p in PROBLEMS]
    assert max(captured) == 1 and lazy.report()["graphs"]["pending"] == 0


MIXED = [
    SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=24),
    SamplingParams(temperature=1.5, seed=7, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.0, logprobs=3, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0.0, min_tokens=8, max_tokens=12),
]


@pytest.mark.product
@pytest.mark.parametrize(
    ("mode", "level"), [("NONE", 1), ("PIECEWISE", 1), ("FULL_AND_PIECEWISE", 2), ("FULL", 2)]
)
def test_greedy_and_other_requests_share_an_engine(mode: str, level: int) -> None:
    """Each request of a batch gets what it would get alone, through chunks and preemption."""
    problems = PROBLEMS[: 2 * len(MIXED)]
    params = MIXED * 2
    settings = {"max_num_batched_tokens": 7, "num_gpu_blocks_override": 6, "block_size": 8}
    llm = make_level(mode, level, **settings)
    prompts = [p.prompt for p in problems]
    together = llm.generate(prompts, params, use_tqdm=False)
    assert llm.engine.core.scheduler.num_preemptions > 0
    for prompt, asked, output in zip(prompts, params, together, strict=True):
        (alone,) = llm.generate(prompt, asked, use_tqdm=False)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        assert (output.outputs[0].logprobs is None) == (asked.logprobs is None)


def test_steps_beyond_the_sizes_are_in_the_report() -> None:
    """24 prompts of several tokens in one step are more than the 40 that were captured."""
    llm = make("FULL_AND_PIECEWISE", max_num_seqs=24, max_num_batched_tokens=300)
    assert answers(llm) == [p.answer for p in PROBLEMS]
    report = llm.report()
    outside = report["graphs"]["outside"]["mixed"]
    assert outside["steps"] == report["dispatch"]["mixed"]["NONE"] > 0
    assert outside["most_tokens"] > 40
    said = f"{outside['steps']} beyond the captured sizes, up to {outside['most_tokens']} tokens"
    assert said in summary(report)
