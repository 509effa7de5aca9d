"""Claims about GGUF files: one becomes a folder with the same weights, once, and what its reader
would leave out is refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fusewright.config import EngineOptions, MachineError, UserError
from fusewright.engine.frontend.check import check_start
from fusewright.engine.frontend.tokenizer import Tokenizer
from fusewright.model_executor.hf_config import model_folder, read_spec
from fusewright.model_executor.layers import Linear
from fusewright.model_executor.loader import load_model
from fusewright.model_executor.quant.scheme import LINEARS
from fusewright.model_executor.sources import gguf_folder
from fusewright.model_executor.sources.gguf_blocks import numbers_of, stored_blocks, widened
from fusewright.ops.linear.formats import dequantize
from tests.model_executor.quant_checkpoints import FUSED

gguf = pytest.importorskip("gguf")
HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 64, 96, 4, 2, 40
HEAD = HIDDEN // HEADS
LAYER = {
    "attn_q": ("self_attn.q_proj", (HIDDEN, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (KV_HEADS * HEAD, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (KV_HEADS * HEAD, HIDDEN)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HIDDEN)),
    "ffn_gate": ("mlp.gate_proj", (INNER, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (INNER, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, INNER)),
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
}
OUTSIDE = {
    "token_embd": ("model.embed_tokens", (VOCAB, HIDDEN)),
    "output_norm": ("model.norm", (HIDDEN,)),
    "output": ("lm_head", (VOCAB, HIDDEN)),
}


def paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in llama.cpp's order: the two halves of a head interleaved."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


def write(
    path: Path,
    more: Callable[[Any], None] = lambda writer: None,
    types: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, np.ndarray]:
    """Write a Llama of one layer; returns its weights by the names that ``transformers`` has.

    Args:
        types: the quantized types of tensors of the layer, by their names in ``LAYER``.
    """
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789.", "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<unk>", "<s>", *letters])
    writer.add_token_types([3, 3, *[1] * len(letters)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    weights = {}
    layer = {f"blk.0.{k}": (f"model.layers.0.{n}", s) for k, (n, s) in LAYER.items()}
    for name, (theirs, shape) in {**layer, **OUTSIDE}.items():
        value = random.standard_normal(shape).astype(np.float32)
        weights[f"{theirs}.weight"] = value
        heads = {"blk.0.attn_q": HEADS, "blk.0.attn_k": KV_HEADS}.get(name)
        kind = types.get(name.removeprefix("blk.0."))
        if kind is not None:
            value = gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)
            weights[f"{theirs}.weight"] = value
        rows = paired(value, heads) if heads else value
        if kind is None:
            writer.add_tensor(f"{name}.weight", rows)
        else:
            data = gguf.quants.quantize(rows, kind)
            writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_file_becomes_a_folder_with_its_weights_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tiny.gguf"
    weights = write(file)
    folder = model_folder(str(file))
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(stored[name], torch.from_numpy(value).bfloat16()), name
    spec = read_spec(folder)
    assert (spec.hidden_size, spec.num_layers, spec.vocab_size) == (HIDDEN, 1, VOCAB)
    assert (spec.rope.theta, spec.dtype_name, spec.tie_word_embeddings) == (5000, "bfloat16", False)
    assert Tokenizer(folder).encode("abc") == [39, 4]
    monkeypatch.setattr(gguf_folder, "_convert", None)
    assert model_folder(str(file), weights=True) == model_folder(str(tmp_path)) == folder
    check_start(EngineOptions(model=str(file)))
    assert [*(cache / "gguf").iterdir()] == [folder], "nothing is left beside it"
    os.utime(file, (1, 1))
    with pytest.raises(TypeError):  # another file: it would be converted
        model_folder(str(file))


def test_a_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library parses it at each of several calls, a vocabulary of 49,152 tokens for seconds."""
    parsed: list[str] = []
    build = gguf.GGUFReader._build_fields

    def counted(reader: Any, *args: Any) -> Any:
        parsed.append("")
        return build(reader, *args)

    monkeypatch.setattr(gguf.GGUFReader, "_build_fields", counted)
    write(file := tmp_path / "tiny.gguf")
    own = gguf.GGUFReader, gguf.get_tensor_name_map
    model_folder(str(file))
    assert len(parsed) == 1
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == own


