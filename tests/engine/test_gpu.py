"""What only a GPU can show: real graphs, real memory, float32 parity through real kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusewright import LLM
from fusewright.compiler.lowering.tune import NOISE
from fusewright.config import EngineOptions, UserError
from fusewright.engine.explain import explain_model
from tests.engine.test_abacus import GREEDY, PROBLEMS, answers
from tests.engine.test_parity import CHUNKS, MAX_LEN, LogitsRecorder, check, crowd, references
from tests.model_executor.tiny_models import BY_NAME

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    "name",
    [
        "llama_gqa",
        "llama_mqa",
        "qwen3_qk_norm",
        "mistral_window",
        "qwen2_window",
        "qwen2_bias_tied",
    ],
)
def test_tokens_and_logits_equal_transformers(
    name: str, level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32 on the GPU against transformers on the CPU, through graphs, chunks, preemption."""
    BY_NAME[name].save(tmp_path)
    llm = LLM(
        str(tmp_path),
        optimization_level=level,
        device="cuda",
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=max(CHUNKS),
        max_model_len=MAX_LEN,
        verify=True,
        cudagraph_capture_sizes=(1, 2, 4, 8, 64),
    )
    recorder = LogitsRecorder(llm, monkeypatch)
    scheduler = llm.engine.core.scheduler
    for chunk in CHUNKS:
        scheduler.step_limits = replace(scheduler.step_limits, max_num_batched_tokens=chunk)
        check(llm, recorder, references(name), f"chunk {chunk}")
    crowd(scheduler)
    check(llm, recorder, references(name, True), "preempted")
    assert scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    ("mode", "decode", "mixed"),
    [
        ("NONE", {"NONE"}, {"NONE"}),
        ("PIECEWISE", {"PIECEWISE"}, {"PIECEWISE"}),
        ("FULL_DECODE_ONLY", {"FULL"}, {"NONE"}),
        ("FULL_AND_PIECEWISE", {"FULL"}, {"PIECEWISE"}),
        ("FULL", {"FULL"}, {"FULL"}),
    ],
)
@pytest.mark.parametrize("lazy", [True, False])
def test_every_graph_mode_answers_the_same(
    mode: str, decode: set[str], mixed: set[str], lazy: bool
) -> None:
    options: dict[str, Any] = {"cudagraph_mode": mode, "max_num_batched_tokens": 64}
    options["lazy_capture"] = lazy
    if mode != "NONE":
        options["cudagraph_capture_sizes"] = (1, 2, 5, 8, 16, 40, 64)
    llm = LLM("abacus", max_num_seqs=16, max_model_len=64, **options)
    problems = PROBLEMS[:200]
    given = answers(llm, [p.prompt for p in problems], GREEDY)
    assert sum(a == p.answer for a, p in zip(given, problems, strict=True)) >= 198
    counters = llm.report()["dispatch"]
    assert set(counters["decode"]) == decode and set(counters["mixed"]) == mixed


def test_a_cache_larger_than_the_gpu_is_refused() -> None:
    with pytest.raises(UserError, match=r"KV cache: 9999999 blocks of 16 tokens take .* GB, more"):
        LLM("abacus", optimization_level=0, num_gpu_blocks_override=9_999_999)


def test_level_3_chooses_by_measurement() -> None:
    options: dict[str, Any] = {"optimization_level": 3, "max_num_seqs": 4, "max_model_len": 64}
    report = LLM("abacus", **options).report()
    times = next(t for call, t in report["tuned_us"].items() if call.startswith("add_rms_norm"))
    triton, native = times["triton"], times["native"]
    assert all(us > 0 for us in (*triton.values(), *native.values()))
    ratios = [native[rows] / triton[rows] for rows in triton]
    is_better = min(ratios) < 1 - NOISE and max(ratios) <= 1 + NOISE
    (choice,) = [c for c in report["choices"] if c.startswith("add_rms_norm")]
    assert choice.startswith(f"add_rms_norm -> {'native' if is_better else 'triton'}")
    _, told = explain_model(EngineOptions(model="abacus", **options))
    assert told.choices == report["choices"]
    assert f"artifact {report['artifact']['key']}" in told.notes[0]


@pytest.mark.whole_gpu
@pytest.mark.parametrize("lazy", [True, False])
def test_the_account_of_memory_agrees_with_the_driver(lazy: bool) -> None:
    llm = LLM("abacus", max_model_len=256, gpu_memory_utilization=0.5, lazy_capture=lazy)
    memory = llm.report()["memory"]
    assert memory["driver"] > 0 and memory["graphs"] > 0
    assert abs(memory["accounted"] - memory["driver"]) < 0.02 * memory["driver"]
    free, total = torch.cuda.mem_get_info()
    assert abs(total - free - memory["driver"]) < 0.02 * (total - free)


_FRESH = """
import json
from fusewright import LLM, SamplingParams
llm = LLM("abacus", max_model_len=256, gpu_memory_utilization=0.5, lazy_capture={lazy})
reports = [llm.report()["memory"]]
params = SamplingParams(temperature=0.0, max_tokens=8)
llm.generate(["12+34="] * 300, params, use_tqdm=False)
reports.append(llm.report()["memory"])
while llm.engine.capture_next():
    pass
reports.append(llm.report()["memory"])
print(json.dumps(reports))
"""


def in_a_fresh_process(lazy: bool) -> list[dict[str, int]]:
    """The memory that a process of its own reports: started, behind requests, with all graphs.

    The driver counts what every process on the GPU holds, so the reports are of no use if another
    one has come or gone meanwhile: a context alone is larger than what the test permits."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", _FRESH.format(lazy=lazy)]
    held = []
    for _ in range(3):
        before, _ = torch.cuda.mem_get_info()
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        after, _ = torch.cuda.mem_get_info()
        if before == after:
            reports: list[dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
            return reports
        held.append(before - after)
    pytest.fail(f"other processes took {held} bytes of this GPU while three were measured")


@pytest.mark.whole_gpu
@pytest.mark.parametrize("lazy", [True, False])
def test_in_a_fresh_process_the_account_closes_and_the_prediction_holds(lazy: bool) -> None:
    """Nothing has loaded kernels or made streams before, as when other tests ran in the process."""
    started, served, captured = in_a_fresh_process(lazy)
    for memory in (started, served, captured):
        assert abs(memory["accounted"] - memory["driver"]) < 0.015 * memory["driver"], memory
    # As it was predicted from a sample, but for the driver's pages of 2 MiB.
    predicted = captured["graphs_predicted"]
    assert predicted == started["graphs_predicted"]
    assert abs(captured["graphs"] - predicted) < 0.15 * predicted + (8 << 20), captured
