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

PROBLEMS = held_out(24, seed=5)
RECORDING = Hardware(device="cpu", name="recording", graphs="recording")


def make(mode: str, **options: Any) -> LLM:
    settings = {"max_num_seqs": 5, "max_model_len": 64, "dtype": "float32", **options}
    if mode != "NONE":
        settings["cudagraph_capture_sizes"] = (1, 2, 5, 8, 16, 40)
    return LLM.from_engine(Engine(EngineOptions(cudagraph_mode=mode, **settings), RECORDING))


def answers(llm: LLM) -> list[str]:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    outputs = llm.generate([p.prompt for p in PROBLEMS], params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


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


def test_modes_hold_with_small_chunks_and_small_caches() -> None:
    """Chunks put prefill and decode into one step; a cache of 5 blocks preempts."""
    for mode in ("FULL_AND_PIECEWISE", "FULL"):
        llm = make(mode, max_num_batched_tokens=7, num_gpu_blocks_override=7, block_size=8)
        assert answers(llm) == [p.answer for p in PROBLEMS]
        assert llm.engine.scheduler.num_preemptions > 0


def test_stale_inputs_are_noticed() -> None:
    """The recording backend is no rubber stamp: a step that skips its upload repeats old tokens."""
    llm = make("FULL_AND_PIECEWISE")
    buffers = llm.engine.runner._buffers
    upload, calls = buffers.upload, []

    def sometimes(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) % 5:
            upload(*args, **kwargs)

    buffers.upload = sometimes
    assert answers(llm) != [p.answer for p in PROBLEMS]


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL"])
def test_graphs_captured_while_serving_answer_as_those_captured_before(mode: str) -> None:
    """A step captures the graph it needs; between steps the engine may capture one more."""
    eager = make(mode, lazy_capture=False)
    before = eager.report()["graphs"]
    assert before["pending"] == 0 and before["captured"] > 6
    lazy = make(mode)
    start = lazy.report()["graphs"]
    assert 0 < start["captured"] <= 2 and sum(start.values()) == before["captured"]
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
