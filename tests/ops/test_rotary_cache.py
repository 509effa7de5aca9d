"""The rotary tables against Hugging Face transformers, and their refusals."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fusewright.config.rope import ROPE_KINDS, STRETCHED_KINDS, RopeParameters
from fusewright.ops import rotary_embedding
from fusewright.ops.attention.rotary_cache import build_cos_sin_cache, inverse_frequencies

MAX_POSITION = 2048
OURS = {
    "rope_type": "kind",
    "rope_theta": "theta",
    "original_max_position_embeddings": "original_max_position",
}


def ours(theirs: dict[str, Any]) -> RopeParameters:
    """Our parameters of Hugging Face's ``rope_parameters``."""
    given = {OURS.get(name, name): value for name, value in theirs.items()}
    given.pop("long_factor", None)
    if "short_factor" in given:
        given["short_factor"] = tuple(given["short_factor"])
    return RopeParameters(**given)


def yarn(**more: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, **more}


def llama3(theta: float, factor: float, original: int, low: float, high: float) -> dict[str, Any]:
    bands = {"low_freq_factor": low, "high_freq_factor": high}
    stretched = {"factor": factor, "original_max_position_embeddings": original}
    return {"rope_type": "llama3", "rope_theta": theta, **stretched, **bands}


SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "theta": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "linear partial": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    "llama3": llama3(5e5, 8.0, 8192, 1.0, 4.0),
    "llama3, all bands": llama3(1e4, 32.0, 64, 1.5, 2.5),
    "yarn": yarn(),
    "yarn, betas": yarn(beta_fast=16.0, beta_slow=2.0),
    "yarn, attention factor": yarn(attention_factor=0.7),
    "yarn, mscale": yarn(mscale=1.2, mscale_all_dim=0.8),
    "yarn, mscale alone": yarn(mscale=1.2),
    "yarn, not truncated": yarn(truncate=False),
    "yarn partial": yarn(partial_rotary_factor=0.25),
    # Rotations that end the ramp behind the last dimension, before the first, and at one dimension.
    "yarn, ramp beyond the head": yarn(rope_theta=10.0, beta_fast=200.0, beta_slow=0.5),
    "yarn, ramp from the first dimension": yarn(beta_fast=500.0, beta_slow=40.0),
    "yarn, a step": yarn(beta_fast=900.0, beta_slow=100.0),
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "proportional": {
        "rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 1.5,
    },
    "proportional, whole": {"rope_type": "proportional"},
}  # fmt: skip


@pytest.mark.product
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", SCALINGS)
def test_table_equals_transformers(name: str, head_dim: int) -> None:
    parameters = ours(SCALINGS[name])
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_theta": 10000.0, **SCALINGS[name]},
    )
    rotary = LlamaRotaryEmbedding(config)
    positions = torch.arange(MAX_POSITION)[None]
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32), positions)
    table = build_cos_sin_cache(parameters, head_dim, MAX_POSITION)
    half = parameters.rotary_dim(head_dim) // 2
    assert table.shape == (MAX_POSITION, 2 * half)
    torch.testing.assert_close(table[:, :half], cos[0, :, :half], rtol=0, atol=1e-6)
    torch.testing.assert_close(table[:, half:], sin[0, :, :half], rtol=0, atol=1e-6)
    assert parameters.cos_sin_scale() == pytest.approx(rotary.attention_scaling, abs=1e-6)


