"""Checkpoint -> module: parameters get memory once, tensors are copied into them one by one.

Every name, shape and dtype is checked from the shards' headers before the first byte is copied.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..config.errors import UserError
from .hf_json import read_json
from .layers import Placement, RMSNorm, ShardRule
from .models import ARCHITECTURES
from .models.decoder import DecoderModel
from .models.weight_names import Target
from .spec import ModelSpec

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FLOATS = {"F64", "F32", "F16", "BF16"}
_IGNORED = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Shard:
    """This process among the ranks that hold the model together."""

    rank: int = 0
    world: int = 1


@dataclass(frozen=True)
class Slot:
    """Where one checkpoint tensor goes, and the shape it must have."""

    parameter: str
    shape: tuple[int, ...]
    placement: Placement


@dataclass(frozen=True)
class Read:
    """One copy to make."""

    file: Path
    tensor: str
    slot: Slot
    nbytes: int


def load_model(
    spec: ModelSpec,
    folder: Path | str,
    device: torch.device | str,
    *,
    load_format: str = "auto",
    seed: int = 0,
    progress: bool = True,
) -> DecoderModel:
    """Build the model of ``spec`` on ``device`` with the weights of ``folder``.

    Args:
        spec: of ``read_spec(folder)``; its ``dtype`` is what weights are cast to.
        folder: holds ``model.safetensors`` or ``model.safetensors.index.json`` with its shards.
        device: where the parameters live; tensors stream there one at a time.
        load_format: "auto" or "safetensors" reads the folder; "dummy" fills every weight from
            ``seed`` and reads nothing.
        progress: show a bar on stderr, if that is a terminal.

    Raises:
        UserError: a shard is missing or damaged, or its tensors are not those of the model.
    """
    model = DecoderModel(spec)
    if load_format == "dummy":
        materialize(model, spec.dtype, device)
        fill_dummy(model, seed)
        return model
    if load_format not in ("auto", "safetensors"):
        raise UserError(
            f"load_format={load_format!r}: expected auto, safetensors or dummy"
        )
    reads = plan_reads(model, spec, Path(folder), Shard())
    materialize(model, spec.dtype, device)
    _stream(model, reads, progress=progress)
    return model


def materialize(model: nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Give every meta parameter memory, uninitialized; tied parameters stay one.  Buffers move."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if id(param) not in made:
                memory = torch.empty(param.shape, dtype=dtype, device=device)
                made[id(param)] = nn.Parameter(memory, requires_grad=False)
            setattr(module, name, made[id(param)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def fill_dummy(model: nn.Module, seed: int) -> None:
    """Random weights on the model's own device, the same for the same seed, device and model:
    normal with standard deviation 0.02, norms one."""
    norms = {id(m.weight) for m in model.modules() if isinstance(m, RMSNorm)}
    generator: torch.Generator | None = None
    with torch.no_grad():
        for param in model.parameters():
            if id(param) in norms:
                param.fill_(1.0)
                continue
            generator = generator or torch.Generator(param.device).manual_seed(seed)
            param.normal_(0.0, 0.02, generator=generator)


def slots(model: DecoderModel, spec: ModelSpec, shard: Shard) -> dict[str, Slot]:
    """Checkpoint tensor name -> slot, for every tensor that the model needs."""
    params = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules())
    found: dict[str, Slot] = {}
    for pattern, target in ARCHITECTURES[spec.architecture].weights.items():
        layers = range(spec.num_layers) if "{}" in pattern else range(1)
        for layer in layers:
            module_name = target.module.format(layer)
            module = modules.get(module_name)
            if module is None or (pattern == "lm_head" and spec.tie_word_embeddings):
                continue
            rules: Mapping[str, ShardRule] = getattr(module, "rules")
            for kind, rule in rules.items():
                name = f"{module_name}.{kind}"
                if name in params:
                    slot = _slot(name, tuple(params[name].shape), rule, target, shard)
                    found[f"{pattern.format(layer)}.{kind}"] = slot
    return found


def _slot(
    name: str, local: tuple[int, ...], rule: ShardRule, target: Target, shard: Shard
) -> Slot:
    size = next(part.size for part in rule.parts if part.name == target.part)
    shape = (*local[: rule.dim], size, *local[rule.dim + 1 :])
    return Slot(name, shape, rule.place(target.part, shard.rank, shard.world))
