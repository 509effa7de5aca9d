"""FP8 checkpoints of every dialect arrive bit for bit; a missing or wrong scale is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fusewright.config.errors import UserError
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.layers import (
    Linear,
    gate_up_linear,
    qkv_linear,
    row_linear,
)
from fusewright.model_executor.loader import load_model
from fusewright.model_executor.models.weight_names import ModulePart
from fusewright.model_executor.quant.quantize import dummy_input_scale, quantize_into
from fusewright.model_executor.quant.scales import scale_slots
from fusewright.model_executor.quant.scheme import (
    FORMATS,
    KINDS,
    LINEARS,
    QuantFormat,
    QuantKind,
)
from fusewright.model_executor.spec import quantize_online
from tests.model_executor.quant_checkpoints import (
    BY_NAME,
    DIALECTS,
    E4M3,
    FUSED,
    TINY,
    Dialect,
    Tensors,
    by_block,
    by_channel,
    expected_linear,
    save,
    spread,
)
from tests.model_executor.tiny_models import TinyModel

every_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)


def same(got: Tensor, expected: Tensor) -> bool:
    """Equal to the bit, of one dtype and shape."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    got = got.cpu()
    return torch.equal(got.view(torch.uint8), expected.contiguous().view(torch.uint8))


@every_dialect
def test_every_weight_and_scale_lands_in_its_place(
    dialect: Dialect, tmp_path: Path, device: torch.device
) -> None:
    tensors = save(dialect, tmp_path)
    spec = replace(read_spec(tmp_path), fp8_kv_cache=True)
    assert spec.quant is not None and spec.quant.kind == dialect.kind and not spec.quant.online
    model = load_model(spec, tmp_path, device)
    for layer in range(2):
        for name in LINEARS:
            linear = model.get_submodule(f"layers.{layer}.{name}")
            weight, scale, input_scale = expected_linear(dialect, tensors, layer, name)
            assert same(linear.weight, weight), name
            assert same(linear.weight_scale, scale), name
            if input_scale is not None:
                assert same(linear.input_scale, input_scale), name
        kv = [0.01 * (1 + layer), 0.01 * (3 + layer)] if dialect.kv_scales else [1.0, 1.0]
        expected = torch.tensor(kv)[:, None].expand(2, 2)
        assert same(model.layers[layer].attention.kv_scale, expected)
    assert torch.equal(model.embed.weight.cpu(), tensors["model.embed_tokens.weight"])
    assert torch.equal(model.lm_head.weight.cpu(), tensors["lm_head.weight"])


def test_kv_scales_may_be_by_head_and_serve_no_other_cache(tmp_path: Path) -> None:
    tensors = save(BY_NAME["modelopt"], tmp_path)
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.k_proj.k_scale"] = torch.tensor([0.5, 0.25])
    save_file(tensors, tmp_path / "model.safetensors")
    spec = read_spec(tmp_path)
    model = load_model(replace(spec, fp8_kv_cache=True), tmp_path, "cpu")
    expected = torch.tensor([[0.5, 0.25], [0.04, 0.04]])
    assert same(model.layers[1].attention.kv_scale, expected)
    assert load_model(spec, tmp_path, "cpu").layers[1].attention.kv_scale is None