def test_linear_layers_keep_their_integers(tmp_path: Path) -> None:
    """To the numbers that the file stands for, in the order of rows of ``transformers``.  Parts of
    one matrix have one format."""
    file, kinds = tmp_path / "tiny.gguf", gguf.GGMLQuantizationType
    names = {"attn_q": "Q4_0", "attn_k": "Q8_0", "attn_v": "Q4_1", "attn_output": "Q4_0"}
    names |= {"ffn_gate": "Q5_0", "ffn_up": "Q5_1", "ffn_down": "Q8_0"}
    weights = write(file, types={name: kinds[kind] for name, kind in names.items()})
    spec = read_spec(folder := model_folder(str(file)))
    quants = [spec.quant_of(0, name) for name in LINEARS]
    assert quants == ["int8_zero_g32", "int4_g32", "int8_zero_g32", "int8_g32"]
    for impl in ("auto", "transformers"):
        model = load_model(replace(read_spec(folder, impl), dtype_name="float32"), folder, "cpu")
        modules = {n: m for n, m in model.named_modules() if isinstance(m, Linear) and m.quant}
        assert len(modules) == len(LINEARS)
        for linear, parts in FUSED.items():
            joined = parts[0] + "".join(f"+{part.rpartition('.')[2]}" for part in parts[1:])
            ends = f".{linear}" if impl == "auto" else f".{joined}"
            (layer,) = (module for name, module in modules.items() if name.endswith(ends))
            exact = [weights[f"model.layers.0.{part}.weight"] for part in parts]
            expected = torch.from_numpy(np.concatenate(exact))
            held = (layer.weight, layer.weight_scale, getattr(layer, "weight_zero", None))
            numbers = dequantize(layer.quant, *held)
            torch.testing.assert_close(numbers, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q3_K"])
def test_blocks_of_256_are_read_as_their_library_does(kind: str) -> None:
    """What no format fits is off by what is measured, and no more than int8 of 32 can be."""
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random = np.random.default_rng(0)
    data = random.integers(0, 256, (6, 2 * size), dtype=np.uint8)
    halves = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,)}[kind]
    for at in (start + half for start in (0, size) for half in halves):
        data[:, at : at + 2] = (random.random((6, 1)) / 100).astype(np.float16).view(np.uint8)
    weight = torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]).copy())
    (name, tensors), error = stored_blocks(kind, data)
    numbers = numbers_of((name, tensors))
    assert name == {"Q4_K": "int4_zero_g32", "Q5_K": "int8_zero_g32"}.get(kind, "int8_g32")
    if error:
        assert (numbers - weight).norm() / weight.norm() == pytest.approx(error) and error < 0.01
    else:
        assert (numbers - weight).abs().max() < 1e-3 * weight.abs().max()
    assert torch.equal(numbers_of(widened((name, tensors))), numbers)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
            r"llama.rope.scaling.type is 'yarn', which is not read from GGUF; use the .* safetens",
        ),
        (
            lambda w: w.add_tensor("rope_freqs.weight", np.ones(8, np.float32)),
            r"nothing takes its tensor rope_freqs.weight; use the model's safetensors",
        ),
        (
            lambda w: w.add_tensor("blk.0.ffn_up_exps.weight", np.ones((2, 8, 8), np.float32)),
            r"blk.0.ffn_up_exps.weight is of experts, which are not read from GGUF",
        ),
        (
            lambda w: w.add_tensor("blk.0.attn_q.bias", np.ones(HIDDEN, np.float32)),
            r"nothing takes its tensor blk.0.attn_q.bias",
        ),
    ],
    ids=["rope scaling", "rope factors", "experts", "bias"],
)
def test_what_the_reader_would_leave_out_is_refused(
    tmp_path: Path, cache: Path, more: Callable[[Any], None], message: str
) -> None:
    write(tmp_path / "tiny.gguf", more)
    with pytest.raises(UserError, match=message):
        model_folder(str(tmp_path))
    assert not [*(cache / "gguf").iterdir()]


def test_files_that_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"no such file" * 9)
    with pytest.raises(UserError, match=r"a\.gguf: cannot be read as GGUF: .*download it again"):
        model_folder(str(file))
    gguf.GGUFWriter(file, "t5").write_header_to_file()
    with pytest.raises(UserError, match=r"a\.gguf: cannot be read as GGUF"):
        model_folder(str(file))
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", "/dev/null/x")
    with pytest.raises(MachineError, match=r"/dev/null/x/gguf: cannot be written: Not a directory"):
        model_folder(str(file))
    monkeypatch.setattr(gguf_folder, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"the package gguf: pip install 'fusewright\[gguf\]'"):
        model_folder(str(file))
    (tmp_path / "b.gguf").touch()
    with pytest.raises(UserError, match=r"2 GGUF files, such as a\.gguf; give the path of one"):
        model_folder(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert model_folder(str(tmp_path)) == tmp_path, "safetensors are preferred"
