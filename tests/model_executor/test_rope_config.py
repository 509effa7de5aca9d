"""Every way of writing a rope gives the rotations of transformers; a kind not served is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fusewright.config import EngineOptions, UserError
from fusewright.config.check import check_limits
from fusewright.model_executor.hf_config import model_limits, read_spec
from fusewright.model_executor.loader import load_model
from fusewright.model_executor.spec import ModelSpec
from fusewright.ops.attention.rotary_cache import build_cos_sin_cache
from tests.model_executor.paged_steps import PagedSteps, random_tokens
from tests.model_executor.tiny_models import TinyModel

POSITIONS, ORIGINAL = 256, 64
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
}
SHORT, LONG = [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [8.0 + i for i in range(8)]
FACTORS = {"short_factor": SHORT, "long_factor": LONG}
BANDS = {"low_freq_factor": 1.5, "high_freq_factor": 3.0}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "llama3": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, **BANDS},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, "beta_fast": 20.0},
    "longrope": {"original_max_position_embeddings": ORIGINAL, **FACTORS},
    "proportional": {"partial_rotary_factor": 0.5, "factor": 2.0},
}
PLACES = {
    "rope_parameters": lambda kind, more: {
        "rope_parameters": {"rope_type": kind, "rope_theta": 777.0, **more}
    },
    "rope_scaling and rope_theta": lambda kind, more: {
        "rope_scaling": {"type": kind, **more},
        "rope_theta": 777.0,
    },
    "rope_theta in rope_scaling": lambda kind, more: {
        "rope_scaling": {"rope_type": kind, "rope_theta": 777.0, **more},
        "rope_theta": 5.0,
    },
    "rope_scaling before rope_parameters": lambda kind, more: {
        "rope_scaling": {"rope_type": kind, **more},
        "rope_parameters": {"rope_type": "linear", "factor": 9.0, "rope_theta": 5.0},
    },
    "without theta": lambda kind, more: {"rope_parameters": {"rope_type": kind, **more}},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "empty": {"rope_scaling": {}, "rope_parameters": {}},
    "null": {"rope_scaling": None, "rope_parameters": None},
    "theta alone": {"rope_theta": 777.0},
    "no type": {"rope_parameters": {"rope_theta": 777.0}},
    "partial under default": {"partial_rotary_factor": 0.5},
    "partial in the section": {"rope_parameters": {"partial_rotary_factor": 0.5}},
    "partial beside proportional": {
        "rope_parameters": {"rope_type": "proportional"},
        "partial_rotary_factor": 0.25,
    },
    "original beside the section": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "original_max_position_embeddings": 32,
    },
    "original at both places": {
        "rope_scaling": KINDS["yarn"] | {"rope_type": "yarn"},
        "original_max_position_embeddings": 32,
    },
    "original left out": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "yarn's factor null": {"rope_scaling": KINDS["yarn"] | {"rope_type": "yarn", "factor": None}},
    "longrope's factor": {"rope_scaling": KINDS["longrope"] | {"type": "longrope", "factor": 8.0}},
    "longrope, not stretched": {"rope_scaling": FACTORS | {"type": "longrope"}},
    "longrope, original beside": {
        "rope_scaling": FACTORS | {"type": "longrope"},
        "original_max_position_embeddings": 32,
    },
}
for at, place in PLACES.items():
    VARIANTS |= {f"{kind}, {at}": place(kind, more) for kind, more in KINDS.items()}


def read(folder: Path, changes: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return read_spec(folder)


@pytest.mark.product
@pytest.mark.parametrize("variant", VARIANTS)
def test_rotations_equal_transformers_at_all_positions_served(variant: str, tmp_path: Path) -> None:
    spec = read(tmp_path, VARIANTS[variant])
    rotary = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    served = min(spec.max_position_embeddings, POSITIONS)
    cos, sin = (t[0] for t in rotary(torch.zeros(1), torch.arange(served)[None]))
    ours = build_cos_sin_cache(spec.rope, spec.head_dim, served)
    theirs = torch.cat((cos[:, : cos.shape[1] // 2], sin[:, : sin.shape[1] // 2]), dim=-1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional"])
def test_logits_equal_transformers_up_to_the_last_position(kind: str, tmp_path: Path) -> None:
    rope = {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **KINDS[kind]}}
    tiny = TinyModel(f"rope {kind}", "Llama", {"max_position_embeddings": 128, **rope})
    theirs = tiny.save(tmp_path)
    spec = read_spec(tmp_path)
    assert spec.max_position_embeddings == (ORIGINAL if kind == "longrope" else 128)
    tokens = random_tokens(spec.max_position_embeddings, 20)
    logits = PagedSteps(load_model(spec, tmp_path, "cpu"), tokens).step(
        {i: len(prompt) for i, prompt in enumerate(tokens)}
    )
    with torch.inference_mode():
        expected = [theirs(torch.tensor([prompt])).logits[0, -1] for prompt in tokens]
    torch.testing.assert_close(logits, torch.stack(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("kind", "served"), [("dynamic", POSITIONS), ("longrope", ORIGINAL)])
def test_more_positions_than_can_be_exact_are_refused_with_the_reason(
    kind: str, served: int, tmp_path: Path
) -> None:
    spec = read(tmp_path, PLACES["rope_parameters"](kind, KINDS[kind]))
    assert spec.max_position_embeddings == served
    limits = model_limits(spec)
    check_limits(EngineOptions(max_model_len=served), limits)
    with pytest.raises(UserError, match=f"positions .beyond .* rope type '{kind}' has other"):
        check_limits(EngineOptions(max_model_len=served + 1), limits)
    said = [note for note in spec.notes if f"{served} of {POSITIONS} positions are served" in note]
    assert len(said) == (served < POSITIONS)


@pytest.mark.parametrize("place", [{}, {"rope_parameters": {"rope_type": "default"}}])
def test_partial_rotation_that_is_not_used_is_said(place: dict[str, Any], tmp_path: Path) -> None:
    spec = read(tmp_path, {"partial_rotary_factor": 0.5, **place})
    assert spec.rope.partial_rotary_factor == 1
    assert ["partial_rotary_factor is 0.5" in note for note in spec.notes] == [True]
    assert not read(tmp_path, {"partial_rotary_factor": 1.0, **place}).notes


LAYERS = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_theta": 1e6}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rope_parameters": LAYERS}, "rope_parameters.full_attention is {"),
    ({"rope_scaling": {"type": "linear", "factor": 2, "partial_rotary_factor": 0.5}}, "is 0.5;"),
    ({"rope_scaling": {"type": "yarn", "factor": 2}, "partial_rotary_factor": 0.5}, "is 0.5;"),
    ({"rope_scaling": {"type": "yarn"}}, "has no rope_scaling.factor"),
    ({"rope_scaling": {"type": "dynamic"}}, "has no rope_scaling.factor"),
    ({"rope_scaling": {"type": "longrope", "long_factor": LONG}}, "short_factor is None"),
    ({"rope_scaling": {"type": "longrope", "short_factor": SHORT[1:]}}, "a list of 8 numbers"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [0] * 8}}, "a list of 8 numbers"),
    ({"rope_scaling": {"type": "longrope", "short_factor": ["1"] * 8}}, "a list of 8 numbers"),
    ({"rope_scaling": {"type": "mrope"}}, "type is 'mrope'; expected one of default, linear"),
    (
        {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 2.0}},
        "partial_rotary_factor is 2.0",
    ),
]


@pytest.mark.parametrize(("changes", "expected"), REFUSED)
def test_what_is_not_served_is_refused_by_name(
    changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, changes)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
