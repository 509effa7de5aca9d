"""Checkpoint -> module: parameters get memory once, tensors are copied into them one by one.

Every name and shape is checked against the shards' headers before the first byte is copied.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..config.errors import UserError
from .checkpoint import TensorInfo, open_shard, read_headers
from .layers import Placement, RMSNorm, ShardRule
from .models import ARCHITECTURES
from .models.decoder import DecoderModel
from .models.weight_names import Target
from .spec import ModelSpec

# Old Llama checkpoints carry rope's tables; they are computed here.
_IGNORED = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_NAMES_SHOWN = 3


ProgressBar: TypeAlias = Callable[[str, int], AbstractContextManager[Callable[[int], Any]]]
"""(label, total) -> a context that gives what advances the bar by a number of units."""


@contextmanager
def no_progress(label: str, total: int) -> Iterator[Callable[[int], Any]]:
    """Shows nothing."""
    yield lambda count: None


@dataclass(frozen=True)
class Shard:
    """This process among the ranks that hold the model together."""

    rank: int = 0
    world: int = 1


@dataclass(frozen=True)
class Slot:
    """Where one checkpoint tensor goes, and the shape that it must have."""

    parameter: str
    shape: tuple[int, ...]
    placement: Placement


@dataclass(frozen=True)
class Read:
    """One copy to make."""

    source: TensorInfo
    slot: Slot


def load_model(
    spec: ModelSpec,
    folder: Path | str,
    device: torch.device | str,
    *,
    load_format: str = "auto",
    seed: int = 0,
    progress: ProgressBar = no_progress,
) -> DecoderModel:
    """Build the model of ``spec`` on ``device`` with the weights of ``folder``.

    Args:
        spec: of ``read_spec(folder)``; weights are cast to its ``dtype``.
        folder: holds ``model.safetensors``, or ``model.safetensors.index.json`` and its shards.
        device: where the parameters live; tensors go there one at a time.
        load_format: "auto" or "safetensors" reads the folder; "dummy" reads nothing and fills
            the weights at random from ``seed``.
        progress: shows the bytes that are loaded, see ``ProgressBar``.

    Raises:
        UserError: a shard is missing or damaged, its tensors are not those of the model, or the
            device has no room for them.
    """
    model = DecoderModel(spec)
    if load_format == "dummy":
        materialize(model, spec.dtype, device)
        fill_dummy(model, seed)
    elif load_format in ("auto", "safetensors"):
        reads = plan_reads(slots(model, Shard()), read_headers(Path(folder)), spec)
        materialize(model, spec.dtype, device)
        with progress("Loading weights", sum(r.source.nbytes for r in reads)) as advance:
            stream(dict(model.named_parameters(remove_duplicate=False)), reads, advance)
    else:
        raise UserError(f"load_format={load_format!r}: expected auto, safetensors or dummy")
    return model.eval()


def fake_model(spec: ModelSpec, device: torch.device) -> DecoderModel:
    """The model with weights of the right shapes and nothing in them; under ``FakeTensorMode``
    without memory either."""
    model = DecoderModel(spec)
    _replace_tensors(
        model,
        lambda param: torch.empty(param.shape, dtype=spec.dtype, device=device),
        lambda buffer: torch.empty(buffer.shape, dtype=buffer.dtype, device=device),
    )
    return model.eval()


def materialize(model: nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Give every meta parameter uninitialized memory; tied parameters stay one.  Buffers move.

    Raises:
        UserError: the device has no room.
    """
    try:
        _replace_tensors(
            model,
            lambda param: torch.empty(param.shape, dtype=dtype, device=device),
            lambda buffer: buffer.to(device),
        )
    except torch.OutOfMemoryError as error:
        needed = sum(p.numel() for p in model.parameters()) * dtype.itemsize
        raise UserError(
            f"{device} has no room for {needed / 1e9:.1f} GB of weights; free memory there, or use "
            "a smaller model or a larger device"
        ) from error


