"""Faults of a real device: memory that runs out, a capture that fails, a device that is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch

from fusewright import LLM, SamplingParams
from fusewright.engine.engine import Engine
from fusewright.engine.frontend.outputs import RequestOutput
from fusewright.graph_capture.backend import CudaGraphs
from fusewright.model_executor.abacus.problems import held_out

pytestmark = pytest.mark.gpu
PROBLEMS = held_out(12, seed=4)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def make(**options: Any) -> LLM:
    return LLM("abacus", max_num_seqs=64, max_model_len=512, enable_prefix_caching=False, **options)


def check_serves(llm: LLM) -> None:
    """Answers are right and every block is free."""
    outputs = llm.generate([p.prompt for p in PROBLEMS], GREEDY, use_tqdm=False)
    assert [(o.outputs[0].text, o.error) for o in outputs] == [(p.answer, None) for p in PROBLEMS]
    pool = llm.engine.core.scheduler.pool
    assert pool.num_free == pool.num_blocks


@pytest.fixture
def memory_limit() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("memory_limit")
def test_out_of_memory_in_a_step_ends_its_requests_alone() -> None:
    llm, last = make(), dict[str, RequestOutput]()
    engine = llm.engine

    def step() -> None:
        last.update({output.request_id: output for output in engine.step()})

    engine.add_request(PROBLEMS[0].prompt, LONG, "running")
    for _ in range(8):
        step()
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit)
    for name in ("large", "larger", "largest"):  # beyond the captured sizes: memory of its own
        engine.add_request({"prompt_token_ids": [5] * 440}, LONG, name)
    while engine.has_unfinished():
        step()
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert len(last) == 4
    for output in last.values():
        assert output.outputs[0].finish_reason == "error"
        assert (output.outputs[0].error or "").startswith("OutOfMemoryError: CUDA out of memory")
    check_serves(llm)


def _raise() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory in a capture")


def _allocate_too_much() -> None:
    torch.empty(1 << 44, dtype=torch.uint8, device="cuda")


def _allocate_too_much_and_wait() -> None:
    """Memory has run out, whatever else has gone wrong."""
    _synchronize_unnoticed()
    _allocate_too_much()


def _synchronize_unnoticed() -> None:
    with suppress(RuntimeError):
        torch.cuda.synchronize()


FULL = "out of memory while it was captured, "
WAITED = "operation not permitted when stream is capturing"
SPOILED = "operation failed due to a previous error during capture"


@pytest.mark.parametrize(
    ("spoil", "first", "kind", "reason"),
    [
        (_raise, False, "CaptureMemoryError: ", FULL),
        (_allocate_too_much, True, "CaptureMemoryError: ", FULL),
        (_allocate_too_much, False, "CaptureMemoryError: ", FULL),
        (_allocate_too_much_and_wait, False, "CaptureMemoryError: ", FULL),
        (torch.cuda.synchronize, True, "CaptureError: ", WAITED),
        (lambda: torch.ones(2, device="cuda").sum().item(), False, "CaptureError: ", WAITED),
        (_synchronize_unnoticed, True, "CaptureError: ", SPOILED),
        (_synchronize_unnoticed, False, "CaptureError: ", SPOILED),
    ],
    ids=[
        "raises",
        "no room",
        "no room at the end",
        "no room and waits",
        "waits",
        "reads a value",
        "waits unnoticed",
        "waits unnoticed at the end",
    ],
)
def test_a_capture_that_fails_ends_the_requests_of_its_step(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[], Any], first: bool, kind: str, reason: str
) -> None:
    """It fails with the stream in capture, before or behind what is captured; the size is captured
    when it is needed again."""
    llm = make()
    real = CudaGraphs.capture

    def spoiled(self: CudaGraphs, fn: Any) -> Any:
        def inside() -> Sequence[Any]:
            if first:
                spoil()
            outputs = fn()
            if not first:
                spoil()
            return outputs  # type: ignore[no-any-return]

        return real(self, inside)

    monkeypatch.setattr(CudaGraphs, "capture", spoiled)
    (output,) = llm.generate([PROBLEMS[0].prompt], GREEDY, use_tqdm=False)
    said = output.error or ""
    assert output.outputs[0].finish_reason == "error"
    assert said.startswith(kind) and reason in said
    remedy = "--cudagraph-mode NONE" if kind == "CaptureError: " else "--gpu-memory-utilization"
    assert said.endswith(remedy)
    monkeypatch.undo()
    check_serves(llm)
    assert isinstance(llm.engine, Engine)
    while llm.engine.capture_next():
        pass
    check_serves(llm)


_LOST = """
import sys
import torch
from fusewright.engine.worker.model_runner import ModelRunner
from fusewright.serve.cli import main

launch, launched = ModelRunner.launch, []

def lose(self, batch):
    launched.append(1)
    if len(launched) == 4:
        torch.zeros(2, device="cuda")[torch.full((1,), 1 << 20, device="cuda")]  # asserted there
    return launch(self, batch)

ModelRunner.launch = lose
sys.exit(main({argv}))
"""


def refusal(script: str, argv: list[str]) -> str:
    """The one line of an error with which the command ends, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", script.format(argv=argv)]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 2, (done.returncode, done.stderr[-2000:])
    assert "Traceback" not in done.stderr
    (line,) = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
    return line.removeprefix("error: ")


@pytest.mark.parametrize("prompts", [1, 3])
def test_a_lost_device_ends_the_command_with_one_line(prompts: int) -> None:
    argv = ["run", "abacus", "--max-model-len", "64", "--max-num-seqs", "4", "--temperature", "0"]
    for problem in PROBLEMS[:prompts]:
        argv += ["--prompt", problem.prompt]
    line = refusal(_LOST, argv)
    assert line.startswith("the device failed and runs nothing more: ")
    assert line.endswith("restart the engine")


_SMALL = """
import sys
import torch
from fusewright.serve.cli import main

total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction((64 << 20) / total)
sys.exit(main({argv}))
"""


def test_a_largest_step_without_room_ends_the_command_with_one_line() -> None:
    """Its gate and up projections alone take 92 MB."""
    argv = "run abacus --max-num-seqs 64 --max-model-len 512 --max-num-batched-tokens 32768"
    line = refusal(_SMALL, [*argv.split(), "--cudagraph-mode", "NONE", "--prompt", "1+1="])
    words = "max_num_batched_tokens=32768: a step of so many finds no room beside the weights, "
    assert line.startswith(words) and " GB free; lower it" in line
