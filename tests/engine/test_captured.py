"""Models without an adapter in the whole engine: equal tokens and logits to ``transformers``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusewright import LLM
from fusewright.config import EngineOptions, UserError
from fusewright.engine.check_model import EQUAL, check_model
from fusewright.engine.worker import proof
from fusewright.model_executor.captured import interfaces
from fusewright.model_executor.captured.twin import ProofError
from tests.engine.captured import save
from tests.engine.test_parity import (
    FEW_TOKENS,
    NUM_TOKENS,
    LogitsRecorder,
    Reference,
    check,
    crowd,
    prompts,
)

EAGER = ("gemma3_text", "gpt_oss", "opt", "deepseek_v3", "cohere", "llama4_text")
"""Two rope caches and windows; sinks, experts with biases; learned positions; values narrower than
keys; a parallel block; chunks and positions that attention reads."""


def start(folder: Path, level: int, device: str = "cpu", **options: Any) -> LLM:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128}
    return LLM(
        str(folder), optimization_level=level, device=device, dtype="float32", **sizes, **options
    )


@torch.inference_mode()
def reference(model: Any, prompt: tuple[int, ...], num_tokens: int) -> Reference:
    """Greedy tokens of an unmodified model, which sees all tokens anew each time."""
    ids, rows = list(prompt), []
    for _ in range(num_tokens):
        given = torch.tensor([ids], device=model.device)
        positions = torch.arange(len(ids), device=model.device)[None]
        logits = model(input_ids=given, position_ids=positions, use_cache=False).logits[0, -1]
        rows.append(logits.float().cpu())
        ids.append(int(rows[-1].argmax()))
    return Reference(prompt, ids[len(prompt) :], torch.stack(rows))


@pytest.mark.product(6)
@pytest.mark.parametrize("model_type", EAGER)
def test_tokens_and_logits_equal_transformers(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged batches in chunks at ``-O0``; the first type's requests preempt each other too."""
    crowded = model_type == EAGER[0]
    model = save(model_type, tmp_path)
    num_tokens = NUM_TOKENS if crowded else FEW_TOKENS
    expected = [reference(model, prompt, num_tokens) for prompt in prompts()]
    llm = start(tmp_path, 0)
    recorder = LogitsRecorder(llm, monkeypatch)
    scheduler = llm.engine.core.scheduler
    scheduler.step_limits = replace(scheduler.step_limits, max_num_batched_tokens=7)
    check(llm, recorder, expected, model_type)
    if crowded:
        crowd(scheduler)
        check(llm, recorder, expected, f"{model_type} preempted")
        assert scheduler.num_preemptions > 0


def test_a_router_of_groups_and_a_shared_expert_are_fused_and_equal() -> None:
    check = check_model("glm4_moe", 2)
    assert (check.outcome, check.why) == (EQUAL, "")
    assert check.sites["routers"] == check.sites["experts"] == [1, 1]
    assert not {"topk", "gather", "scatter", "masked_fill", "sigmoid"} & {*check.plain}


@pytest.mark.slow
def test_a_compiled_model_is_proven_and_the_proof_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rewrite is verified, and the logits are those of the library."""
    model = save("olmo2", tmp_path)
    expected = [reference(model, prompt, FEW_TOKENS) for prompt in prompts()]
    llm = start(tmp_path, 2, model_impl="transformers", verify=True)
    check(llm, LogitsRecorder(llm, monkeypatch), expected, "-O2")
    report = llm.engine.compiled.report
    assert 0 < report["proof"]["error"] < 1e-4
    assert report["proof"]["library"].startswith("transformers ")
    checks = {one["name"]: one["checks"] for one in report["passes"]}
    assert all(checks[name] for name in ("drop_batch", "rope_table", "fuse_rope_store"))


def test_a_start_whose_twin_differs_is_refused_and_names_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("olmo2", tmp_path)
    right = interfaces.attention

    def doubled(*args: Any, scaling: float | None = None, **others: Any) -> Any:
        return right(*args, scaling=2 * (scaling or 1.0), **others)

    monkeypatch.setattr(interfaces, "attention", doubled)
    with pytest.raises(ProofError, match=r"layers\.0\.self_attn\.o_proj"):
        start(tmp_path, 2, compile_cache=False)  # another test's artifact would be as good


def test_without_proof_no_twin_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("olmo2", tmp_path)
    monkeypatch.setattr(proof, "make_twin", lambda *args: pytest.fail("a twin was made"))
    start(tmp_path, 0, proof=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            "enable_expert_parallel: each expert of a model without an adapter",
        ),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2: a model without an adapter"),
        (
            {"quantization": "fp8", "tensor_parallel_size": 2},
            "tensor_parallel_size=2: layers in fp8 quantize their input, and a model without",
        ),
        ({"model_impl": "adapter"}, "model_impl=adapter: architecture 'OPTForCausalLM' has none"),
    ],
)
def test_what_captured_models_lack_is_refused_by_name(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save("opt", tmp_path)
    with pytest.raises(UserError, match=message):
        start(tmp_path, 0, **options)


def test_options_name_the_implementations() -> None:
    assert EngineOptions(model="x").model_impl == "auto"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "model_type", [*EAGER, "gemma2", "olmo2", "glm4", "phi3", "smollm3", "granite", "gpt2"]
)
def test_on_a_gpu_tokens_and_logits_equal_transformers(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save(model_type, tmp_path).cuda()
    expected = [reference(model, prompt, FEW_TOKENS) for prompt in prompts()]
    llm = start(tmp_path, 2, "cuda", num_gpu_blocks_override=64)
    check(llm, LogitsRecorder(llm, monkeypatch), expected, model_type)
