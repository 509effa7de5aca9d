"""Stages of layers on ranks of their own give what one rank gives, each from its own program."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fusewright import LLM, SamplingParams
from fusewright.compiler.artifacts.store import open_store
from fusewright.config import EngineDeadError, EngineOptions, Hardware, UserError
from fusewright.engine.engine import Engine
from fusewright.engine.ranks.start import start_ranks
from fusewright.engine.ranks.torchrun import join_torchrun
from fusewright.engine.recompile import recompile
from fusewright.engine.worker.progress import Progress
from fusewright.engine.worker.source import artifact_key
from fusewright.engine.worker.startup import read_model
from fusewright.graph_capture import GraphKind
from fusewright.model_executor.hf_config import model_folder, read_spec
from fusewright.model_executor.spec import stage_of
from tests.engine.test_parity import MAX_LEN, LogitsRecorder, check, crowd, references
from tests.engine.test_rank_faults import LONG, is_gone
from tests.model_executor.tiny_models import BY_NAME
from tests.serve.server_process import wait_for

pytestmark = pytest.mark.usefixtures("warm", "no_engine_is_left")
TINY: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": MAX_LEN,
}


def recorded(options: EngineOptions) -> LLM:
    """An engine whose steps replay recorded graphs where its level captures any."""
    return LLM.from_engine(Engine(options, Hardware("cpu", "recorded", graphs="recording")))


@pytest.mark.product(2, of="ranks that compile")
@pytest.mark.slow
def test_two_stages_of_two_ranks_give_the_tokens_and_logits_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages of one layer and of two, three groups of KV caches, graphs replayed in every stage; an
    artifact a stage, and the loss of any rank ends all of them."""
    name, store = "qwen2_window", tmp_path / "store"
    BY_NAME[name].save(tmp_path)
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    llm = recorded(
        EngineOptions(model=str(tmp_path), compile_cache_dir=(str(store),), **sizes, **TINY)
    )
    recorder = LogitsRecorder(llm, monkeypatch)
    check(llm, recorder, references(name), f"{name}, 2 stages of 2 ranks")
    crowd(scheduler := llm.engine.core.scheduler)
    check(llm, recorder, references(name, True), f"{name}, 2 stages of 2 ranks, preempted")
    assert scheduler.num_preemptions > 0
    engine: Any = llm.engine
    assert {GraphKind.FULL, GraphKind.PIECEWISE} <= {k for _, k in engine.dispatcher.counters}
    manifests = [listed.manifest for listed in open_store([str(store)]).ls() if listed.manifest]
    ends = ("model.num_layers", "model.has_embedding", "model.has_head")
    assert sorted(tuple(m.factors[end] for end in ends) for m in manifests) == [
        ("1", "True", "False"),
        ("2", "False", "True"),
    ]
    told = llm.report()["ranks"]
    assert [told[size] for size in sizes] == [2, 2]
    processes = told["processes"]
    assert len(processes) == 3

    def lose(_: object) -> None:
        os.kill(processes[2], signal.SIGKILL)

    llm.engine.on_tokens = lose
    with pytest.raises(EngineDeadError, match=r"^rank 3 of 4 \(stage 1 of 2\) has ended"):
        llm.generate([[5, 6, 7]], LONG, use_tqdm=False)
    # Callers learn of it before the kernel has ended them.
    wait_for(lambda: all(is_gone(pid) for pid in processes))
    llm.close()


@pytest.mark.slow
def test_stages_give_the_tokens_and_logits_of_transformers_without_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is a mixture of experts at -O0; what one process alone can do is refused."""
    name = "qwen2_moe"
    BY_NAME[name].save(tmp_path)
    with LLM(str(tmp_path), pipeline_parallel_size=2, optimization_level=0, **TINY) as llm:
        check(llm, LogitsRecorder(llm, monkeypatch), references(name), f"{name}, 2 stages")
        params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, prompt_logprobs=1)
        (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        assert output.prompt_logprobs and len(output.outputs[0].logprobs or ()) == 3
        with pytest.raises(UserError, match=r"^pipeline_parallel_size=2: programs are compared on"):
            recompile(llm.engine, (), Progress())  # type: ignore[arg-type]


def test_stages_of_the_middle_that_are_alike_share_an_artifact() -> None:
    options = EngineOptions(model="abacus", pipeline_parallel_size=4)
    _, spec, config = read_model(options, Hardware("cpu", "one"))
    stages = [stage_of(spec, number) for number in range(4)]
    assert [(stage.first_layer, stage.num_layers) for stage in stages] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 2),
    ]
    keys = [artifact_key(stage, config) for stage in stages]
    assert keys[1] == keys[2] and len({key.digest for key in keys}) == 3


def test_sizes_that_do_not_fit_are_named_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UserError, match=r"^pipeline_parallel_size=6: .*layers=5; give 1 to 5$"):
        LLM("abacus", pipeline_parallel_size=6)
    with pytest.raises(UserError, match=r"^pipeline_parallel_size=0: expected at least 1"):
        LLM("abacus", pipeline_parallel_size=0)
    with pytest.raises(UserError, match=r"^record_expert_load with pipeline_parallel_size=2: "):
        LLM("abacus-moe", pipeline_parallel_size=2, record_expert_load=True)
    gpus = Hardware("cuda", "three GPUs", sm=90, num_devices=3)
    options = EngineOptions(tensor_parallel_size=2, pipeline_parallel_size=2)
    message = "^tensor_parallel_size=2 with pipeline_parallel_size=2: a rank needs a GPU .* are 3; "
    with pytest.raises(UserError, match=f"{message}.* with 1 x 1, 2 x 1, 1 x 2$"):
        start_ranks(options, read_spec(model_folder("abacus")), gpus)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"--nproc-per-node 4, or sizes whose product is 2$"):
        join_torchrun(2, 2)
