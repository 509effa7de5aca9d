"""A step that no graph can hold lowers the mode, and a warning says so."""

from __future__ import annotations

import logging

import pytest

from fusewright import LLM, SamplingParams
from fusewright.compiler.run.program import Program, Step
from fusewright.config import CudagraphMode, Hardware
from fusewright.engine.worker.graph_mode import graph_mode
from fusewright.model_executor.abacus.problems import held_out

GPU = Hardware("cuda", "a GPU", sm=90, num_sms=132, graphs="cuda")
RECORDING = Hardware(device="cpu", name="recording", graphs="recording")


def program(attention: str) -> Program:
    names = ("3f2a", f"{attention}::paged_attention.default", "fw_native::linear.default")
    steps = [Step(name, lambda env: [], (), (), name == "3f2a") for name in names]
    return Program(steps, {"x": 0}, {}, 0)


@pytest.mark.parametrize(
    ("mode", "lowered"),
    [
        ("FULL_AND_PIECEWISE", "PIECEWISE"),
        ("FULL", "PIECEWISE"),
        ("FULL_DECODE_ONLY", "NONE"),
        ("PIECEWISE", "PIECEWISE"),
        ("NONE", "NONE"),
    ],
)
def test_attention_on_the_host_lowers_full_modes(
    mode: str, lowered: str, said: list[logging.LogRecord]
) -> None:
    asked = CudagraphMode(mode)
    assert graph_mode(asked, program("fw_native"), GPU).value == lowered
    assert len(said) == (mode != lowered)
    if said:
        line = said[0].getMessage()
        assert line.startswith("paged_attention by native reads lengths on the host")
        assert f"cudagraph_mode={mode} becomes {lowered}" in line
    said.clear()
    assert graph_mode(asked, program("fw_triton"), GPU) is asked
    assert graph_mode(asked, program("fw_native"), RECORDING) is asked
    assert not said


@pytest.mark.gpu
def test_native_attention_serves_by_piecewise_graphs() -> None:
    llm = LLM("abacus", attention_backend="native", max_num_seqs=4, max_model_len=64)
    problems = held_out(8, seed=2)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    outputs = llm.generate([p.prompt for p in problems], params, use_tqdm=False)
    assert [o.outputs[0].text for o in outputs] == [p.answer for p in problems]
    report = llm.report()
    assert report["graphs"]["mode"] == "PIECEWISE" and set(report["dispatch"]["decode"]) == {
        "PIECEWISE"
    }
