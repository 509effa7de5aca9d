"""Twins: what a shrunk configuration keeps, and that its sizes let mistakes show."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fusewright.model_executor.captured.default_configs import default_config
from fusewright.model_executor.captured.shrink import randomize, shrunk
from tests.model_executor.captured.released_configs import RELEASED

TOKENS = 40
CANNOT_BE_BUILT = {
    "gemma3n": "its vision tower needs timm",
    "gemma4_assistant": "reads the hidden states of another model",
    "gemma4_unified_assistant": "reads the KV cache of another model",
    "musicgen": "a composite that is no text model",
    "musicgen_melody": "a composite that is no text model",
}
SAMPLE = random.Random(47).sample(
    sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - CANNOT_BE_BUILT), 12
)


def released(name: str) -> PretrainedConfig:
    values = dict(RELEASED[name])
    return CONFIG_MAPPING[values["model_type"]].from_dict(values)


@cache
def released_twin(name: str) -> PretrainedConfig:
    return shrunk(released(name))


def built(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    randomize(model, seed)
    return model


@torch.no_grad()
def logits(config: PretrainedConfig) -> Tensor:
    """[TOKENS, vocabulary] of a twin's model of seed 0."""
    ids = torch.randint(5, 100, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    return built(config)(input_ids=ids, use_cache=False).logits[0]


def changed(config: PretrainedConfig, name: str, value: Any) -> PretrainedConfig:
    """A copy with one other value: of the text part, or of its rope parameters."""
    copy = type(config).from_dict(config.to_dict())
    text = copy.get_text_config()
    if name in text.rope_parameters:
        text.rope_parameters[name] = value
    else:
        assert hasattr(text, name)
        setattr(text, name, value)
    return copy


@pytest.mark.parametrize(
    ("heads", "kv_heads", "expected"),
    [
        pytest.param(32, 32, (4, 4), id="each query head its own"),
        pytest.param(32, 8, (8, 2), id="four of one KV head"),
        pytest.param(64, 8, (16, 2), id="eight of one"),
        pytest.param(28, 4, (14, 2), id="seven of one"),
        pytest.param(96, 8, (16, 2), id="twelve of one become eight"),
        pytest.param(71, 1, (4, 1), id="all of one"),
    ],
)
def test_ratio_of_heads_is_kept(heads: int, kv_heads: int, expected: tuple[int, int]) -> None:
    config = LlamaConfig(
        hidden_size=128 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads
    )
    twin = shrunk(config)
    assert (twin.num_attention_heads, twin.num_key_value_heads) == expected
    assert twin.hidden_size == 16 * twin.num_attention_heads


def test_width_that_heads_do_not_fill_stays_one() -> None:
    twin = shrunk(Gemma2Config(hidden_size=2304, num_attention_heads=8, head_dim=256))
    assert twin.hidden_size != twin.num_attention_heads * twin.head_dim


@pytest.mark.product
@pytest.mark.parametrize("name", RELEASED)
def test_flags_are_kept_and_sizes_are_small(name: str) -> None:
    config, twin = released(name), released_twin(name)
    before = config.to_dict()
    shrunk(config)
    assert config.to_dict() == before, "shrunk() changed its argument"
    assert type(twin) is type(config)
    old, new = config.get_text_config().to_dict(), twin.get_text_config().to_dict()
    flags = {name for name, value in old.items() if isinstance(value, (bool, str))}
    flags -= {"dtype", "transformers_version"}
    assert {flag: new[flag] for flag in flags} == {flag: old[flag] for flag in flags}
    text = twin.get_text_config()
    assert text.vocab_size == 128
    assert text.hidden_size <= 256
    assert sum(param.numel() for param in built(twin).parameters()) < 3e6


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        pytest.param(
            "gemma-3-4b",
            {"layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
            id="sixth layer full",
        ),
        pytest.param(
            "deepseek-v3",
            {"num_hidden_layers": 4, "first_k_dense_replace": 3},
            id="first experts after three dense layers",
        ),
        pytest.param(
            "llama-4-scout",
            {"no_rope_layers": [1, 1, 1, 0], "moe_layers": [0, 1, 2, 3]},
            id="lists of entries and of numbers",
        ),
        pytest.param(
            "deepseek-v3",
            {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
            id="groups of experts",
        ),
        pytest.param(
            "deepseek-v3",
            {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_head_dim": 24},
            id="parts of a head",
        ),
        pytest.param(
            "phi-4-mini",
            {"original_max_position_embeddings": 16, "max_position_embeddings": 256},
            id="trained positions",
        ),
    ],
)
def test_released_configuration_becomes(name: str, fields: dict[str, Any]) -> None:
    text = released_twin(name).get_text_config()
    assert {field: getattr(text, field) for field in fields} == fields


def test_kinds_of_layers_that_no_short_prefix_has_are_kept() -> None:
    """Of 30 layers, in which the last ten share the cache of layers 18 and 19."""
    text = released_twin("gemma-3n-e2b")
    depth = text.num_hidden_layers
    assert depth < 12
    kinds = {
        (text.layer_types[i], text.activation_sparsity_pattern[i], i >= depth - 2)
        for i in range(depth)
    }
    assert text.num_kv_shared_layers == 2
    for layer_type in ("sliding_attention", "full_attention"):
        assert {(layer_type, 0.95, False), (layer_type, 0.0, False), (layer_type, 0.0, True)} <= (
            kinds
        )


def test_kinds_by_the_number_of_a_layer_are_kept_however_late() -> None:
    """Layer 12 of every 16 attends: no field lists the layers, so no layer before it can go."""
    config = CONFIG_MAPPING["jamba"](attn_layer_period=16, attn_layer_offset=12)
    twin = shrunk(config)
    assert twin.num_hidden_layers == 13
    kinds = {type(layer).__name__ for layer in built(twin).model.layers}
    assert len(kinds) == 2


def test_fields_of_single_layers_are_shrunk() -> None:
    """Layers that slide have other heads and ranks than those which choose their keys."""
    model = built(shrunk(default_config("dots3_note_text")))
    assert model.config.layer_types[-1] == "sliding_attention"
    sizes = [model.config.per_layer_config[layer].qk_nope_head_dim for layer in range(3)]
    assert sizes == [16, 16, 24]
    assert sum(param.numel() for param in model.parameters()) < 3e6


def test_special_tokens_stay_different() -> None:
    twin = released_twin("llama-4-scout")
    ids = [twin.bos_token_id, *twin.eos_token_id]
    assert len({*ids}) == 4
    assert max(ids) < twin.vocab_size
    assert released_twin("gpt-oss-20b").pad_token_id not in (None, 0)


@pytest.mark.parametrize(
    ("model_type", "product"),
    [
        pytest.param("falcon_h1", "mamba_n_heads * mamba_d_head == mamba_d_ssm", id="falcon_h1"),
        pytest.param("mamba2", "num_heads * head_dim == expand * hidden_size", id="mamba2"),
        pytest.param(
            "hrm_text", "num_hidden_layers == num_layers_per_stack * H_cycles * (L_cycles + 1)",
            id="hrm_text",
        ),
        pytest.param("dots3_note", "vision_config.adapter_out_dim == text_config.hidden_size",
            id="dots3_note"),
        pytest.param("reformer", "sum(axial_pos_embds_dim) == hidden_size", id="reformer"),
        pytest.param("gpt_neo", "attention_layers == attention_types[0][0] * attention_types[0][1]",
            id="gpt_neo"),
        pytest.param("bamba", "attn_layer_indices == [num_hidden_layers - 1]", id="bamba"),
    ],
)  # fmt: skip
def test_what_held_of_sizes_still_holds(model_type: str, product: str) -> None:
    twin = shrunk(default_config(model_type))
    assert eval(product, {}, vars(twin))


def test_layers_that_share_weights_are_two() -> None:
    twin = shrunk(default_config("zamba"))
    assert twin.layers_block_type.count("hybrid") == 2
    assert twin.num_hidden_layers == 8
    built(twin)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("gemma-3-4b", "sliding_window"),
        ("gpt-oss-20b", "sliding_window"),
        ("llama-4-scout", "attention_chunk_size"),
        ("phi-4-mini", "sliding_window"),
    ],
)
def test_windows_bite_within_a_twins_tokens(name: str, field: str) -> None:
    twin = released_twin(name)
    window = getattr(twin.get_text_config(), field)
    narrow, wide = logits(twin), logits(changed(twin, field, 256))
    torch.testing.assert_close(narrow[:window], wide[:window])
    differs = (narrow - wide).abs().amax(1)
    assert differs[window:].min() > 1e-3


