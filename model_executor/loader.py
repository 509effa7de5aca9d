"""Checkpoint -> module: parameters get memory once, tensors are copied into them one by one.

Every name, type and shape is checked against the checkpoint files' headers before the first byte is
copied.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..config.errors import UserError
from ..ops._float8 import E4M3
from .checkpoint import F8_E4M3, FLOATS, TensorInfo, open_checkpoint_file, read_headers
from .dummy import fill_dummy
from .experts import ExpertLinear, expert_shares
from .layers import Embedding, Linear, Placement, ShardRule, rules_of
from .models import ARCHITECTURES
from .models.decoder import DecoderModel
from .models.moe import Experts
from .models.weight_names import FUSED_EXPERTS, ModulePart, checkpoint_names
from .parallel import TensorParallelRank
from .quant.quantize import Quantized, Staging, rescale
from .quant.scales import find_scales, read_scales, scale_slots
from .spec import ModelSpec

# Old Llama checkpoints carry rope's tables, which are computed here; scales of an FP8 KV cache are
# of no use to another one.
_IGNORED = re.compile(r"\.(rotary_emb\.(inv_freq|cos_cached|sin_cached)|[kv]_scale)$")
_NAMES_SHOWN = 3


ProgressBar: TypeAlias = Callable[[str, int], AbstractContextManager[Callable[[int], Any]]]
"""(label, total) -> a context that gives what advances the bar by a number of units."""


@contextmanager
def no_progress(label: str, total: int) -> Iterator[Callable[[int], Any]]:
    """Shows nothing."""
    yield lambda count: None


@dataclass(frozen=True)
class Slot:
    """Where one checkpoint tensor goes, and the shape and type (one of) that it must have."""

    parameter: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    placement: Placement


@dataclass(frozen=True)
class Read:
    """One copy to make."""

    source: TensorInfo
    slot: Slot

    @property
    def nbytes(self) -> int:
        """Bytes that are read: the rank's slice."""
        place = self.slot.placement
        return self.source.nbytes * place.length // max(1, self.slot.shape[place.dim])


def load_model(
    spec: ModelSpec,
    folder: Path | str,
    device: torch.device | str,
    *,
    load_format: str = "auto",
    seed: int = 0,
    progress: ProgressBar = no_progress,
    rank: int = 0,
) -> DecoderModel:
    """Build the model of ``spec`` on ``device`` with the weights of ``folder``, or one rank's part
    of them.

    Args:
        spec: of ``read_spec(folder)``; weights are cast to its ``dtype``, or quantized by its
            ``quant``, a parameter at a time.
        folder: holds ``model.safetensors``, or ``model.safetensors.index.json`` and its files.
        device: where the parameters live; tensors go there one at a time.
        load_format: "auto" or "safetensors" reads the folder; "dummy" reads nothing and fills
            the weights at random from ``seed``: FP8 ones are those of the same model without
            ``quant``, quantized.
        progress: shows the bytes that are loaded, see ``ProgressBar``.
        rank: of ``spec.tensor_parallel_size``, whose slices alone are read.

    Raises:
        UserError: a checkpoint file is missing or damaged, its tensors are not those of the model,
            or the device has no room for them.
    """
    try:
        model = DecoderModel(spec)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise UserError(
            f"no room for the cosines and sines of max_position_embeddings = "
            f"{spec.max_position_embeddings}; lower it in {Path(folder) / 'config.json'}"
        ) from error
    tp = TensorParallelRank(rank, spec.tensor_parallel_size)
    place_experts(model, tp)
    if load_format == "dummy":
        materialize(model, spec.dtype, device)
        fill_dummy(model, spec.dtype, seed, tp)
    elif load_format in ("auto", "safetensors"):
        load_weights(model, read_headers(Path(folder)), device, progress, tp)
    else:
        raise UserError(f"load_format={load_format!r}: expected auto, safetensors or dummy")
    set_rank(model, tp)
    return model.eval()


def place_experts(model: nn.Module, tp: TensorParallelRank) -> None:
    """Say which experts are to be loaded."""
    for module in model.modules():
        if isinstance(module, ExpertLinear):
            module.place(tp.rank)


