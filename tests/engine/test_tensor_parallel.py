"""Several ranks give what one gives, at every level, and share one artifact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusewright import LLM
from fusewright.compiler.artifacts.store import open_store
from fusewright.config import PASSES, EngineOptions, Hardware, UserError
from fusewright.engine.engine import Engine
from fusewright.engine.ranks.start import start_ranks
from fusewright.engine.recompile import recompile
from fusewright.engine.worker import startup
from fusewright.engine.worker.progress import Progress
from fusewright.graph_capture import GraphKind
from fusewright.model_executor.abacus.problems import held_out
from fusewright.model_executor.hf_config import model_folder, read_spec
from tests.engine.test_abacus import REQUESTS
from tests.engine.test_parity import MAX_LEN, OF_EXPERTS, LogitsRecorder, check, crowd, references
from tests.model_executor.tiny_models import BY_NAME

pytestmark = pytest.mark.usefixtures("warm", "no_engine_is_left")
SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4}
ABACUS: dict[str, Any] = {**SMALL, "max_num_seqs": 16, "max_model_len": 64}


def tiny(name: str, folder: Path, world: int, **options: Any) -> LLM:
    BY_NAME[name].save(folder)
    limits = {"max_num_batched_tokens": 16, "max_model_len": MAX_LEN}
    return LLM(str(folder), tensor_parallel_size=world, **SMALL, **limits, **options)


EVERY_PASS: dict[str, Any] = {"verify": True, "passes": PASSES}


@pytest.mark.product(6)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world", "options"),
    [
        ("llama_gqa", 2, {"optimization_level": 0}),
        ("qwen3_qk_norm", 2, {"optimization_level": 1}),
        # Two of the four ranks share a KV head, and one adds the biases.
        ("llama_bias", 4, {"optimization_level": 2, **EVERY_PASS}),
        ("mixtral", 4, {"optimization_level": 2, **EVERY_PASS}),
        ("qwen3_moe", 2, {"optimization_level": 1, "enable_expert_parallel": True}),
        ("qwen2_moe", 2, {"optimization_level": 3, "enable_expert_parallel": True, **EVERY_PASS}),
    ],
    ids=lambda value: value if isinstance(value, str | int) else f"O{value['optimization_level']}",
)
def test_ranks_give_the_tokens_and_logits_of_transformers(
    name: str,
    world: int,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dense models and mixtures at all levels, some with whole experts; 4 ranks at -O2."""
    with tiny(name, tmp_path, world, **options) as llm:
        recorder = LogitsRecorder(llm, monkeypatch)
        check(llm, recorder, references(name), f"{name}, {world} ranks")
        if name == "llama_gqa" and options["optimization_level"] == 0:
            crowd(scheduler := llm.engine.core.scheduler)
            check(llm, recorder, references(name, True), f"{name}, {world} ranks, preempted")
            assert scheduler.num_preemptions > 0
        matched = {report["name"]: report for report in llm.report()["passes"]}
        if "passes" in options:
            num_layers = BY_NAME[name].config().num_hidden_layers
            of_sums = matched["fuse_all_reduce_norm"]
            assert (of_sums["matched"], of_sums["missed"]) == (1 + 2 * num_layers, [])
            of_experts = matched["fuse_moe"]
            assert (of_experts["matched"] > 0, of_experts["missed"]) == (name in OF_EXPERTS, [])


