"""Configs of transformers 4 and 5 become one spec; a bad one is a line that says what to do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fusewright.config.errors import UserError
from fusewright.config.rope import RopeParameters
from fusewright.model_executor.abacus import FOLDER as ABACUS
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.spec import ModelSpec
from tests.model_executor.tiny_models import TINY_MODELS, TinyModel

LLAMA_3_1: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008],
}
LLAMA_3_1_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
QWEN = {**LLAMA_3_1, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}


def read(folder: Path, config: dict[str, Any], **changes: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config | changes))
    return read_spec(folder)


def refusal(folder: Path, config: dict[str, Any] = LLAMA_3_1, **changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(folder, config, **changes)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_transformers_4_and_5_styles_give_the_same_spec(tmp_path: Path) -> None:
    old = read(
        tmp_path,
        LLAMA_3_1,
        rope_theta=500000.0,
        rope_scaling=LLAMA_3_1_SCALING,
        torch_dtype="bfloat16",
    )
    new = read(
        tmp_path,
        LLAMA_3_1,
        rope_parameters={**LLAMA_3_1_SCALING, "rope_theta": 500000.0},
        dtype="bfloat16",
    )
    assert old == new
    assert old.dtype is torch.bfloat16
    assert old.head_dim == 128
    assert old.rope == RopeParameters(
        theta=500000.0,
        kind="llama3",
        factor=8.0,
        original_max_position=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )


def test_the_bundled_model_reads() -> None:
    spec = read_spec(ABACUS)
    assert (spec.num_layers, spec.hidden_size, spec.num_kv_heads) == (5, 256, 2)
    assert spec.tie_word_embeddings


def test_old_llama_configs_may_leave_out_kv_heads_and_rope(tmp_path: Path) -> None:
    config = {k: v for k, v in LLAMA_3_1.items() if k != "num_key_value_heads"}
    spec = read(tmp_path, config, rope_scaling=None)
    assert spec.num_kv_heads == 32
    assert spec.rope == RopeParameters(theta=10000.0)
    assert spec.dtype is torch.float32


def test_legacy_rope_scaling_type_is_read(tmp_path: Path) -> None:
    spec = read(tmp_path, LLAMA_3_1, rope_scaling={"type": "linear", "factor": 2})
    assert (spec.rope.kind, spec.rope.factor) == ("linear", 2.0)
    assert spec.max_position_embeddings == 131072


def test_yarn_reaches_beyond_the_positions_trained(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    spec = read(tmp_path, LLAMA_3_1, rope_scaling=scaling, max_position_embeddings=40960)
    assert spec.max_position_embeddings == 131072
    del scaling["original_max_position_embeddings"]
    spec = read(tmp_path, LLAMA_3_1, rope_scaling=scaling, max_position_embeddings=32768)
    assert (spec.rope.original_max_position, spec.max_position_embeddings) == (32768, 131072)


@pytest.mark.parametrize(
    ("architecture", "bias", "expected"),
    [
        ("LlamaForCausalLM", False, (False, False, False)),
        ("LlamaForCausalLM", True, (True, True, False)),
        ("MistralForCausalLM", True, (False, False, False)),
        ("Qwen2ForCausalLM", False, (True, False, False)),
        ("Qwen3ForCausalLM", False, (False, False, True)),
        ("Qwen3ForCausalLM", True, (True, True, True)),
    ],
)
def test_each_family_has_its_biases_and_norms(
    tmp_path: Path, architecture: str, bias: bool, expected: tuple[bool, ...]
) -> None:
    spec = read(tmp_path, LLAMA_3_1, architectures=[architecture], attention_bias=bias)
    assert (spec.qkv_bias, spec.o_bias, spec.qk_norm) == expected


def test_llama_alone_may_bias_its_mlp(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA_3_1, mlp_bias=True).mlp_bias
    assert not read(tmp_path, QWEN, mlp_bias=True).mlp_bias


def test_mistral_slides_on_every_layer_or_none(tmp_path: Path) -> None:
    mistral = LLAMA_3_1 | {"architectures": ["MistralForCausalLM"], "num_hidden_layers": 3}
    assert read(tmp_path, mistral, sliding_window=64).sliding_windows == (64, 64, 64)
    assert read(tmp_path, mistral, sliding_window=None).sliding_windows == (0, 0, 0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (0, 0, 0)),
        ({"use_sliding_window": True, "max_window_layers": 1}, (0, 64, 64)),
        ({"use_sliding_window": True, "max_window_layers": 3}, (0, 0, 0)),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}, (0, 0, 0)),
        (
            {
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (64, 0, 64),
        ),
    ],
)
def test_qwen_slides_where_told(
    tmp_path: Path, changes: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert read(tmp_path, QWEN, num_hidden_layers=3, **changes).sliding_windows == expected


def test_qwen3_heads_default_to_128(tmp_path: Path) -> None:
    config = LLAMA_3_1 | {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024}
    assert read(tmp_path, config).head_dim == 128


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere'?: not there; give a Hugging Face model"):
        read_spec(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="not a folder"):
        read_spec(tmp_path / "file")
    with pytest.raises(UserError, match=r"no config\.json in it"):
        read_spec(tmp_path)


def test_an_unreadable_folder_is_named(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    (locked / "config.json").write_text(json.dumps(LLAMA_3_1))
    locked.chmod(0)
    user = os.geteuid()
    try:
        if user == 0:  # permissions do not stop root
            os.seteuid(65534)
        with pytest.raises(UserError, match=r"cannot read .*locked: Permission denied; check"):
            read_spec(locked)
    finally:
        os.seteuid(user)
        locked.chmod(0o700)


def test_an_unreadable_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(UserError, match=r"cannot read .*config\.json: Is a directory"):
        read_spec(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_json_that_is_not_a_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"config\.json (is not valid JSON|holds a list)"):
        read_spec(tmp_path)


def test_an_unknown_architecture_names_the_supported_ones(tmp_path: Path) -> None:
    message = refusal(tmp_path, architectures=["FooForCausalLM"])
    assert "'FooForCausalLM' is not supported" in message
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        assert f"{name}ForCausalLM" in message
    assert "names no architectures" in refusal(tmp_path, architectures=None)
    other = refusal(tmp_path, architectures=["MambaForCausalLM"])  # of the model_type of another
    assert "'MambaForCausalLM' is not supported" in other


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "type is 'su'; expected one of default"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "no rope_scaling.low_freq_fac"),
        ({"rope_scaling": {"type": "linear"}}, "has no rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope factor is 0.5"),
        ({"rope_scaling": 3}, "rope_scaling is 3; expected an object"),
        ({"num_key_value_heads": 5}, "num_key_value_heads is 5; expected a divisor"),
        ({"hidden_size": "big"}, "hidden_size is 'big'; expected an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; expected at least 1"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; expected true or false"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; expected a number"),
        ({"torch_dtype": "float8"}, "torch_dtype is 'float8'; expected one of float32"),
        ({"head_dim": 63}, "rotary_dim 63"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method is 'hqq'; expected one"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    assert expected in refusal(tmp_path, **changes)


def test_qwen_layer_types_must_fit_the_layers(tmp_path: Path) -> None:
    for types in (["full_attention"], ["linear_attention"] * 32, [["full_attention"]] * 32):
        assert "layer_types is" in refusal(tmp_path, QWEN, layer_types=types)


@pytest.mark.parametrize("tiny", TINY_MODELS, ids=lambda tiny: tiny.name)
def test_the_weights_that_a_token_meets_are_those_of_transformers(
    tmp_path: Path, tiny: TinyModel
) -> None:
    tiny.config().save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    met = 0.0
    for name, param in tiny.model().named_parameters():
        is_matrix = name.startswith("model.layers.") and param.dim() > 1
        if not is_matrix or name.endswith(("gate.weight", "router.weight", "expert_gate.weight")):
            continue  # embeddings, norms, biases; routers are small
        share = 1.0
        if spec.moe is not None and ".experts." in name:
            share = spec.moe.routing.top_k / spec.moe.num_experts
        met += share * param.numel()
    assert met == pytest.approx(spec.layer_params * spec.num_layers)