def _replace_tensors(
    model: nn.Module,
    new_param: Callable[[Tensor], Tensor],
    new_buffer: Callable[[Tensor], Tensor],
) -> None:
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if id(param) not in made:
                made[id(param)] = nn.Parameter(new_param(param), requires_grad=False)
            setattr(module, name, made[id(param)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, new_buffer(buffer))


def fill_dummy(model: nn.Module, seed: int) -> None:
    """Random weights, made on the parameters' device: normal with standard deviation 0.02, norms
    one.  The same for the same seed, model and kind of device."""
    norms = {id(m.weight) for m in model.modules() if isinstance(m, RMSNorm)}
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            if id(param) in norms:
                param.fill_(1.0)
            else:
                param.normal_(0.0, 0.02, generator=generator)


def slots(model: DecoderModel, shard: Shard) -> dict[str, Slot]:
    """Checkpoint tensor name -> slot, for every tensor that the model needs."""
    spec = model.spec
    modules = dict(model.named_modules())
    params = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, Slot] = {}
    for pattern, target in ARCHITECTURES[spec.architecture].weights.items():
        if pattern == "lm_head" and spec.tie_word_embeddings:
            continue
        for layer in range(spec.num_layers if "{}" in pattern else 1):
            name = target.module.format(layer)
            # A name the spec has no module for, such as q_norm, is not needed.
            rules: Mapping[str, ShardRule] = getattr(modules.get(name), "rules", {})
            for kind, rule in rules.items():
                if (param := params.get(f"{name}.{kind}")) is not None:
                    slot = _slot(f"{name}.{kind}", param, rule, target, shard)
                    found[f"{pattern.format(layer)}.{kind}"] = slot
    return found


def _slot(name: str, param: Tensor, rule: ShardRule, target: Target, shard: Shard) -> Slot:
    shape = list(param.shape)
    shape[rule.dim] = next(part.size for part in rule.parts if part.name == target.part)
    return Slot(name, tuple(shape), rule.place(target.part, shard.rank, shard.world))


def plan_reads(
    needed: Mapping[str, Slot], found: Mapping[str, TensorInfo], spec: ModelSpec
) -> list[Read]:
    """Pair every slot with its tensor, in file order.

    Raises:
        UserError: a weight is missing, has another shape, or has no place in the model.
    """
    missing = [name for name in needed if name not in found]
    if missing:
        raise UserError(
            f"the checkpoint lacks {_some(missing)}, which config.json calls for; "
            "download the model again, or use its own config.json"
        )
    for name, slot in needed.items():
        if found[name].shape != slot.shape:
            raise UserError(
                f"tensor {name} in {found[name].file} has shape {list(found[name].shape)}, "
                f"expected {list(slot.shape)}; config.json and weights must be of one model"
            )
    tied = {"lm_head.weight"} if spec.tie_word_embeddings else set()
    extra = [n for n in found if n not in needed and n not in tied and not _IGNORED.search(n)]
    if extra:
        raise UserError(
            f"the checkpoint has {_some(extra)}, unknown to {spec.architecture} with this "
            "config.json; config.json and weights must be of one model"
        )
    reads = [Read(found[name], slot) for name, slot in needed.items()]
    return sorted(reads, key=lambda read: read.source.file)


def _some(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    rest = f" and {more} more" if more > 0 else ""
    weights = "weight" if len(names) == 1 else f"{len(names)} weights:"
    return f"{weights} {', '.join(names[:_NAMES_SHOWN])}{rest}"


def stream(
    params: Mapping[str, Tensor], reads: Iterable[Read], advance: Callable[[int], Any]
) -> None:
    """Copy tensors into their parameters, casting, one in memory at a time; ``reads`` are in file
    order and ``advance`` is told the bytes of each."""
    for file, of_file in groupby(reads, key=lambda read: read.source.file):
        with open_shard(file) as shard, torch.no_grad():
            for read in of_file:
                place = read.slot.placement
                index = [slice(None)] * len(read.slot.shape)
                index[place.dim] = slice(place.source_start, place.source_start + place.length)
                tensor = shard.get_slice(read.source.name)[tuple(index)]
                param = params[read.slot.parameter]
                param.narrow(place.dim, place.dest_start, place.length).copy_(tensor)
                advance(read.source.nbytes)
