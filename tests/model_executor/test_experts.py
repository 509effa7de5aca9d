"""Experts arrive in one parameter from either form of a checkpoint, and bad ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fusewright.config.errors import UserError
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.loader import load_model
from fusewright.model_executor.models.decoder import DecoderModel
from fusewright.model_executor.spec import quantize_online
from tests.model_executor.paged_steps import PagedSteps, random_tokens
from tests.model_executor.tiny_models import BY_NAME, MOE_MODELS, TinyModel

every_model = pytest.mark.parametrize("tiny", MOE_MODELS, ids=lambda tiny: tiny.name)


@every_model
@pytest.mark.parametrize("original", [True, False])
def test_every_expert_lands_in_its_place(
    tiny: TinyModel, original: bool, tmp_path: Path, device: torch.device
) -> None:
    """``original``: a tensor an expert, else one for all of them."""
    saved = tiny.model()
    saved.save_pretrained(tmp_path, save_original_format=original)
    names = load_file(tmp_path / "model.safetensors")
    assert any(name.endswith("experts.gate_up_proj") for name in names) is not original
    model = load_model(read_spec(tmp_path), tmp_path, device)
    ours, theirs = dict(model.named_parameters()), saved.state_dict()
    layers = [i for i in range(len(model.layers)) if f"layers.{i}.mlp.router.weight" in ours]
    assert layers
    for i in layers:
        for part in ("gate_up", "down"):
            found = ours[f"layers.{i}.mlp.experts.{part}.weight"]
            assert torch.equal(found.cpu(), theirs[f"model.layers.{i}.mlp.experts.{part}_proj"])


def test_experts_that_nobody_chooses_change_nothing(tmp_path: Path, device: torch.device) -> None:
    """The router knows one direction: tokens go to the two experts at one of its ends."""
    tiny = BY_NAME["qwen3_moe"]
    model = tiny.model()
    with torch.no_grad():
        for layer in model.model.layers:
            ends = torch.tensor([3.0, 2.0, 1.5, *[0.0] * 10, -1.5, -2.0, -3.0])
            layer.mlp.gate.weight.copy_(ends[:, None] * layer.mlp.gate.weight[:1])
    model.save_pretrained(tmp_path)
    ours = load_model(read_spec(tmp_path), tmp_path, device)
    for layer in ours.layers:  # NaN would spread from any expert that is read
        layer.mlp.experts.down.weight.data[3:13] = torch.nan
    tokens = random_tokens(3, 40)
    logits = PagedSteps(ours, tokens).step({0: 3, 1: 40})
    with torch.inference_mode():
        expected = torch.stack([model(torch.tensor([t])).logits[0, -1] for t in tokens])
    torch.testing.assert_close(logits.cpu(), expected, atol=1e-4, rtol=0)


def fp8_model(folder: Path, device: torch.device, kind: str) -> DecoderModel:
    return load_model(quantize_online(read_spec(folder), kind), folder, device)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["fp8", "fp8_block", "fp8_static"])
def test_fp8_experts_are_quantized_alike_from_either_form(
    kind: str, tmp_path: Path, device: torch.device
) -> None:
    options = {"hidden_size": 128, "moe_intermediate_size": 128}
    tiny = replace(BY_NAME["qwen3_moe"], options=BY_NAME["qwen3_moe"].options | options)
    found = []
    for original in (True, False):
        folder = tmp_path / str(original)
        tiny.model().save_pretrained(folder, save_original_format=original)
        found.append(dict(fp8_model(folder, device, kind).state_dict()))
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert torch.equal(value.float(), found[1][name].float()), name
    weight = found[0]["layers.0.mlp.experts.gate_up.weight"]
    scale = found[0]["layers.0.mlp.experts.gate_up.weight_scale"]
    assert weight.dtype == torch.float8_e4m3fn and scale.shape[0] == weight.shape[0]
    assert found[0]["layers.0.mlp.router.weight"].dtype == torch.float32


def test_an_fp8_checkpoint_of_experts_loads(tmp_path: Path, device: torch.device) -> None:
    """As Qwen3-30B-A3B-FP8 is written: a weight and its scales an expert, the router left out."""
    tiny = replace(
        BY_NAME["qwen3_moe"],
        options=BY_NAME["qwen3_moe"].options | {"hidden_size": 128, "moe_intermediate_size": 128},
    )
    tiny.model().save_pretrained(tmp_path)
    state = fp8_model(tmp_path, device, "fp8_block").state_dict()
    names = load_file(tmp_path / "model.safetensors")
    for name in [n for n in names if ".experts." in n]:
        layer, number, part = (name.split(".")[i] for i in (2, 5, 6))
        module = f"layers.{layer}.mlp.experts.{'down' if part == 'down_proj' else 'gate_up'}"
        for kind, found in (("weight", name), ("weight_scale", f"{name}_scale_inv")):
            whole = state[f"{module}.{kind}"][int(number)].cpu()
            halves = {"gate_proj": whole.chunk(2)[0], "up_proj": whole.chunk(2)[-1]}
            names[found] = halves.get(part, whole).contiguous()
    save_file(names, tmp_path / "model.safetensors")
    left = ["lm_head", "self_attn", *[f"model.layers.{i}.mlp.gate" for i in (0, 1)]]
    section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    edit(tmp_path, quantization_config=section | {"modules_to_not_convert": left})
    loaded = load_model(read_spec(tmp_path), tmp_path, device).state_dict()
    experts = [name for name in state if ".experts." in name]
    assert len(experts) == 8
    for name in experts:
        assert torch.equal(state[name].float(), loaded[name].float()), name


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_model(read_spec(folder), folder, "cpu")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    BY_NAME["qwen3_moe"].save(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts_per_tok": 17}, "top_k is 17, expected 1 to the 16 experts"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0; expected at least 1"),
        ({"mlp_only_layers": [2]}, "expected a list of layers, 0 to 1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0; expected at least 1"),
        ({"num_experts": 12}, "mlp.gate.weight in"),
        ({"num_experts": 20}, "the checkpoint lacks 24 weights: model.layers.0.mlp.experts.16."),
        ({"moe_intermediate_size": 48}, "has shape [32, 64], expected [48, 64]"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    changes: dict[str, Any], said: str, folder: Path
) -> None:
    config = json.loads((folder / "config.json").read_text())
    if "num_experts" in changes and "num_local_experts" in config:
        changes = {"num_local_experts": changes["num_experts"]}
    edit(folder, **changes)
    assert said in refusal(folder)


def spoil(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> str:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return refusal(folder)


def test_a_missing_expert_is_named(folder: Path) -> None:
    name = "model.layers.1.mlp.experts.7.up_proj.weight"
    assert f"the checkpoint lacks weight {name}" in spoil(folder, lambda t: t.pop(name))


def test_an_expert_too_many_is_named(folder: Path) -> None:
    name = "model.layers.1.mlp.experts.16.up_proj.weight"
    assert f"has weight {name}" in spoil(folder, lambda t: t.update({name: torch.zeros(32, 64)}))


def test_a_model_whose_layers_are_all_dense_has_no_experts(folder: Path) -> None:
    edit(folder, mlp_only_layers=[0, 1])
    assert read_spec(folder).moe is None