@pytest.mark.parametrize(
    ("dialect", "pattern", "part", "left"),
    [
        ("compressed channel", "re:.*layers\\.1\\.mlp.*", "layers.1.mlp.", "mlp.gate_up mlp.down"),
        ("compressed channel", "model.layers.0.self_attn.o_proj", "layers.0.self_attn.o_proj", ""),
        (
            "fp8 block",
            "model.layers.1.self_attn",
            "layers.1.self_attn.",
            "attention.qkv attention.o",
        ),
        ("fp8 static", "down_proj", "down_proj", "mlp.down"),
        ("modelopt", "model.layers.1.mlp*", "layers.1.mlp.", "mlp.gate_up mlp.down"),
    ],
)
def test_modules_that_the_config_leaves_out_stay_unquantized(
    dialect: str, pattern: str, part: str, left: str, tmp_path: Path
) -> None:
    tensors = save(BY_NAME[dialect], tmp_path, ignore={pattern: part})
    spec = read_spec(tmp_path)
    assert spec.quant is not None and spec.quant.unquantized[1] == tuple(left.split())
    model = load_model(spec, tmp_path, "cpu")
    for layer in range(2):
        for name in LINEARS:
            linear = model.get_submodule(f"layers.{layer}.{name}")
            names = [f"model.layers.{layer}.{p}.weight" for p in FUSED[name]]
            plain = name in spec.quant.unquantized[layer]
            assert (linear.quant is None) == plain
            if plain:
                assert torch.equal(linear.weight, torch.cat([tensors[n] for n in names]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_shard_size", ["5GB", "100KB"])
def test_online_weights_are_those_of_the_checkpoint_quantized(
    kind: QuantKind, max_shard_size: str, tmp_path: Path, device: torch.device
) -> None:
    saved = TINY.save(tmp_path, max_shard_size=max_shard_size).state_dict()
    spec = replace(read_spec(tmp_path), dtype_name="bfloat16")
    model = load_model(quantize_online(spec, kind), tmp_path, device)
    for name in LINEARS:
        parts = [saved[f"model.layers.1.{p}.weight"] for p in FUSED[name]]
        whole = torch.cat(parts).bfloat16().float()
        linear = model.get_submodule(f"layers.1.{name}")
        if kind == "fp8_static":
            scale = whole.abs().max().view(1, 1) * (1 / 448)
            expected = (whole / scale).to(E4M3)
        else:
            expected, scale = (by_channel if kind == "fp8" else by_block)(whole)
        assert same(linear.weight_scale, scale), name
        assert same(linear.weight, expected), name
    assert model.embed.weight.dtype == torch.bfloat16


def test_blocks_are_left_out_where_rows_are_not_whole_blocks(tmp_path: Path) -> None:
    """Columns decide; rows of a fused matrix may end within a block."""
    odd = TinyModel("odd", "Llama", {**TINY.options, "intermediate_size": 192})
    saved = odd.save(tmp_path).state_dict()
    spec = quantize_online(read_spec(tmp_path), "fp8_block")
    assert spec.quant is not None and spec.quant.unquantized == (("mlp.down",),) * 2
    model = load_model(spec, tmp_path, "cpu")
    gate_up = model.layers[0].mlp.gate_up
    whole = torch.cat([saved[f"model.layers.0.mlp.{p}_proj.weight"] for p in ("gate", "up")])
    assert whole.shape == (384, 128) and gate_up.weight_scale.shape == (3, 1)
    assert same(gate_up.weight, by_block(whole)[0])
    with pytest.raises(UserError, match="quantization=fp8_block: no linear layer"):
        quantize_online(replace(spec, quant=None, hidden_size=64, head_dim=16), "fp8_block")


@pytest.mark.parametrize("kind", KINDS)
def test_dummy_weights_are_those_of_the_unquantized_model(
    kind: QuantKind, tmp_path: Path, device: torch.device
) -> None:
    TINY.config().save_pretrained(tmp_path)
    spec = replace(read_spec(tmp_path), dtype_name="bfloat16")
    plain = load_model(spec, tmp_path, device, load_format="dummy", seed=5)
    model = load_model(quantize_online(spec, kind), tmp_path, device, load_format="dummy", seed=5)
    assert torch.equal(model.lm_head.weight, plain.lm_head.weight)
    for name in LINEARS:
        linear, original = (m.get_submodule(f"layers.1.{name}") for m in (model, plain))
        weight = linear.weight.cpu().float() * spread(linear.weight_scale.cpu(), linear.weight)
        error = (weight - original.weight.cpu().float()).abs()
        assert error.max() <= 0.02 * 5 / 16 and error.mean() < 0.02 / 25
        if kind == "fp8_static":
            assert linear.input_scale.item() == pytest.approx(dummy_input_scale(linear.quant))


def refusal(folder: Path, **changes: object) -> str:
    with pytest.raises(UserError) as caught:
        load_model(replace(read_spec(folder), **changes), folder, "cpu")
    message = str(caught.value)
    assert "\n" not in message
    return message


def rewrite(dialect: str, folder: Path, change: Callable[[Tensors], object]) -> str:
    """The refusal of a checkpoint whose tensors were changed."""
    tensors = save(BY_NAME[dialect], folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return refusal(folder, fp8_kv_cache=True)


Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("dialect", "suffix", "expected"),
    [
        ("fp8 static", "weight_scale", f"expected {Q}.weight_scale or {Q}.weight_scale_inv"),
        ("fp8 static", "input_scale", f"expected {Q}.input_scale or {Q}.activation_scale"),
        ("fp8 block", "weight_scale_inv", f"expected {Q}.weight_scale or {Q}.weight_scale_inv"),
        ("compressed channel", "weight_scale", f"expected {Q}.weight_scale"),
    ],
)
def test_a_missing_scale_is_named(dialect: str, suffix: str, expected: str, tmp_path: Path) -> None:
    message = rewrite(dialect, tmp_path, lambda tensors: tensors.pop(f"{Q}.{suffix}"))
    assert f"no scale for {Q}.weight in {tmp_path}" in message and expected in message


def test_a_kv_scale_that_other_layers_have_is_missed(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.v_proj.v_scale"
    message = rewrite("modelopt", tmp_path, lambda tensors: tensors.pop(name))
    assert "no scale for the v cache of model.layers.1" in message and f"or {name}" in message


@pytest.mark.parametrize(
    ("dialect", "name", "value", "expected"),
    [
        ("fp8 static", f"{Q}.weight_scale", torch.ones(256, 1), "[256, 1], expected [1, 1] or"),
        ("fp8 static", f"{Q}.input_scale", torch.ones(2), "[2], expected [1, 1] or [1] or []"),
        ("fp8 block", f"{Q}.weight_scale_inv", torch.ones(1), "shape [1], expected [2, 1]"),
        ("fp8 block", f"{Q}.weight_scale_inv", torch.ones(1, 2), "[1, 2], expected [2, 1]"),
        ("compressed channel", f"{Q}.weight_scale", torch.ones(2, 1), "expected [256, 1] or [256]"),
        ("compressed channel", f"{Q}.weight_scale", torch.zeros(256), "holds 0.0, expected posit"),
        ("fp8 static", f"{Q}.input_scale", torch.tensor(torch.nan), "holds nan, expected positive"),
        ("fp8 static", f"{Q}.input_scale", torch.ones(1).to(E4M3), "type F8_E4M3, expected one of"),
        ("fp8 static", f"{Q}.weight", torch.ones(256, 128), "is of type F32, expected F8_E4M3"),
        ("fp8 static", "lm_head.weight", torch.ones(128, 128).to(E4M3), "F8_E4M3, expected F64 or"),
        ("fp8 static", f"{Q}.weight", torch.ones(256, 64).to(E4M3), "[256, 64], expected [256, 12"),
        ("fp8 static", f"{Q}.zero_point", torch.ones(1), f"has weight {Q}.zero_point, unknown"),
    ],
)  # fmt: skip
def test_a_wrong_tensor_is_named(
    dialect: str, name: str, value: Tensor, expected: str, tmp_path: Path
) -> None:
    message = rewrite(dialect, tmp_path, lambda tensors: tensors.update({name: value}))
    assert name in message and expected in message, message


def test_scales_without_a_quantization_config_are_unknown(tmp_path: Path) -> None:
    save(BY_NAME["fp8 dynamic"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "is of type F8_E4M3, expected F64 or F32" in refusal(tmp_path)


def test_fused_parts_that_begin_within_a_block_are_refused(tmp_path: Path) -> None:
    save(BY_NAME["fp8 block"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        for part in ("gate", "up"):
            name = f"model.layers.{layer}.mlp.{part}_proj"
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"][:64].clone()
            tensors[f"{name}.weight_scale_inv"] = tensors[f"{name}.weight_scale_inv"][:1].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    spec = read_spec(tmp_path)
    assert spec.quant is not None
    narrow = replace(spec.quant, unquantized=(("mlp.down",),) * 2)
    message = refusal(tmp_path, intermediate_size=64, quant=narrow)
    assert "layers.0.mlp.up_proj.weight has one scale for 128 x 128" in message
    assert "begins at 64, expected a multiple of 128" in message


def shards(linear: Linear, names: list[tuple[str, ModulePart]], world: int) -> list[Tensor]:
    """Each rank's part of a layer's weight scale, from one whose entries count up in each part."""
    made = []
    for rank in range(world):
        slots = list(scale_slots({"m": linear}, names, rank, world))
        (dim,) = {d for slot in slots for d in (0, 1) if slot.dest[d] != slice(None)}
        local = torch.full((max(slot.dest[dim].stop for slot in slots),), -1)
        for i, slot in enumerate(slots):
            count = 100 * i + torch.arange(slot.shape[dim])
            whole = count.unsqueeze(1 - dim).expand(slot.shape)
            local[slot.dest[dim]] = whole[slot.source].select(1 - dim, 0)
        made.append(local)
    return made


def test_ranks_hold_the_scales_of_their_rows_and_columns() -> None:
    parts = [("q", ModulePart("m", "q")), ("k", ModulePart("m", "k")), ("v", ModulePart("m", "v"))]
    block = qkv_linear(256, 8, 2, 128, quant="fp8_block")
    first, second = shards(block, parts, 2)
    assert first.tolist() == [0, 1, 2, 3, 100, 200] and second.tolist() == [4, 5, 6, 7, 101, 201]
    # KV heads are replicated when ranks outnumber them.
    assert [s.tolist() for s in shards(block, parts, 4)][3] == [6, 7, 101, 201]
    channel = shards(qkv_linear(256, 8, 2, 16, quant="fp8"), parts, 2)[1]
    assert channel.tolist() == [*range(64, 128), *range(116, 132), *range(216, 232)]
    down = row_linear(512, 256, quant="fp8_block")
    assert [s.tolist() for s in shards(down, [("d", ModulePart("m"))], 2)] == [[0, 1], [2, 3]]
    whole = shards(row_linear(512, 4, quant="fp8"), [("d", ModulePart("m"))], 2)
    assert [s.tolist() for s in whole] == [[0, 1, 2, 3]] * 2


def test_ranks_that_would_share_a_block_are_refused() -> None:
    halves = [("gate", ModulePart("m", "gate")), ("up", ModulePart("m", "up"))]
    gate_up = gate_up_linear(256, 256, quant="fp8_block")
    assert [s.tolist() for s in shards(gate_up, halves, 2)] == [[0, 100], [1, 101]]
    with pytest.raises(UserError, match="begins at 64, expected a multiple of 128"):
        list(scale_slots({"m": gate_up}, halves, 1, 4))


MEASURE = """
import re, sys
from pathlib import Path
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from fusewright.model_executor.checkpoint import read_headers
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.loader import load_weights, no_progress
from fusewright.model_executor.models.decoder import DecoderModel
from fusewright.model_executor.spec import quantize_online

def anonymous_bytes():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

class Watched(TorchDispatchMode):
    peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.peak = max(self.peak, anonymous_bytes())  # with all that the call was given and made
        return result

folder = Path(sys.argv[1])
model = DecoderModel(quantize_online(read_spec(folder), sys.argv[2]))
found = read_headers(folder)
with Watched() as watched:
    torch.ones(2).amax()  # what this mode imports
    watched.peak = before = anonymous_bytes()
    load_weights(model, found, "cpu", no_progress)
largest = max(p.numel() for p in model.parameters() if p.dtype.itemsize == 1)
print(watched.peak - before, sum(p.nbytes for p in model.parameters()), 4 * largest)
"""


@pytest.mark.product(2)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("kind", ["fp8", "fp8_block"])
def test_online_quantization_holds_one_unquantized_parameter(kind: str, tmp_path: Path) -> None:
    """A model of 134 MB in float32: the 34 MB that it takes in FP8, and its largest weight."""
    wide = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "head_dim": 128,
        "num_hidden_layers": 2,
        "vocab_size": 256,
    }
    TinyModel("wide", "Llama", wide).save(tmp_path)
    # A process of its own, that gives back what it frees: other memory would hide growth here.
    command = [sys.executable, "-c", MEASURE, str(tmp_path), kind]
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    growth, total, largest = map(int, done.stdout.split())
    # Beside both: some rows in float32, a few times, while they are quantized.
    assert total + 0.9 * largest < growth < total + largest + 35e6


def test_a_format_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale for 64 x 32 numbers: shaped, quantized and sharded by what its row says."""
    made = QuantFormat(rows=64, columns=32)
    monkeypatch.setitem(FORMATS, "fp8 64 x 32", made)  # type: ignore[arg-type]
    linear = gate_up_linear(96, 64, quant="fp8 64 x 32")  # type: ignore[arg-type]
    assert linear.weight_scale.shape == made.scale_shape(128, 96) == (2, 3)
    linear = linear.to_empty(device="cpu")
    weight = torch.randn(128, 96) * torch.logspace(-2, 2, 96)
    quantize_into(linear, weight)
    scale = linear.weight_scale.repeat_interleave(64, 0).repeat_interleave(32, 1)
    torch.testing.assert_close(linear.weight.float() * scale, weight, rtol=0.07, atol=1e-3)
    assert (linear.weight.float().view(2, 64, 3, 32).abs().amax((1, 3)) == 448).all()