@pytest.mark.parametrize(
    ("name", "field", "value", "first"),
    [
        pytest.param("phi-4-mini", "long_factor", [2.0] * 6, 16, id="longrope behind its switch"),
        pytest.param("deepseek-v3", "factor", 2.0, 1, id="yarn"),
        pytest.param("gpt-oss-20b", "factor", 2.0, 1, id="yarn without truncation"),
        pytest.param("llama-4-scout", "factor", 2.0, 1, id="llama3"),
    ],
)
def test_rope_scaling_is_felt(name: str, field: str, value: Any, first: int) -> None:
    """Of a longrope all positions turn as soon as the sequence is longer than it was trained for:
    only its last token tells, so that is compared."""
    twin = released_twin(name)
    assert field in twin.rope_parameters
    plain, other = logits(twin), logits(changed(twin, field, value))
    assert (plain - other)[first:].abs().max() > 1e-2


def test_soft_caps_and_clamps_bite() -> None:
    twin = shrunk(Gemma2Config())
    assert (logits(twin) - logits(changed(twin, "attn_logit_softcapping", 50.0))).abs().max() > 1e-2
    assert (logits(twin) - logits(changed(twin, "final_logit_softcapping", 30.0))).abs().max() > 0.1
    twin = released_twin("gpt-oss-20b")
    assert (logits(twin) - logits(changed(twin, "swiglu_limit", 7.0))).abs().max() > 1e-2


