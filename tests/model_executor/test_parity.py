"""The eager forward gives the logits of transformers, whatever the step's shape."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.loader import load_model
from fusewright.model_executor.models.decoder import DecoderModel
from fusewright.model_executor.spec import ModelSpec
from tests.model_executor.paged_steps import PagedSteps, random_tokens
from tests.model_executor.tiny_models import BY_NAME, TINY_MODELS, TinyModel

ATOL = 1e-4
every_tiny_model = pytest.mark.parametrize("tiny", TINY_MODELS, ids=lambda tiny: tiny.name)


def expected_logits(tiny: TinyModel, tokens: list[int]) -> Tensor:
    """Logits of every position, [len(tokens), vocab]."""
    with torch.inference_mode():
        return tiny.model()(torch.tensor([tokens])).logits[0]


def load(tiny: TinyModel, folder: Path, device: torch.device) -> DecoderModel:
    tiny.save(folder)
    return load_model(read_spec(folder), folder, device)


def check(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=ATOL, rtol=0)


@pytest.mark.product(6)
@every_tiny_model
def test_ragged_prefill_matches_transformers(
    tiny: TinyModel, tmp_path: Path, device: torch.device
) -> None:
    tokens = random_tokens(1, 5, 17, 70)
    steps = PagedSteps(load(tiny, tmp_path, device), tokens)
    logits = steps.step({i: len(t) for i, t in enumerate(tokens)})
    check(logits, torch.stack([expected_logits(tiny, t)[-1] for t in tokens]))


@pytest.mark.product(6)
@every_tiny_model
def test_chunks_mixed_with_decodes_match_transformers(
    tiny: TinyModel, tmp_path: Path, device: torch.device
) -> None:
    long, short = random_tokens(75, 20)
    steps = PagedSteps(load(tiny, tmp_path, device), [long, short], block_size=8)
    expected = [expected_logits(tiny, long), expected_logits(tiny, short)]
    chunks = [16, 7, 1, 30, 12, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    advances = [{1: 6, 0: chunks[0]}, *[{0: chunk, 1: 1} for chunk in chunks[1:]]]
    for advance in advances:
        logits = steps.step(advance)
        check(logits, torch.stack([expected[i][steps.done[i] - 1] for i in advance]))


@pytest.mark.parametrize("name", ["llama_mha_tied", "qwen2_window", "qwen2_moe"])
def test_stages_one_after_the_other_match_transformers(name: str, tmp_path: Path) -> None:
    """A layer a stage: the first, those between, the last."""
    BY_NAME[name].save(tmp_path)
    spec = read_spec(tmp_path)
    spec = replace(spec, pipeline_parallel_size=spec.num_layers)
    stages = [load_model(spec, tmp_path, "cpu", rank=rank) for rank in range(spec.num_layers)]

    def forward(x: Tensor, positions: Tensor, inputs: Any, kv_caches: list[Tensor]) -> Tensor:
        for stage, kv_cache in zip(stages, kv_caches, strict=True):
            x = stage(x, positions, inputs, [kv_cache])
        return x

    tokens = random_tokens(1, 17, 40)
    steps = PagedSteps(forward, tokens, spec=spec)
    logits = steps.step({i: len(t) - 1 for i, t in enumerate(tokens) if i})
    logits = steps.step(dict.fromkeys(range(3), 1))
    check(logits, torch.stack([expected_logits(BY_NAME[name], t)[-1] for t in tokens]))


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_padding_changes_no_logits(tmp_path: Path, device: torch.device, block_size: int) -> None:
    model = load(BY_NAME["mistral_window"], tmp_path, device)
    tokens = random_tokens(30, 11)
    plain = PagedSteps(model, tokens, block_size=block_size)
    padded = PagedSteps(model, tokens, block_size=block_size)
    for advance in ({0: 20, 1: 10}, {0: 1, 1: 1}):
        expected = plain.step(advance)
        rows = len(advance)
        # In the second step, as in a captured decode graph: as many tokens as sequences.
        got = padded.step(advance, padding=rows, skipped_rows=rows)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


FEATURES = {
    "llama_gqa": {"rms_norm_eps": 0.1},
    "mistral_window": {"sliding_windows": (0, 0)},
    "qwen2_window": {"sliding_windows": (8, 8, 8)},
    "llama_rope_linear": {"rope": {"factor": 2.0}},
    "llama_rope_llama3": {"rope": {"factor": 2.0}},
    "llama_rope_yarn": {"rope": {"attention_factor": 1.0}},
}


@pytest.mark.parametrize("name", FEATURES)
def test_parity_notices_a_wrong_setting(name: str, tmp_path: Path, device: torch.device) -> None:
    tiny = BY_NAME[name]
    tiny.save(tmp_path)
    changes = dict(FEATURES[name])
    spec = read_spec(tmp_path)
    if "rope" in changes:
        changes["rope"] = replace(spec.rope, **changes["rope"])
    wrong: ModelSpec = replace(spec, **changes)
    (tokens,) = random_tokens(70)
    logits = PagedSteps(load_model(wrong, tmp_path, device), [tokens]).step({0: 70})
    assert (logits[0] - expected_logits(tiny, tokens)[-1]).abs().max() > 100 * ATOL


@pytest.mark.product(6)
@every_tiny_model
def test_one_trace_serves_every_batch(
    tiny: TinyModel, tmp_path: Path, device: torch.device
) -> None:
    """Dynamo captures the forward whole; a break, or a size made static, would raise."""
    model = load(tiny, tmp_path, device)
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[object]) -> torch.fx.GraphModule:
        graphs.append(gm)
        return gm

    def run(ids: Tensor, positions: Tensor, inputs: Any, caches: Any) -> Tensor:
        of_groups = [tensor for group in inputs.groups for tensor in group]
        others = [value for value in inputs[1:] if isinstance(value, Tensor)]
        for tensor in (ids, positions, *of_groups, *others):
            torch._dynamo.mark_dynamic(tensor, 0)
        for group in inputs.groups:
            torch._dynamo.mark_dynamic(group.block_table, 1)
        return compiled(ids, positions, inputs, caches)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    tokens = random_tokens(100, 33, 20)
    eager, traced = PagedSteps(model, tokens), PagedSteps(model, tokens)
    traced.forward = run
    # Tracing takes sizes that are equal to stay equal: the first step's all differ.
    for advance in ({0: 5, 1: 4}, {0: 1, 1: 9, 2: 17}, {0: 1, 1: 1, 2: 1}, {0: 2, 2: 2}):
        torch.testing.assert_close(traced.step(advance), eager.step(advance))
    assert len(graphs) == 1