def set_rank(model: DecoderModel, tp: TensorParallelRank) -> None:
    """Fill what tells one rank from another beside the slices of weights: the first id of its part
    of the vocabulary and of its experts, and zeros for what another rank adds to a sum."""
    for module in model.modules():
        if isinstance(module, Embedding) and module.first_id is not None:
            module.first_id.fill_(tp.rank * module.weight.shape[0])
        if isinstance(module, Experts) and module.first_expert is not None:
            module.first_expert.fill_(module.down.first)
        for kind, rule in rules_of(module).items():
            param = getattr(module, kind, None)
            if rule.once and tp.rank > 0 and param is not None:
                param.detach().zero_()


def load_weights(
    model: DecoderModel,
    found: Mapping[str, TensorInfo],
    device: torch.device | str,
    progress: ProgressBar,
    tp: TensorParallelRank | None = None,
) -> None:
    """Check the checkpoint's tensors against the model, give it memory and fill it.

    Raises:
        UserError: as ``load_model``.
    """
    tp = tp or TensorParallelRank()
    spec, modules = model.spec, dict(model.named_modules())
    names = names_in(found, spec)
    online = spec.quant is not None and spec.quant.online
    scales = find_scales(scale_slots(modules, names, tp.rank, tp.world, online=online), found)
    used = {read.source.name for read in scales}
    weights = {name: info for name, info in found.items() if name not in used}
    reads = plan_reads(slots(model, tp, names), weights, spec)
    materialize(model, spec.dtype, device)
    scale_shares = dict(expert_shares(model, "weight_scale"))
    combined = read_scales(scales, {**dict(model.named_buffers()), **scale_shares})
    staging = Staging(
        dict(_quantized(modules)) if online else {},
        {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(expert_shares(model, "weight")),
        },
        (read.slot.parameter for read in reads),
        spec.dtype,
    )

    def filled(read: Read, part: Tensor) -> None:
        if (scale_pair := combined.get(read.source.name)) is not None:
            rescale(part, *scale_pair)
        staging.filled(read.slot.parameter)

    with progress("Loading weights", sum(r.nbytes for r in reads)) as advance:
        stream(staging, reads, advance, filled)


def names_in(
    found: Mapping[str, TensorInfo], spec: ModelSpec
) -> tuple[tuple[str, ModulePart], ...]:
    """The names of a model's tensors, as a checkpoint spells them: experts apart, or all in one."""
    fused = any(name.endswith(".experts.gate_up_proj") for name in found)
    weights = FUSED_EXPERTS if fused else ARCHITECTURES[spec.architecture].weights
    return tuple(checkpoint_names(weights, spec.num_layers, spec.num_experts))


def _quantized(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Quantized]]:
    """FP8 layers by their weights' names; those of experts as a whole, and each alone."""
    for name, module in modules.items():
        if isinstance(module, Linear | ExpertLinear) and module.quant:
            yield f"{name}.weight", module
        if isinstance(module, ExpertLinear) and module.quant:
            for number in module.numbers:
                yield f"{name}.weight[{number}]", module.expert(number)


def fake_model(spec: ModelSpec, device: torch.device) -> DecoderModel:
    """The model with weights of the right shapes and nothing in them; under ``FakeTensorMode``
    without memory either."""
    model = DecoderModel(spec)
    _replace_tensors(
        model,
        lambda param: _empty_like(param, spec.dtype, device),
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
            lambda param: _empty_like(param, dtype, device),
            lambda buffer: buffer.to(device),
        )
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        needed = sum(p.numel() * _dtype(p, dtype).itemsize for p in model.parameters())
        raise UserError(
            f"{device} has no room for {needed / 1e9:.1f} GB of weights; free memory there, or use "
            "a smaller model or a larger device"
        ) from error


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; that of the CPU has no class of its own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return "can't allocate memory" in str(error)


def _dtype(param: Tensor, dtype: torch.dtype) -> torch.dtype:
    """FP8 weights stay FP8, others are of the model's dtype."""
    return E4M3 if param.dtype == E4M3 else dtype


