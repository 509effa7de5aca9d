"""Unmodified models of transformers under the backend: same outputs, every fusion they have."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fusewright.compiler.dynamo_backend import fusewright, reports
from tests.compiler.tiny_transformers import fresh_dynamo, tiny_model

# Sites of a layer; the last norm of the model is one more, as is its sum.
LLAMA = {"canonicalize_norm": 2, "canonicalize_rope": 2, "fuse_add_norm": 2, "fuse_act": 1}
# QK-norms read projections; Gemma's norms behind attention and MLP do too: no residual to absorb.
QWEN = LLAMA | {"canonicalize_norm": 4}
GEMMA_3 = LLAMA | {"canonicalize_norm": 6}
# Layer norms, and a GELU without a product: only the rotation is ours.
PHI = {"canonicalize_norm": -1, "canonicalize_rope": 2, "fuse_add_norm": 0, "fuse_act": 0}
MODELS = [
    ("Llama", {"num_hidden_layers": 2}, LLAMA),
    ("Mistral", {"sliding_window": 5}, LLAMA),
    ("Qwen3", {}, QWEN),
    ("Gemma", {}, LLAMA),
    ("Gemma3", {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 5}, GEMMA_3),
    ("Phi", {"partial_rotary_factor": 0.5}, PHI),
    ("Phi3", {}, LLAMA),
]  # fmt: skip


CACHES = {"Llama", "Mistral", "Gemma3"}
"""Those that also generate here: caches of all positions, of a window, and of both.  The others
have one of these caches, and differ in what the first forward shows."""

fresh = pytest.fixture(autouse=True)(fresh_dynamo)


def tiny(name: str, more: dict[str, Any]) -> Any:
    config = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    return tiny_model(config, f"{name}ForCausalLM", more)


def matched() -> list[dict[str, int]]:
    return [
        {one.name: one.matched for one in report.passes if one.name != "cleanup"}
        for report in reports()
    ]


@pytest.mark.product(6)
@pytest.mark.parametrize(("name", "more", "expected"), MODELS, ids=[name for name, *_ in MODELS])
def test_a_model_of_transformers_is_fused(
    name: str, more: dict[str, Any], expected: dict[str, int]
) -> None:
    model = tiny(name, more)
    prompt = torch.randint(3, 128, (2, 9))
    eager = model.forward
    compiled = torch.compile(eager, backend=fusewright, options={"rest": "eager"})
    want, got = model(prompt).logits, compiled(prompt).logits
    error = (got.float() - want.float()).abs().max() / want.float().abs().max()
    assert error < 0.02
    if name in CACHES:
        tokens = []
        for model.forward in (eager, compiled):
            tokens.append(model.generate(prompt, max_new_tokens=2, do_sample=False).tolist())
        assert tokens[0] == tokens[1]
    layers = model.config.num_hidden_layers
    in_all = {one: count * layers for one, count in expected.items()}
    in_all["canonicalize_norm"] += 1
    graphs = 3 if name in CACHES else 1  # forward, prefill, decode
    assert matched() == [in_all] * graphs
    assert not [site for report in reports() for one in report.passes for site in one.missed]


def test_generate_is_compiled_by_the_modules_own_compile() -> None:
    """``torch.compile`` wraps a module, whose ``generate`` is that of the module inside."""
    model = tiny("Llama", {})
    prompt = torch.randint(3, 128, (2, 9))
    wrapped = torch.compile(model, backend=fusewright, options={"rest": "eager"})
    tokens = wrapped.generate(prompt, max_new_tokens=2, do_sample=False)
    assert not reports() and "generate()" in str(reports())
    model.compile(backend=fusewright, options={"rest": "eager", "require_all_fusions": True})
    assert model.generate(prompt, max_new_tokens=2, do_sample=False).tolist() == tokens.tolist()
    assert [one["canonicalize_rope"] for one in matched()] == [2, 2]  # prefill, decode


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral", "Gemma", "Phi"])
def test_it_runs_on_a_gpu_through_inductor(name: str) -> None:
    """All that the passes leave is Inductor's, which rounds less often than eager: logits are as
    near to float32's, and tokens are its likeliest but for what rounding may decide."""
    more, expected = next((more, sites) for known, more, sites in MODELS if known == name)
    model = tiny(name, more).cuda()
    exact = copy.deepcopy(model).float()
    prompt = torch.randint(3, 128, (2, 9), device="cuda")
    eager = model(prompt).logits.float() - exact(prompt).logits
    model.forward = torch.compile(model.forward, backend=fusewright)
    fused = model(prompt).logits.float() - exact(prompt).logits
    assert fused.norm() < 1.25 * eager.norm()
    tokens = model.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert tokens.shape == (2, 12)
    scores = exact(tokens).logits[:, 8:-1]
    chosen = scores.gather(-1, tokens[:, 9:, None])[..., 0]
    assert (scores.amax(-1) - chosen).max() < 4 * eager.abs().max()
    layers = model.config.num_hidden_layers
    in_all = {one: count * layers for one, count in expected.items()}
    in_all["canonicalize_norm"] += 1
    assert matched() and all(found == in_all for found in matched())
    choices = [choice for report in reports() for choice in report.choices]
    assert choices and all("-> triton" in choice for choice in choices)
