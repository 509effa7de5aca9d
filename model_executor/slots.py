"""The tensors of a checkpoint that a model reads, and where they go.

Every name, type and shape is checked before anything is read, also of what other ranks read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor, nn

from ..config.errors import UserError
from ..config.weight_format import STORED_FORMATS, StoredFormat
from ..ops.core.float8 import E4M3
from .checkpoint import F8_E4M3, FLOATS, TensorInfo, dtype_names
from .experts import ExpertLinear, expert_shares
from .heads.forms import FORMS
from .laid_out import layout_of
from .layers import Linear, rules_of
from .models import ARCHITECTURES
from .models.decoder import DecoderModel
from .models.weight_names import FUSED_EXPERTS, checkpoint_names
from .parallel import TensorParallelRank
from .quant.scales import ScaleSlot, scale_slots
from .quant.scheme import QuantScheme
from .sharding import ModulePart, Placement, ShardRule
from .spec import ModelSpec

IGNORED = re.compile(r"\.[kv]_scale$")
"""Scales of an FP8 KV cache, which are of no use to another one."""
_NAMES_SHOWN = 3


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


def all_slots(
    model: DecoderModel, tp: TensorParallelRank, found: Mapping[str, TensorInfo]
) -> tuple[dict[str, Slot], list[ScaleSlot]]:
    """The slots of a model's weights and scales."""
    spec, modules, names = model.spec, dict(model.named_modules()), names_in(found, model.spec)
    online = spec.quant is not None and spec.quant.online
    scales = scale_slots(modules, names, tp.rank, tp.world, online=online)
    return slots(model, tp, names, found), list(scales)


def elsewhere(slot: Slot) -> Slot:
    """The slot as a rank holds it that checks the tensor, but leaves reading it to another rank."""
    return replace(slot, placement=replace(slot.placement, length=0))


def names_in(
    found: Mapping[str, TensorInfo], spec: ModelSpec
) -> tuple[tuple[str, ModulePart], ...]:
    """The names of a model's tensors, as a checkpoint spells them: one for each expert, or one for
    all.  A tied tensor is the embedding of the first stage and the ``lm_head`` of the last; a
    checkpoint has it under either name, or both."""
    fused = any(name.endswith(".experts.gate_up_proj") for name in found)
    weights = dict(FUSED_EXPERTS if fused else weights_of(spec))
    if spec.tie_word_embeddings:
        embed, head = _tied_names(weights)
        parts = weights.pop(embed), weights.pop(head)
        only_head = f"{head}.weight" in found and f"{embed}.weight" not in found
        weights[head if only_head else embed] = parts[0 if spec.has_embedding else 1]
    return tuple(checkpoint_names(weights, spec.num_layers, spec.num_experts, spec.first_layer))


def weights_of(spec: ModelSpec) -> Mapping[str, ModulePart]:
    """Names of a model's tensors in a checkpoint, and their modules."""
    return FORMS[spec.head.form].weights if spec.head else ARCHITECTURES[spec.architecture].weights


def _tied_names(weights: Mapping[str, ModulePart]) -> tuple[str, str]:
    """What a checkpoint calls the embedding and ``lm_head``."""
    modules = {part.module: name for name, part in weights.items()}
    return modules["embed"], modules["lm_head"]


def slots(
    model: DecoderModel,
    tp: TensorParallelRank,
    names: Iterable[tuple[str, ModulePart]] | None = None,
    there: Collection[str] = (),
) -> dict[str, Slot]:
    """Checkpoint tensor name -> slot, for every tensor that the model needs except FP8 scales.

    Args:
        names: from ``names_in``; by default, those of a checkpoint with a tensor for each expert.
        there: names of the checkpoint's tensors, which decide where a format has several.

    Raises:
        UserError: a rank's part of a tensor begins or ends within one of its elements.
    """
    spec = model.spec
    modules = dict(model.named_modules())
    params: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    params |= dict(expert_shares(model, "weight"))
    params |= dict(stored_buffers(model))
    found: dict[str, Slot] = {}
    for name, target in names_in({}, spec) if names is None else names:
        # A name the spec has no module for, such as q_norm, is not needed.
        module = modules.get(target.module)
        if isinstance(module, ExpertLinear) and target.expert is None:
            found[name] = _fused_slot(name, f"{target.module}.weight", module, spec, tp)
            continue
        share, is_elsewhere = target.share, False
        if isinstance(module, ExpertLinear) and target.expert not in module.numbers:
            share, is_elsewhere = f"[{module.first}]", True
        laid = layout_of(spec, module) is not None
        for held in _held(module, params, spec.quant, f"{target.module}.{{}}{share}", laid=laid):
            tensor = f"{name}.{_suffix(held.suffixes, name, there)}"
            try:
                slot = _slot(held, target, tp)
            except ValueError as error:
                raise UserError(f"tensor {tensor} for rank {tp.rank}: {error}") from error
            found[tensor] = elsewhere(slot) if is_elsewhere else slot
    return found


