"""Checkpoints in every dialect of FP8 that is read, written from a model's float weights by plain
torch; and what must become of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model_executor.tiny_models import TinyModel

E4M3 = torch.float8_e4m3fn
Tensors = dict[str, Tensor]

# Whole blocks of 128 everywhere, and parts of fused matrices that begin at whole blocks.
TINY = TinyModel(
    "quantizable", "Llama", {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
)
FUSED = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.o": ("self_attn.o_proj",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}


def to_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(E4M3)


def by_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().max() / 448
    return to_e4m3(weight / scale), scale


def by_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) * (1 / 448)
    return to_e4m3(weight / scale), scale


def by_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The last rows may be fewer than a block's."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    whole = F.pad(weight, (0, 0, 0, 128 * rows - len(weight)))
    blocks = whole.view(rows, 128, columns, 128)
    scale = blocks.abs().amax((1, 3), keepdim=True) * (1 / 448)
    quantized = to_e4m3(blocks / scale).view(whole.shape)[: len(weight)]
    return quantized.contiguous(), scale.view(rows, columns)


def spread(scale: Tensor, weight: Tensor) -> Tensor:
    """The scale of every element of a weight: a single one, one a row, or one a block."""
    if scale.numel() == 1 or scale.shape == (weight.shape[0], 1):
        return scale.reshape(-1, 1).expand(weight.shape)
    return scale.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)


@dataclass(frozen=True)
class Dialect:
    """One way to write FP8: ``config`` takes the names left out, ``shape`` that of a scale."""

    name: str
    kind: str
    config: Callable[[list[str]], dict[str, Any]]
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
    shape: Callable[[Tensor], Tensor] = lambda scale: scale
    weight_scale: str = "weight_scale"
    input_scale: str = ""
    kv_scales: tuple[str, str] | None = None
    file: str = "config.json"


def _fp8(activations: str, **more: Any) -> Callable[[list[str]], dict[str, Any]]:
    def config(ignore: list[str]) -> dict[str, Any]:
        left = {"modules_to_not_convert": ignore} if ignore else {}
        return {"quant_method": "fp8", "activation_scheme": activations, **more, **left}

    return config


def _compressed(weights: dict[str, Any], activations: dict[str, Any]) -> Any:
    both = {"num_bits": 8, "type": "float", "symmetric": True}

    def config(ignore: list[str]) -> dict[str, Any]:
        group = {
            "targets": ["Linear"],
            "weights": both | {"dynamic": False} | weights,
            "input_activations": both | activations,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", *ignore],
        }

    return config


def _modelopt(algorithm: str) -> Callable[[list[str]], dict[str, Any]]:
    def config(ignore: list[str]) -> dict[str, Any]:
        names = ["lm_head", *ignore]
        return {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": names}

    return config


def _modelopt_inside(ignore: list[str]) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", *ignore]}


_TOKEN = {"strategy": "token", "dynamic": True}
_SCALARS = ("self_attn.k_scale", "self_attn.v_scale")
_OF_PROJECTIONS = ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale")


def _vector(scale: Tensor) -> Tensor:
    return scale.reshape(-1)


DIALECTS = [
    Dialect("fp8 static", "fp8_static", _fp8("static"), by_tensor, input_scale="input_scale"),
    Dialect("fp8 dynamic", "fp8", _fp8("dynamic"), by_tensor),
    Dialect(
        "fp8 block",
        "fp8_block",
        _fp8("dynamic", weight_block_size=[128, 128], fmt="e4m3"),
        by_block,
        weight_scale="weight_scale_inv",
    ),
    Dialect(
        "fp8 static, other names",
        "fp8_static",
        _fp8("static", weight_block_size=None),
        by_tensor,
        weight_scale="weight_scale_inv",
        input_scale="activation_scale",
    ),
    Dialect(
        "compressed static",
        "fp8_static",
        _compressed({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}),
        by_tensor,
        _vector,
        input_scale="input_scale",
        kv_scales=_SCALARS,
    ),
    Dialect("compressed tensor", "fp8", _compressed({"strategy": "tensor"}, _TOKEN), by_tensor),
    Dialect("compressed channel", "fp8", _compressed({"strategy": "channel"}, _TOKEN), by_channel),
    Dialect(
        "compressed block",
        "fp8_block",
        _compressed(
            {"strategy": "block", "block_structure": [128, 128]},
            {"strategy": "group", "group_size": 128, "dynamic": True},
        ),
        by_block,
    ),
    Dialect(
        "modelopt",
        "fp8_static",
        _modelopt("FP8"),
        by_tensor,
        input_scale="input_scale",
        kv_scales=_OF_PROJECTIONS,
        file="hf_quant_config.json",
    ),
    Dialect(
        "modelopt inside",
        "fp8_static",
        _modelopt_inside,
        by_tensor,
        input_scale="input_scale",
        kv_scales=_OF_PROJECTIONS,
    ),
    Dialect(
        "modelopt channel",
        "fp8",
        _modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
        by_channel,
        _vector,
        file="hf_quant_config.json",
    ),
]
BY_NAME = {dialect.name: dialect for dialect in DIALECTS}


def save(
    dialect: Dialect,
    folder: Path,
    *,
    ignore: Mapping[str, str] | None = None,
    input_scales: Mapping[str, float] | None = None,
    tiny: TinyModel = TINY,
) -> Tensors:
    """Write ``tiny`` quantized; returns the tensors written.

    Args:
        ignore: pattern -> the part of a name by which the modules that it leaves out are known.
        input_scales: of activations, by module name; else invented, no two alike.
    """
    tiny.save(folder)
    return requantize(dialect, folder, ignore=ignore, input_scales=input_scales)


def requantize(
    dialect: Dialect,
    folder: Path,
    *,
    ignore: Mapping[str, str] | None = None,
    input_scales: Mapping[str, float] | None = None,
) -> Tensors:
    """Quantize the checkpoint in a folder; see ``save``."""
    ignore = ignore or {}
    tensors: Tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        left = any(part in f"{module}." for part in ignore.values())
        if left or not module.endswith(("_proj", "_proj_with_mqa")):
            tensors[name] = weight
            continue
        quantized, scale = dialect.quantize(weight.float())
        tensors[name] = quantized
        tensors[f"{module}.{dialect.weight_scale}"] = dialect.shape(scale).clone()
        if dialect.input_scale:
            value = input_scales[module] if input_scales else (len(tensors) % 7 + 10) / 448
            tensors[f"{module}.{dialect.input_scale}"] = dialect.shape(torch.tensor(value))
    if dialect.kv_scales:
        num_layers = sum(name.endswith(".input_layernorm.weight") for name in tensors)
        for layer in range(num_layers):
            for row, kind in enumerate(dialect.kv_scales):
                value = dialect.shape(torch.tensor(0.01 * (1 + layer + 2 * row)))
                tensors[f"model.layers.{layer}.{kind}"] = value
    save_file(tensors, folder / "model.safetensors")
    section = dialect.config(list(ignore))
    if dialect.file == "config.json":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    else:
        (folder / dialect.file).write_text(json.dumps({"quantization": section}))
    return tensors


def expected_linear(
    dialect: Dialect, tensors: Tensors, layer: int, linear: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(weight, weight_scale, input_scale) of a fused layer of the checkpoint ``tensors``."""
    names = [f"model.layers.{layer}.{part}" for part in FUSED[linear]]
    weights = [tensors[f"{name}.weight"] for name in names]
    scales = [tensors[f"{name}.{dialect.weight_scale}"] for name in names]
    if dialect.kind == "fp8_static":
        inputs = [tensors[f"{name}.{dialect.input_scale}"].reshape(1, 1) for name in names]
        scale = torch.stack([s.reshape(1, 1) for s in scales]).amax(0)
        # A part that has this scale already stays as it is, to the bit.
        moved = [
            w if s.item() == scale.item() else to_e4m3(w.float() * s / scale)
            for w, s in zip(weights, scales, strict=True)
        ]
        return _cat(moved), scale, torch.stack(inputs).amax(0)
    if dialect.kind == "fp8":
        scales = [s.reshape(-1, 1).expand(len(w), 1) for w, s in zip(weights, scales, strict=True)]
    return _cat(weights), torch.cat(scales), None


def _cat(weights: list[Tensor]) -> Tensor:
    return torch.cat([w.view(torch.uint8) for w in weights]).view(E4M3)