def test_weights_follow_from_name_and_seed_alone() -> None:
    twin = released_twin("deepseek-v3")
    first, again, other = built(twin), built(twin), built(twin, seed=1)
    shallow = built(changed(twin, "num_hidden_layers", 2))
    state, others, shallows = again.state_dict(), other.state_dict(), shallow.state_dict()
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, state[name]), name
        assert not torch.equal(tensor, others[name]), name
        assert name not in shallows or torch.equal(tensor, shallows[name]), name


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gpt2", "gpt_oss", "gemma4_text"])
def test_weights_are_away_from_what_hides_mistakes(model_type: str) -> None:
    model = built(shrunk(default_config(model_type)))
    stored = model.state_dict()
    assert stored
    for name, tensor in stored.items():
        if tensor.is_floating_point():
            key = name.rpartition(".")[2]
            assert tensor.abs().max() > 0, name
            if tensor.dim() == 1 and tensor.numel() > 1:
                assert tensor.unique().numel() > 1, name
            if key.endswith("bias"):
                assert tensor.abs().min() >= 0.05, name
            elif "norm" in name and tensor.dim() == 1:
                assert 0.5 <= tensor.min() <= tensor.max() <= 1.5, name


def test_looked_up_experts_are_different_and_exist() -> None:
    model = built(shrunk(default_config("deepseek_v4")))
    tables = {name: table for name, table in model.named_buffers() if table.dtype == torch.int64}
    assert tables
    experts = model.config.n_routed_experts
    for table in tables.values():
        assert table.unique().numel() == experts
        assert int(table.max()) == experts - 1
        assert all(row.unique().numel() == row.numel() for row in table)


@pytest.mark.product
@pytest.mark.parametrize("model_type", SAMPLE)
def test_twin_of_any_type_runs(model_type: str) -> None:
    output = logits(shrunk(default_config(model_type)))
    assert output.isfinite().all()
    assert output.std(0).max() > 0.02, "the logits do not depend on the tokens"