def stored_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Scales and zero points of stored weights, which are read as weights are: of each expert."""
    for name, module in model.named_modules():
        if not isinstance(getattr(module, "quant", None), StoredFormat):
            continue
        for kind, buffer in module.named_buffers(recurse=False):
            if isinstance(module, ExpertLinear):
                shares = zip(module.numbers, buffer.unbind(0), strict=True)
                yield from ((f"{name}.{kind}[{number}]", share) for number, share in shares)
            else:
                yield f"{name}.{kind}", buffer


class _Held(NamedTuple):
    """A tensor of a module that checkpoints have: its name in the model, its names there behind the
    module's, shape and types there but for the part, and the rule of its parts."""

    parameter: str
    suffixes: tuple[str, ...]
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    rule: ShardRule


def _held(
    module: nn.Module | None,
    params: Mapping[str, Tensor],
    quant: QuantScheme | None,
    name: str,
    *,
    laid: bool,
) -> Iterator[_Held]:
    """The tensors of a module, but for those of a weight that is ``laid`` out in another way.
    ``name`` has ``{}`` for their kind."""
    form = getattr(module, "quant", None)
    stored = form.tensors if isinstance(form, StoredFormat) else {}
    for kind, rule in rules_of(module).items():
        param = params.get(parameter := name.format(kind))
        if param is None:
            continue
        shape, online = tuple(param.shape), quant is not None and quant.online
        if kind in stored and laid:
            continue
        if kind in stored and online:
            if kind == "weight" and isinstance(module, Linear | ExpertLinear):
                yield _Held(parameter, (kind,), module.shape[-2:], FLOATS, module.weight_rule)
            continue
        fp8 = param.dtype == E4M3 and not online
        dtypes = (F8_E4M3,) if fp8 else dtype_names(param.dtype)
        suffixes = stored[kind].suffixes if kind in stored else (kind,)
        yield _Held(parameter, suffixes, shape, dtypes, rule)


def _suffix(suffixes: tuple[str, ...], name: str, there: Collection[str]) -> str:
    """What a checkpoint calls a tensor, behind the module's name."""
    return next((suffix for suffix in suffixes if f"{name}.{suffix}" in there), suffixes[0])


def _slot(held: _Held, target: ModulePart, tp: TensorParallelRank) -> Slot:
    shape, rule = list(held.shape), held.rule
    shape[rule.dim] = rule.size_of(target.part)
    place = rule.place(target.part, tp.rank, tp.world)
    return Slot(held.parameter, tuple(shape), held.dtypes, place)


def _fused_slot(
    tensor: str, name: str, layer: ExpertLinear, spec: ModelSpec, tp: TensorParallelRank
) -> Slot:
    """The slot of a tensor that holds all experts."""
    if layer.quant is not None and not (spec.quant and spec.quant.online):
        raise UserError(
            f"tensor {tensor} holds the weights of all experts, as they are in 16 bits, but "
            "config.json says that they are quantized; use a checkpoint with one tensor an expert, "
            "or leave the experts out in quantization_config"
        )
    if tp.world > 1 and not layer.whole:
        raise UserError(
            f"{name}: of a checkpoint with all experts in one tensor a rank reads whole experts; "
            "use enable_expert_parallel, or save the model with one tensor an expert "
            "(save_original_format=True)"
        )
    shape = (spec.num_experts, *layer.shape[1:])
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
            f"the checkpoint lacks {some_weights(missing)}, which config.json calls for; "
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
    tied: set[str] = set()
    if spec.tie_word_embeddings:
        tied = {f"{n}.weight" for n in _tied_names(weights_of(spec))}
    form = STORED_FORMATS.get(spec.quant.kind) if spec.quant else None
    unread = tuple(f".{suffix}" for suffix in form.ignored) if form else ()
    extra = [
        n
        for n in found
        if n not in needed and n not in tied and not IGNORED.search(n) and not n.endswith(unread)
    ]
    if extra:
        raise UserError(
            f"the checkpoint has {some_weights(extra)}, unknown to {spec.architecture} with this "
            "config.json; config.json and weights must be of one model"
        )
    reads = [Read(found[name], slot) for name, slot in needed.items() if slot.placement.length]
    return sorted(reads, key=lambda read: (read.source.file, read.slot.parameter))


def some_weights(names: list[str]) -> str:
    """The first few of the names, and how many there are."""
    more = len(names) - _NAMES_SHOWN
    rest = f" and {more} more" if more > 0 else ""
    weights = "weight" if len(names) == 1 else f"{len(names)} weights:"
    return f"{weights} {', '.join(names[:_NAMES_SHOWN])}{rest}"