@pytest.mark.product(3, of="ranks that compile")
def test_two_ranks_answer_as_one_from_one_artifact(tmp_path: Path) -> None:
    """Sampled, penalized and stopped requests too, with a step in flight.  A process has one engine
    of several ranks, until that is closed."""
    problems = held_out(30, seed=3)
    prompts = [problem.prompt for problem in problems]
    params = [REQUESTS[i % len(REQUESTS)] for i in range(len(prompts))]
    store = str(tmp_path)
    one_store = {"compile_cache_dir": store, **ABACUS}
    given = []
    for world, options in ((1, ABACUS), (2, one_store), (2, one_store)):
        with LLM("abacus", tensor_parallel_size=world, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            given.append([(o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in outputs])
            report = llm.report()
            if world == 2:
                with pytest.raises(UserError, match="has an engine with several ranks already"):
                    LLM("abacus", tensor_parallel_size=2, **one_store)
                with pytest.raises(UserError, match="compared on one rank"):
                    recompile(llm.engine, PASSES, Progress())  # type: ignore[arg-type]
    assert given[1] == given[0] == given[2]
    greedy = list(zip(outputs, problems, strict=True))[:: len(REQUESTS)]
    assert [o.outputs[0].text for o, _ in greedy] == [p.answer for _, p in greedy]
    assert not report["artifact"]["built"] and len(report["ranks"]["processes"]) == 1
    manifests = [listed.manifest for listed in open_store([store]).ls() if listed.manifest]
    found = [m.factors["config.parallel.tensor_parallel_size"] for m in manifests]
    assert found == ["2"], "one artifact for the two ranks"


def test_ranks_answer_right_from_fp8_weights_and_caches() -> None:
    """Each rank quantizes what it holds, but for layers whose part has no whole blocks: its heads,
    and whole experts."""
    problems = held_out(40, seed=3)
    fp8 = {"quantization": "fp8_block", "kv_cache_dtype": "fp8", "optimization_level": 0}
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with LLM("abacus-moe", **ranks, **fp8, **ABACUS) as llm:
        outputs = llm.generate([p.prompt for p in problems], REQUESTS[0], use_tqdm=False)
    wrong = [p for o, p in zip(outputs, problems, strict=True) if o.outputs[0].text != p.answer]
    assert len(wrong) <= 1, wrong


def test_ranks_capture_and_replay_the_same_graphs() -> None:
    hardware = Hardware(device="cpu", name="recorded", graphs="recording")
    options = EngineOptions(model="abacus", tensor_parallel_size=2, optimization_level=2, **ABACUS)
    engine = Engine(options, hardware)
    llm = LLM.from_engine(engine)
    captured = engine.graphs.num_captured
    assert engine.capture_next() and engine.graphs.num_captured == captured + 1
    problems = held_out(12, seed=5)
    outputs = llm.generate([p.prompt for p in problems], REQUESTS[0], use_tqdm=False)
    assert [o.outputs[0].text for o in outputs] == [p.answer for p in problems]
    assert any(kind == GraphKind.FULL for _, kind in engine.dispatcher.counters)
    llm.close()


def test_a_number_of_ranks_that_does_not_fit_is_named_before_anything_is_loaded() -> None:
    with pytest.raises(UserError, match=r"=3: num_attention_heads=4 is no .* over 1, 2, 4$"):
        LLM("abacus", tensor_parallel_size=3)
    with pytest.raises(UserError, match="tensor_parallel_size=0: expected at least 1"):
        LLM("abacus", tensor_parallel_size=0)
    gpus = Hardware(device="cuda", name="two GPUs", sm=90, num_devices=2)
    spec = read_spec(model_folder("abacus"))
    with pytest.raises(UserError, match=r"=4: a rank needs a GPU .* there are 2; .* with 1, 2$"):
        start_ranks(EngineOptions(tensor_parallel_size=4), spec, gpus)


def test_ranks_that_would_run_another_program_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = startup.artifact_key

    def of_another_torch(*args: Any) -> Any:
        key = real(*args)
        return replace(key, factors={**key.factors, "toolchain.torch": "1.0"})

    monkeypatch.setattr(startup, "artifact_key", of_another_torch)
    with pytest.raises(UserError, match=r"^rank 1 would run .*toolchain\.torch: 1\.0 -> 2\."):
        LLM("abacus", tensor_parallel_size=2, optimization_level=0, **ABACUS)