def draw(kind: str, head_dim: int, rng: random.Random) -> dict[str, Any]:
    """Hugging Face's ``rope_parameters`` of a kind, none at its default."""
    drawn: dict[str, Any] = {"rope_theta": rng.choice([8.0, 1e3, 5e5, 1e7])}
    if kind != "default":
        drawn["factor"] = rng.choice([1.0, 1.5, 7.0, 40.0])
    if kind in STRETCHED_KINDS:
        drawn["original_max_position_embeddings"] = rng.choice([4, 60, 500, 4000, 10**6])
    if kind == "llama3":
        low = rng.uniform(0.5, 4)
        drawn |= {"low_freq_factor": low, "high_freq_factor": low + rng.uniform(0.5, 8)}
    if kind == "yarn":
        slow = rng.uniform(0.01, 60)
        drawn |= {"beta_slow": slow, "beta_fast": slow * rng.uniform(1, 50)}
        drawn["truncate"] = rng.random() < 0.5
        mscales = {"mscale": 0.7, "mscale_all_dim": 1.3}
        drawn |= {name: mscales[name] for name in mscales if rng.random() < 0.6}
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            drawn[name] = [rng.uniform(1, 60) for _ in range(head_dim // 2)]
    if kind in ("yarn", "longrope") and rng.random() < 0.3:
        drawn["attention_factor"] = rng.uniform(0.5, 2)
    if kind == "proportional":
        drawn["partial_rotary_factor"] = rng.uniform(0.05, 1)
    return drawn


@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_frequencies_of_any_parameters_equal_transformers(kind: str) -> None:
    rng = random.Random(kind)
    for _ in range(100):
        head_dim = rng.choice([16, 64, 96, 128])
        drawn = draw(kind, head_dim, rng)
        config = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            max_position_embeddings=MAX_POSITION,
            rope_parameters={"rope_type": kind, **drawn},
        )
        theirs = LlamaRotaryEmbedding(config)
        parameters = ours({"rope_type": kind, **drawn})
        frequencies = inverse_frequencies(parameters, parameters.rotary_dim(head_dim))
        torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=2e-6, atol=0, msg=str(drawn))
        assert parameters.cos_sin_scale() == pytest.approx(theirs.attention_scaling, rel=1e-9)
        angle = build_cos_sin_cache(parameters, head_dim, 2)[1, 0].item()
        assert angle == pytest.approx(math.cos(frequencies[0]) * parameters.cos_sin_scale())


def test_longrope_wants_a_factor_for_each_frequency() -> None:
    parameters = RopeParameters(kind="longrope", short_factor=(1.0,), original_max_position=8)
    with pytest.raises(ValueError, match="has 1 numbers, expected 8, half of rotary_dim 16"):
        build_cos_sin_cache(parameters, 16, 4)


def test_frequencies_do_not_depend_on_the_position() -> None:
    short = build_cos_sin_cache(ours(yarn()), 64, 10)
    long = build_cos_sin_cache(ours(yarn()), 64, 1000)
    assert torch.equal(short, long[:10])


def test_a_rotation_keeps_dot_products_of_equal_distance(device: torch.device) -> None:
    cache = build_cos_sin_cache(RopeParameters(), 64, 200).to(device)
    q = torch.randn(1, 1, 64, device=device).expand(2, 1, 64)
    k = torch.randn(1, 1, 64, device=device).expand(2, 1, 64)
    near = torch.tensor([3, 103], dtype=torch.int32, device=device)
    far = torch.tensor([10, 110], dtype=torch.int32, device=device)
    rotated_q, _ = rotary_embedding(near, q, k, cache)
    _, rotated_k = rotary_embedding(far, q, k, cache)
    scores = (rotated_q * rotated_k).sum(-1).flatten()
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"kind": "su"}, "su"),
        ({"kind": "longrope", "original_max_position": 8}, "short_factor"),
        ({"kind": "longrope", "short_factor": (1.0,)}, "original_max_position"),
        ({"theta": 1.0}, "theta"),
        ({"kind": "linear", "factor": 0.5}, "factor"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 1.25}, "partial_rotary_factor"),
        ({"kind": "yarn", "factor": 2.0}, "original_max_position"),
        ({"kind": "llama3", "factor": 2.0}, "original_max_position"),
        (
            {"kind": "llama3", "original_max_position": 8, "high_freq_factor": 1.0},
            "high_freq_factor",
        ),
    ],
)
def test_bad_parameters_are_named(bad: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RopeParameters(**bad)


def test_the_smallest_table_has_one_frequency_at_one_position() -> None:
    assert build_cos_sin_cache(RopeParameters(theta=1.5), 2, 1).tolist() == [[1.0, 0.0]]


def test_odd_rotary_dim_and_empty_table_are_refused() -> None:
    with pytest.raises(ValueError, match="rotary_dim 5"):
        build_cos_sin_cache(RopeParameters(partial_rotary_factor=0.5), 10, 4)
    with pytest.raises(ValueError, match="max_position is 0"):
        build_cos_sin_cache(RopeParameters(), 64, 0)
    q = torch.zeros(1, 1, 8)
    with pytest.raises(ValueError, match="rotary_dim 16"):
        rotary_embedding(torch.zeros(1, dtype=torch.int32), q, q, torch.zeros(4, 16))
