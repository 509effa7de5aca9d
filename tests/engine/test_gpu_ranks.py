"""A model over two GPUs: answers, graphs that hold collectives, and the loss of a rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from fusewright import LLM, SamplingParams
from fusewright.config import EngineDeadError
from fusewright.engine.worker import worker
from fusewright.graph_capture import GraphKind
from fusewright.model_executor.abacus.problems import held_out
from tests.engine.test_rank_faults import is_gone, others
from tests.serve.server_process import wait_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.whole_gpu,
    pytest.mark.usefixtures("no_engine_is_left"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
PROBLEMS = held_out(40, seed=3)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
LONG = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "max_num_seqs": 16,
    "max_model_len": 64,
    "gpu_memory_utilization": 0.3,
}


def answers(llm: LLM) -> list[str]:
    outputs = llm.generate([p.prompt for p in PROBLEMS], GREEDY, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}, {"dtype": "float32"}], ids=str)
def test_two_gpus_answer_right_from_graphs(options: dict[str, Any]) -> None:
    """Float32 sums go over NCCL, inside graphs too; the others over peer memory."""
    with LLM("abacus", **OPTIONS, **options) as llm:
        found = answers(llm)
        report = llm.report()
        assert any(kind == GraphKind.FULL for _, kind in llm.engine.dispatcher.counters)
    wrong = [p for text, p in zip(found, PROBLEMS, strict=True) if text != p.answer]
    assert len(wrong) <= bool(options.get("quantization")), wrong
    assert report["ranks"]["peer_memory"] == "connected"
    matched = {p["name"]: (p["matched"], p["missed"]) for p in report["passes"]}
    assert matched["fuse_all_reduce_norm"] == (11, [])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_lost_in_a_step_ends_the_engine_and_another_starts(number: signal.Signals) -> None:
    """Rank 0's kernels wait for a rank that is gone, and are ended."""
    with LLM("abacus", **OPTIONS) as llm:
        (pid,) = others(llm)
        llm.engine.on_tokens = lambda _: os.kill(pid, number)
        with pytest.raises(EngineDeadError, match=r"^rank 1 of 2 has ended"):
            llm.generate(["12+34="] * 3, LONG, use_tqdm=False)
        wait_for(lambda: is_gone(pid))
    torch.cuda.synchronize()
    with LLM("abacus", **OPTIONS) as again:
        assert answers(again) == [p.answer for p in PROBLEMS]


def follower() -> int:
    """The process of rank 1, while the engine starts."""
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, children.read_text().split()):
            if b"ranks.follower" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    raise AssertionError("rank 1 has no process")


@pytest.mark.parametrize("stage", ["warm_up", "capture"])
def test_a_rank_lost_in_the_start_ends_it(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, lost = getattr(worker, stage), []

    def lose(*args: Any) -> Any:
        lost.append(follower())
        os.kill(lost[0], signal.SIGKILL)
        return real(*args)

    monkeypatch.setattr(worker, stage, lose)
    with pytest.raises(EngineDeadError, match=r"^rank 1 of 2 has ended \(signal SIGKILL\)"):
        LLM("abacus", **OPTIONS)
    wait_for(lambda: is_gone(lost[0]))
    assert torch.ones(2, device="cuda").sum().item() == 2  # the device is free
