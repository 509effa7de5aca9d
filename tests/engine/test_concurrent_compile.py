"""Processes that start at once with one empty store: one compiles, both answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusewright.compiler.artifacts.store import Store
from tests.engine.start_process import begin, environment, result

PROCESSES = 2
SUMS = {"12+34=": "46", "905-46=": "859", "sort 5 3 9 1=": "1 3 5 9"}


@pytest.mark.thorough
def test_one_of_two_processes_compiles_and_both_answer(
    tmp_path: Path, device: torch.device
) -> None:
    store = tmp_path / "store"
    options = {
        "model": "abacus",
        "device": device.type,
        "optimization_level": 1,  # which compiles least
        "compile_cache_dir": [str(store)],
        "max_num_seqs": 4,
        "num_gpu_blocks_override": 64,
    }
    batch = [[prompt, {"temperature": 0.0, "max_tokens": 12}] for prompt in SUMS]
    env = environment(tmp_path)
    processes = [
        begin("start_all", env=env, cold=True, starts=[options], batches=[batch])
        for _ in range(PROCESSES)
    ]
    told = [result(process) for process in processes]
    answers = [[c["text"] for c in one["told"][0]["outputs"][0]] for one in told]
    assert answers == [[*SUMS.values()]] * PROCESSES
    artifacts = [one["told"][0]["artifact"] for one in told]
    assert sum(artifact["built"] for artifact in artifacts) == 1
    assert sum("torch._inductor" in one["loaded"] for one in told) <= 1
    (key,) = {artifact["key"] for artifact in artifacts}
    assert [path.name for path in (store / "artifacts").iterdir()] == [key]
    assert list((store / "tmp").iterdir()) == []
    found = Store([store]).load(store, key)
    assert found is not None
