"""A config that leaves a field out is read as the family's own class in transformers reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fusewright.config import UserError
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.loader import load_model
from fusewright.model_executor.models import defaults
from fusewright.model_executor.spec import ModelSpec
from tests.model_executor.paged_steps import PagedSteps, random_tokens
from tests.model_executor.tiny_models import TinyModel

TABLES: dict[str, Mapping[str, Any]] = {
    "Llama": defaults.LLAMA,
    "Mistral": defaults.MISTRAL,
    "Mixtral": defaults.MIXTRAL,
    "Qwen2": defaults.QWEN2,
    "Qwen3": defaults.QWEN3,
    "Qwen2Moe": defaults.QWEN2_MOE,
    "Qwen3Moe": defaults.QWEN3_MOE,
}
every_family = pytest.mark.parametrize("family", TABLES)
# Each differs from the default of every family.
STATED: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "swish",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-3,
    "rope_theta": 777.0,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
    "qkv_bias": False,
    "sliding_window": 8,
    "use_sliding_window": True,
    "max_window_layers": 3,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
    "norm_topk_prob": True,
    "num_local_experts": 16,
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 192,
}


def read(folder: Path, values: Mapping[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(values))
    return read_spec(folder)


def stated(family: str) -> dict[str, Any]:
    config = getattr(transformers, f"{family}Config")
    values = {name: STATED[name] for name in TABLES[family]}
    if "layer_types" in values and family == "Qwen3":
        del values["layer_types"]  # so that max_window_layers is read somewhere
    named = {"architectures": [f"{family}ForCausalLM"], "model_type": config.model_type}
    return {**named, "dtype": "float32", **values}


@every_family
def test_the_table_is_that_of_the_class(family: str) -> None:
    config = getattr(transformers, f"{family}Config")
    for name, default in TABLES[family].items():
        theirs = config.default_theta if name == "rope_theta" else getattr(config, name, None)
        assert (name, default) == (name, theirs)
    missing = {name for name in STATED if hasattr(config, name)} - {*TABLES[family], "num_experts"}
    assert not missing, "the class has fields that the table lacks"


@pytest.mark.parametrize(
    ("family", "dropped"), [(family, name) for family in TABLES for name in ("", *TABLES[family])]
)
def test_a_dropped_field_is_what_transformers_takes_for_it(
    family: str, dropped: str, tmp_path: Path
) -> None:
    """What transformers makes of the config is written out whole, and read to the same spec."""
    values = {name: value for name, value in stated(family).items() if name != dropped}
    if dropped == "num_hidden_layers":
        values.pop("layer_types", None)  # of as many
    ours = read(tmp_path, values)
    whole = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    assert ours == read(tmp_path, whole)


# Fields whose wrong default loads without an error.
UNSEEN = {
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "qkv_bias",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "decoder_sparse_step",
    "mlp_only_layers",
    "norm_topk_prob",
    "num_experts_per_tok",
    "num_key_value_heads",
    "num_attention_heads",
}


@every_family
def test_a_model_of_defaults_gives_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "head_dim": 8, "vocab_size": 128, "intermediate_size": 64}
    more = {name: 16 for name in ("num_experts", "num_local_experts") if name in TABLES[family]}
    inner = ("moe_intermediate_size", "shared_expert_intermediate_size")
    more |= {name: 32 for name in inner if name in TABLES[family]}
    config = getattr(transformers, f"{family}Config")
    heads = {name: getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads")}
    options = {**sizes, **more, **heads, "rms_norm_eps": config.rms_norm_eps}
    options["max_position_embeddings"] = config.max_position_embeddings
    tiny = TinyModel(f"{family} of defaults", family, options)
    theirs = tiny.save(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    for name in (*UNSEEN, "rope_parameters"):
        values.pop(name, None)
    model = load_model(read(tmp_path, values), tmp_path, "cpu")
    tokens = random_tokens(70, 9)
    logits = PagedSteps(model, tokens).step({0: 70, 1: 9})
    with torch.inference_mode():
        expected = [theirs(torch.tensor([prompt])).logits[0, -1] for prompt in tokens]
    torch.testing.assert_close(logits, torch.stack(expected), atol=1e-4, rtol=0)


NULLS = [
    ("Llama", {"num_key_value_heads": None}, "num_kv_heads", 64),
    ("Mistral", {"num_key_value_heads": None}, "num_kv_heads", 64),
    ("Qwen2", {"num_key_value_heads": None}, "num_kv_heads", 64),
    ("Mistral", {"sliding_window": None}, "sliding_windows", (0,) * 8),
    ("Mixtral", {"sliding_window": None}, "sliding_windows", (0,) * 8),
    ("Qwen3Moe", {"sliding_window": None}, "sliding_windows", (0,) * 8),
    ("Llama", {"head_dim": None}, "head_dim", 4),
    ("Llama", {"rms_norm_eps": None}, "rms_norm_eps", 1e-6),
]


@pytest.mark.parametrize(("family", "changes", "name", "expected"), NULLS)
def test_null_says_that_there_is_none_or_the_default(
    family: str, changes: dict[str, Any], name: str, expected: Any, tmp_path: Path
) -> None:
    assert getattr(read(tmp_path, stated(family) | changes), name) == expected


@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe", "Qwen3Moe"])
def test_the_number_of_experts_has_the_names_that_transformers_reads(
    family: str, tmp_path: Path
) -> None:
    for names in ({"num_experts": 32}, {"num_local_experts": 32}):
        for more in ({}, {"num_experts": 8}, {"num_local_experts": 8}):
            values = stated(family)
            values = {n: v for n, v in values.items() if not n.endswith("_experts")}
            ours = read(tmp_path, values | more | names)
            theirs = transformers.AutoConfig.from_pretrained(tmp_path)
            assert ours.num_experts == theirs.num_experts


def test_no_experts_at_all_is_a_dense_model(tmp_path: Path) -> None:
    assert read(tmp_path, stated("Qwen3Moe") | {"num_experts": 0}).moe is None


def test_a_size_that_is_left_out_is_held_against_the_weights(tmp_path: Path) -> None:
    tiny = TinyModel("llama_gqa", "Llama", {})
    tiny.save(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"):
        spec = read(tmp_path, {n: v for n, v in values.items() if n != name})
        with pytest.raises(UserError, match=r"expected \[|lacks \d+ weights"):
            load_model(spec, tmp_path, "cpu")