def _empty_like(param: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    return torch.empty(param.shape, dtype=_dtype(param, dtype), device=device)


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


def slots(
    model: DecoderModel,
    tp: TensorParallelRank,
    names: Iterable[tuple[str, ModulePart]] | None = None,
) -> dict[str, Slot]:
    """Checkpoint tensor name -> slot, for every tensor that the model needs but scales.

    Args:
        names: of ``names_in``; those of checkpoints with experts apart unless given.
    """
    spec = model.spec
    modules = dict(model.named_modules())
    params: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    params |= dict(expert_shares(model, "weight"))
    quantized = spec.quant is not None and not spec.quant.online
    found: dict[str, Slot] = {}
    for name, target in names_in({}, spec) if names is None else names:
        if name == "lm_head" and spec.tie_word_embeddings:
            continue
        # A name the spec has no module for, such as q_norm, is not needed.
        module = modules.get(target.module)
        if isinstance(module, ExpertLinear) and target.expert is None:
            found[name] = _fused_slot(f"{target.module}.weight", module, spec, tp)
            continue
        share, elsewhere = target.share, False
        if isinstance(module, ExpertLinear) and target.expert not in module.numbers:
            share, elsewhere = f"[{module.first}]", True
        for kind, rule in rules_of(module).items():
            parameter = f"{target.module}.{kind}{share}"
            param = params.get(parameter)
            if param is not None:
                dtypes = (F8_E4M3,) if quantized and param.dtype == E4M3 else FLOATS
                slot = _slot(parameter, param, rule, dtypes, target, tp)
                if elsewhere:  # it is checked here, and another rank reads it
                    slot = replace(slot, placement=replace(slot.placement, length=0))
                found[f"{name}.{kind}"] = slot
    return found


def _slot(
    name: str,
    param: Tensor,
    rule: ShardRule,
    dtypes: tuple[str, ...],
    target: ModulePart,
    tp: TensorParallelRank,
) -> Slot:
    shape = list(param.shape)
    shape[rule.dim] = next(part.size for part in rule.parts if part.name == target.part)
    return Slot(name, tuple(shape), dtypes, rule.place(target.part, tp.rank, tp.world))


def _fused_slot(name: str, layer: ExpertLinear, spec: ModelSpec, tp: TensorParallelRank) -> Slot:
    """The slot of a tensor that holds all experts."""
    if tp.world > 1 and not layer.whole:
        raise UserError(
            f"{name}: of a checkpoint with all experts in one tensor a rank reads whole experts; "
            "use enable_expert_parallel, or save the model with one tensor an expert "
            "(save_original_format=True)"
        )
    shape = (spec.num_experts, *layer.weight.shape[1:])
    return Slot(name, shape, FLOATS, Placement(0, layer.first, 0, layer.num_experts))


def plan_reads(
    needed: Mapping[str, Slot], found: Mapping[str, TensorInfo], spec: ModelSpec
) -> list[Read]:
    """Pair every slot with its tensor, in file order, the parts of a parameter together.

    Raises:
        UserError: a weight is missing, has another shape or type, or has no place in the model.
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
        if found[name].dtype not in slot.dtypes:
            raise UserError(
                f"tensor {name} in {found[name].file} is of type {found[name].dtype}, expected "
                f"{' or '.join(slot.dtypes)}; config.json must say what is quantized"
            )
    tied = {"lm_head.weight"} if spec.tie_word_embeddings else set()
    extra = [n for n in found if n not in needed and n not in tied and not _IGNORED.search(n)]
    if extra:
        raise UserError(
            f"the checkpoint has {_some(extra)}, unknown to {spec.architecture} with this "
            "config.json; config.json and weights must be of one model"
        )
    reads = [Read(found[name], slot) for name, slot in needed.items() if slot.placement.length]
    return sorted(reads, key=lambda read: (read.source.file, read.slot.parameter))


def _some(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    rest = f" and {more} more" if more > 0 else ""
    weights = "weight" if len(names) == 1 else f"{len(names)} weights:"
    return f"{weights} {', '.join(names[:_NAMES_SHOWN])}{rest}"


def stream(
    params: Mapping[str, Tensor],
    reads: Iterable[Read],
    advance: Callable[[int], Any],
    filled: Callable[[Read, Tensor], None] = lambda read, part: None,
) -> None:
    """Copy tensors into their parameters, casting, one in memory at a time; ``reads`` are in file
    order, ``advance`` is told the bytes of each, and ``filled`` the part of a parameter that holds
    it now."""
    for file, of_file in groupby(reads, key=lambda read: read.source.file):
        with open_checkpoint_file(file) as opened, torch.no_grad():
            for read in of_file:
                place = read.slot.placement
                index = [slice(None)] * len(read.slot.shape)
                index[place.dim] = slice(place.source_start, place.source_start + place.length)
                tensor = opened.get_slice(read.source.name)[tuple(index)]
                param = params[read.slot.parameter]
                part = param.narrow(place.dim, place.dest_start, place.length)
                part.copy_(tensor)
                filled(read, part)
                advance(read.nbytes)
