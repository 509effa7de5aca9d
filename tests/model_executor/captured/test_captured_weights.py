"""A captured model's weights are those that ``from_pretrained`` gives, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import core_model_loading as library
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

from fusewright.config.errors import UserError
from fusewright.model_executor.captured.checkpoint_map import dtypes_of, moves_of, untie
from fusewright.model_executor.captured.moves import Move, copy_moves, narrowed
from fusewright.model_executor.captured.stored_moves import dump_moves, load_moves
from fusewright.model_executor.checkpoint import read_headers

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "GPT2": {},
    "Gemma2": {"tie_word_embeddings": True},
    "Phi3": {},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 16},
    "Mixtral": {"num_local_experts": 4},
    "GptOss": {"num_local_experts": 4},
    "Jamba": {"num_experts": 4, "mamba_dt_rank": 4, "attn_layer_offset": 1, "attn_layer_period": 2},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "Falcon": {"new_decoder_architecture": True},
    "DeepseekV3": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}
DTYPE = torch.bfloat16


def model_class(family: str) -> Any:
    return getattr(transformers, f"{family}ForCausalLM", None) or transformers.GPT2LMHeadModel


def tiny(family: str) -> Any:
    values = COMMON | MODELS[family]
    if family == "Falcon":  # computes it
        del values["head_dim"]
    config = getattr(transformers, f"{family}Config")(**values)
    return randomized(model_class(family)._from_config(config, dtype=DTYPE))


def randomized(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    for tensor in model.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


def on_meta(model: Any) -> Any:
    with torch.device("meta"):
        return type(model)._from_config(model.config, dtype=DTYPE)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(filled: Mapping[str, Tensor], model: Any, ties: Mapping[str, str]) -> None:
    expected = model.state_dict()
    assert expected
    for name, tensor in expected.items():
        read = filled[ties.get(name, name)]
        assert read.dtype == tensor.dtype, name
        assert torch.equal(bits(read), bits(tensor)), name


def loaded(meta: Any, moves: list[Move]) -> dict[str, Tensor]:
    dtypes, tensors = dtypes_of(meta, DTYPE), meta.state_dict()
    empty = {name: torch.zeros(t.shape, dtype=dtypes[name]) for name, t in tensors.items()}
    copy_moves(moves, empty)
    return empty


@pytest.mark.product
@pytest.mark.parametrize("original", [True, False], ids=["original", "converted"])
@pytest.mark.parametrize("family", MODELS)
def test_weights_are_those_of_from_pretrained(family: str, original: bool, tmp_path: Path) -> None:
    model = tiny(family)
    model.save_pretrained(tmp_path, save_original_format=original, max_shard_size=20_000)
    found, meta = read_headers(tmp_path), on_meta(model)
    assert len({info.file for info in found.values()}) > 1
    assert not untie(meta, found)
    moves = moves_of(meta, found)
    pretrained = type(model).from_pretrained(tmp_path, dtype=DTYPE)
    assert_same(loaded(meta, moves), pretrained, meta.all_tied_weights_keys)
    assert load_moves(dump_moves(moves, found), found) == moves


@pytest.mark.parametrize("family", ["GPT2", "Gemma2"])
def test_prefix_of_the_base_model_may_be_missing(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    model.base_model.save_pretrained(tmp_path)
    assert not any(name.startswith(model.base_model_prefix) for name in read_headers(tmp_path))
    meta = on_meta(model)
    moves = moves_of(meta, read_headers(tmp_path))
    assert_same(loaded(meta, moves), model, meta.all_tied_weights_keys)


@pytest.mark.parametrize("family", ["Phi3", "Mixtral", "GptOss"])
def test_ranks_read_their_parts(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    model.save_pretrained(tmp_path)
    moves = moves_of(on_meta(model), read_headers(tmp_path))
    for name, tensor in model.state_dict().items():
        own = [move for move in moves if move.parameter == name]
        for dim, size in enumerate(tensor.shape):
            for start, length in ((0, size // 3), (size // 3, size - size // 3)):
                part = torch.zeros_like(tensor.narrow(dim, start, length))
                copies = [p for move in own for p in narrowed(move, dim, start, length)]
                copy_moves(copies, {name: part})
                assert torch.equal(bits(part), bits(tensor.narrow(dim, start, length)))
                assert sum(copy.nbytes for copy in copies) == part.nbytes


@pytest.mark.parametrize("family", ["Mixtral", "GptOss", "Jamba"])
def test_large_tensors_are_read_in_pieces(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family)
    model.save_pretrained(tmp_path)
    meta = on_meta(model)
    moves = moves_of(meta, read_headers(tmp_path))
    total = sum(move.nbytes for move in moves)
    monkeypatch.setattr("fusewright.model_executor.captured.moves.MOST_BYTES", 100)
    empty = {n: torch.zeros_like(t, device="cpu") for n, t in meta.state_dict().items()}
    pieces, told = list[int](), list[Move]()
    copy_moves(moves, empty, pieces.append, lambda move, part: told.append(move))
    assert_same(empty, model, meta.all_tied_weights_keys)
    assert told == moves
    assert sum(pieces) == total
    assert len(pieces) > 4 * len(moves)


def test_parameters_may_be_strided_parts_of_others(tmp_path: Path) -> None:
    model = tiny("Llama")
    model.save_pretrained(tmp_path)
    expected = model.state_dict()
    rows = {n: f"model.layers.0.self_attn.{n}_proj.weight" for n in "qkv"}
    moves = [
        m for m in moves_of(on_meta(model), read_headers(tmp_path)) if m.parameter in rows.values()
    ]
    merged = torch.zeros(32, 64, dtype=DTYPE).T
    parts = dict(zip(rows.values(), merged.split([32, 16, 16]), strict=True))
    bytes_read: list[int] = []
    told: list[str] = []
    copy_moves(moves, parts, bytes_read.append, lambda move, part: told.append(move.parameter))
    assert torch.equal(merged, torch.cat([expected[name] for name in rows.values()]))
    assert sum(bytes_read) == merged.numel() * 2
    assert sorted(told) == sorted(rows.values())


def test_ties_follow_what_the_checkpoint_has(tmp_path: Path) -> None:
    model = tiny("Gemma2")
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert head not in tensors
    tensors[head] = tensors[embed].clone()

    def rewritten() -> tuple[dict[str, Tensor], Any, tuple[str, ...]]:
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        meta, found = on_meta(model), read_headers(tmp_path)
        notes = tuple(untie(meta, found).values())
        filled = loaded(meta, moves_of(meta, found))
        pretrained = type(model).from_pretrained(tmp_path, dtype=DTYPE)
        assert_same(filled, pretrained, meta.all_tied_weights_keys)
        return filled, meta, notes

    assert rewritten()[2] == ()
    tensors[head][0, 0] += 1
    filled, meta, (note,) = rewritten()
    assert note.startswith(f"config.json ties {head} to {embed}, but")
    assert not torch.equal(filled[head], filled[embed])
    assert meta.lm_head.weight is not meta.model.embed_tokens.weight
    del tensors[embed]
    assert rewritten()[2] == ()


def test_other_towers_are_skipped(tmp_path: Path) -> None:
    text = COMMON | {"sliding_window": 16}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    model = randomized(
        transformers.Gemma3ForConditionalGeneration._from_config(config, dtype=DTYPE)
    )
    model.save_pretrained(tmp_path)
    found, meta = read_headers(tmp_path), on_meta(model)
    assert any("vision_tower" in name for name in found)

    def other(name: str) -> bool:
        return not name.startswith(("model.language_model.", "lm_head."))

    moves = moves_of(meta, found, skip=other)
    decoder = {k: t for k, t in model.state_dict().items() if k.startswith("model.language_model.")}
    assert {move.parameter for move in moves} == set(decoder)
    filled = loaded(meta, moves)
    assert all(torch.equal(bits(filled[name]), bits(t)) for name, t in decoder.items())


EXPERT = "model.layers.0.mlp.experts.2.gate_proj.weight"
NORM = "model.norm.weight"


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "missing": (
        lambda t: without(t, NORM),
        r"the checkpoint lacks weight model\.norm\.weight, which config\.json calls for",
    ),
    "unknown": (
        lambda t: t | {"model.layers.2.mlp.gate.weight": t[NORM].clone()},
        r"has weight model\.layers\.2\.mlp\.gate\.weight, unknown to Qwen3MoeForCausalLM",
    ),
    "shape": (
        lambda t: t | {NORM: t[NORM][:-1].clone()},
        r"tensor model\.norm\.weight in .* has shape \[31\], expected \[32\]; config\.json and",
    ),
    "dtype": (
        lambda t: t | {NORM: t[NORM].to(torch.float8_e4m3fn)},
        r"tensor model\.norm\.weight in .* is of type F8_E4M3, expected F64 or F32",
    ),
    "missing expert": (
        lambda t: without(t, EXPERT),
        r"cannot become model\.layers\.0\.mlp\.experts\.gate_up_proj by MergeModulelist, Concat",
    ),
    "missing experts": (
        lambda t: {name: tensor for name, tensor in t.items() if "experts.3." not in name},
        r"[36] weights: .* for model\.\S+ have in all shape \[3, 32, \d+\], expected \[4, 32,",
    ),
    "expert's shape": (
        lambda t: t | {EXPERT: t[EXPERT][:-1].clone()},
        r"cannot become .*gate_up_proj by MergeModulelist, Concatenate of transformers \(shapes \[",
    ),
    "both names": (
        lambda t: t | {"norm.weight": t[NORM].clone()},
        r"model\.norm\.weight and norm\.weight are both model\.norm\.weight of the model; remove",
    ),
}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Tensor]]:
    folder, model = tmp_path_factory.mktemp("moe"), tiny("Qwen3Moe")
    model.save_pretrained(folder)
    return model, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("what", BROKEN)
def test_refusals_name_the_tensor(
    what: str, moe: tuple[Any, dict[str, Tensor]], tmp_path: Path
) -> None:
    (model, tensors), (change, message) = moe, BROKEN[what]
    save_file(change(tensors), tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message) as error:
        moves_of(on_meta(model), read_headers(tmp_path))
    assert "\n" not in str(error.value)


class Doubled(library.ConversionOps):
    """Computes something."""

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **_: Any) -> Any:
        return {target_patterns[0]: next(iter(input_dict.values()))[0] * 2}


def test_a_conversion_that_computes_is_refused_by_name(
    moe: tuple[Any, dict[str, Tensor]], tmp_path: Path
) -> None:
    model, tensors = moe
    save_file(tensors, tmp_path / "model.safetensors")
    kind, name = model.config.model_type, "model.norm.weight"
    known = get_checkpoint_conversion_mapping(kind)
    doubled = library.WeightConverter(name, name, [Doubled()])
    register_checkpoint_conversion_mapping(kind, [*known, doubled], overwrite=True)
    try:
        with pytest.raises(
            UserError, match=r"model\.norm\.weight is made by Doubled of.*aten\.mul"
        ):
            moves_of(on_meta(model), read_headers(tmp_path))
    finally:
        register_checkpoint_conversion_mapping(kind, known, overwrite=True)
