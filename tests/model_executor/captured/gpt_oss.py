"""A small gpt-oss, and its checkpoint with experts in MXFP4 as its makers lay it out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fusewright.config.weight_format import STORED_FORMATS
from fusewright.ops.linear.formats import dequantize, quantize

LEFT = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
"""The modules that gpt-oss's config leaves in 16 bits."""


def small_model(seed: int = 0, **sizes: Any) -> Any:
    """A model of four layers with windows, sinks and biases, in float32."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **{
            "num_hidden_layers": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 200,
            "hidden_size": 64,
            "intermediate_size": 64,
            "head_dim": 16,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "sliding_window": 16,
            "max_position_embeddings": 4096,
            "eos_token_id": None,
            "dtype": "float32",
            **sizes,
        }
    )
    model = GptOssForCausalLM(config).eval()
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            drawn = torch.randn(tensor.shape, generator=gen)
            if "norm" in name:
                tensor.copy_(1 + 0.3 * drawn)
            elif tensor.dim() < 2 or "bias" in name:
                tensor.copy_(0.5 * drawn)
            else:
                tensor.copy_(drawn * (0.25 if tensor.dim() == 3 else tensor.shape[-1] ** -0.5))
    model.config.architectures = [type(model).__name__]
    return model


def save_mxfp4(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Write the model with experts in MXFP4, and give it the weights that these stand for; returns
    the tensors of the file."""
    form, tensors = STORED_FORMATS["mxfp4"], dict[str, torch.Tensor]()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not name.endswith(("gate_up_proj", "down_proj")):
                tensors[name] = tensor.clone().contiguous()
                continue
            parts = [quantize(form, one) for one in tensor.transpose(1, 2)]
            numbers = [dequantize(form, part["weight"], part["weight_scale"]) for part in parts]
            tensor.copy_(torch.stack(numbers).transpose(1, 2))
            blocks = torch.stack([part["weight"] for part in parts])
            tensors[f"{name}_blocks"] = blocks.unflatten(2, (-1, 16)).contiguous()
            scales = torch.stack([part["weight_scale"].view(torch.uint8) for part in parts])
            tensors[f"{name}_scales"] = scales.contiguous()
    write_mxfp4(model, tensors, folder)
    return tensors


def write_mxfp4(model: Any, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write tensors as a checkpoint of a model with experts in MXFP4."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(model.config.to_json_string())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": [*LEFT]}
    (folder / "config.json").write_text(json.dumps(config))
