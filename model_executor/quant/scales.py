"""The scales that a checkpoint holds beside its FP8 weights and for an FP8 KV cache.

They are small: all are read before the first weight, since parts of a fused weight with one scale
must be brought to the largest of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...config.errors import UserError
from ..checkpoint import FLOATS, TensorInfo, open_checkpoint_file
from ..sharding import ModulePart, Part, ShardRule
from .layer import LayerShare, is_quantizable
from .scheme import BLOCK, QuantFormat

Index: TypeAlias = tuple[slice, ...]
_ALL: Index = (slice(None), slice(None))
WEIGHT_SCALES = ("weight_scale", "weight_scale_inv")
INPUT_SCALES = ("input_scale", "activation_scale")


@dataclass(frozen=True)
class ScaleSlot:
    """Where the scales of one checkpoint weight go.

    names: the names that checkpoints use for them.
    weight: the name of the weight that they scale.
    buffer: the module's buffer that they fill.
    shape: their shape; unless ``per_block``, a single scale may stand for all.
    source, dest: which part of the tensor goes where; with ``largest`` all parts go to the same
        place, and the largest value stays.
    optional: the buffer has other values if the checkpoint has no tensor of this kind.
    elsewhere: another rank reads them.
    """

    names: tuple[str, ...]
    weight: str
    buffer: str
    shape: tuple[int, int]
    source: Index = _ALL
    dest: Index = _ALL
    per_block: bool = False
    largest: bool = False
    optional: bool = False
    elsewhere: bool = False


@dataclass(frozen=True)
class ScaleRead:
    """One tensor of scales to read."""

    source: TensorInfo
    slot: ScaleSlot


def scale_slots(
    modules: Mapping[str, object],
    names: Iterable[tuple[str, ModulePart]],
    rank: int = 0,
    world: int = 1,
    *,
    online: bool = False,
) -> Iterator[ScaleSlot]:
    """A slot for every scale that ``rank`` of ``world`` needs from a checkpoint.

    Args:
        modules: of a model, by name.
        names: checkpoint names and their modules.
        online: the weights of the checkpoint have none.

    Raises:
        UserError: a block of a weight's scales would span two of its parts, or two ranks.
    """
    for name, target in names:
        module: Any = modules.get(target.module)
        if not is_quantizable(module):
            continue
        layer, elsewhere = module.share(target.expert)
        if layer is None:
            continue
        if target.part in ("k", "v"):
            attention = target.module.rpartition(".")[0]
            kv_scale = getattr(modules.get(attention), "kv_scale", None)
            if kv_scale is not None:
                yield _kv_slot(name, target, layer, f"{attention}.kv_scale", rank, world)
        quant = layer.quant
        if quant is None or online:
            continue
        if quant.static:  # of an input it is the scale of all experts, on every rank
            yield _whole_slot(name, target, INPUT_SCALES, "input_scale")
        if not isinstance(quant, QuantFormat):
            continue  # the scales of stored weights are read like weights
        if quant.rows:
            slot = _weight_slot(name, target, layer, quant, rank, world)
        else:
            slot = _whole_slot(name, target, WEIGHT_SCALES, f"weight_scale{target.share}")
        yield replace(slot, elsewhere=elsewhere)


def _whole_slot(name: str, target: ModulePart, kinds: tuple[str, ...], buffer: str) -> ScaleSlot:
    names = tuple(f"{name}.{kind}" for kind in kinds)
    where = f"{target.module}.{buffer}"
    return ScaleSlot(names, f"{name}.weight", where, (1, 1), largest=True)


def _weight_slot(
    name: str, target: ModulePart, linear: LayerShare, quant: QuantFormat, rank: int, world: int
) -> ScaleSlot:
    if quant.blocks:
        _check_blocks(name, target, linear.rules["weight"], rank, world)
    rule = linear.rules["weight_scale"]
    shape = list(linear.weight_scale.shape)
    shape[rule.dim] = next(part.size for part in rule.parts if part.name == target.part)
    place = rule.place(target.part, rank, world)
    return ScaleSlot(
        tuple(f"{name}.{kind}" for kind in WEIGHT_SCALES),
        f"{name}.weight",
        f"{target.module}.weight_scale{target.share}",
        (shape[0], shape[1]),
        _index(place.dim, place.source_start, place.length),
        _index(place.dim, place.dest_start, place.length),
        per_block=quant.blocks,
    )


def _check_blocks(name: str, target: ModulePart, rule: ShardRule, rank: int, world: int) -> None:
    place = rule.place(target.part, rank, world)
    for start in (place.source_start, place.dest_start):
        if start % BLOCK:
            raise UserError(
                f"{name}.weight has one scale for {BLOCK} x {BLOCK} numbers, but a part of it "
                f"begins at {start}, expected a multiple of {BLOCK}; use weights with a scale for "
                "each channel, or quantize unquantized ones with --quantization"
            )


def _kv_slot(
    name: str, target: ModulePart, linear: LayerShare, buffer: str, rank: int, world: int
) -> ScaleSlot:
    (part,) = (p for p in linear.rules["weight"].parts if p.name == target.part)
    heads = ShardRule(0, (Part("", part.units, part.units, part.replicate),))
    place = heads.place("", rank, world)
    kind, row = f"{target.part}_scale", "kv".index(target.part)
    return ScaleSlot(
        (f"{name.rpartition('.')[0]}.{kind}", f"{name}.{kind}"),
        f"the {target.part} cache of {name}",
        buffer,
        (1, part.units),
        _index(1, place.source_start, place.length),
        (slice(row, row + 1), slice(None)),
        optional=True,
    )


def _index(dim: int, start: int, length: int) -> Index:
    place = slice(start, start + length)
    return (place, slice(None)) if dim == 0 else (slice(None), place)


def find_scales(slots: Iterable[ScaleSlot], found: Mapping[str, TensorInfo]) -> list[ScaleRead]:
    """Pair every slot with its tensor, in file order.

    Raises:
        UserError: a scale is missing, or has another shape or type.
    """
    reads: list[ScaleRead] = []
    absent: list[ScaleSlot] = []
    for slot in slots:
        info = next((found[name] for name in slot.names if name in found), None)
        if info is None:
            absent.append(slot)
            continue
        check_scale(info, slot.shape, per_block=slot.per_block)
        reads.append(ScaleRead(info, slot))
    some_kv = any(read.slot.optional for read in reads)
    for slot in absent:
        if some_kv or not slot.optional:
            where = f" in {found[slot.weight].file}" if slot.weight in found else ""
            raise UserError(
                f"the checkpoint has no scale for {slot.weight}{where}, expected "
                f"{' or '.join(slot.names)}; config.json and weights must be of one model"
            )
    return sorted(reads, key=lambda read: read.source.file)


def check_scale(info: TensorInfo, shape: tuple[int, int], *, per_block: bool) -> None:
    """Check the scales of a weight, ``shape`` of them; unless ``per_block``, one may stand for all.

    Raises:
        UserError: they have another shape or type.
    """
    rows, columns = shape
    allowed: list[Sequence[int]] = [shape]
    if not per_block:
        allowed += [(max(rows, columns),), (), (1,), (1, 1)]
    if info.shape not in allowed:
        expected = dict.fromkeys(str(list(shape)) for shape in allowed)
        raise UserError(
            f"tensor {info.name} in {info.file} has shape {list(info.shape)}, expected "
            f"{' or '.join(expected)}; config.json and weights must be of one model"
        )
    if info.dtype not in FLOATS:
        raise UserError(
            f"tensor {info.name} in {info.file} is of type {info.dtype}, expected one of "
            f"{', '.join(FLOATS)}"
        )


def read_scales(
    reads: Iterable[ScaleRead], buffers: Mapping[str, Tensor]
) -> dict[str, tuple[float, float]]:
    """Fill the buffers.

    Returns:
        (its scale, the scale of the fused weight) of every weight for which the two differ.

    Raises:
        UserError: a scale is not a positive number.
    """
    own: dict[str, tuple[float, Tensor]] = {}
    here = (read for read in reads if not read.slot.elsewhere)
    for file, of_file in groupby(here, key=lambda read: read.source.file):
        with open_checkpoint_file(file) as opened, torch.no_grad():
            for read in of_file:
                slot = read.slot
                scale = positive(opened.get_tensor(read.source.name).float(), read.source)
                scale = scale.view(slot.shape if scale.numel() > 1 else (1, 1)).expand(slot.shape)
                dest = buffers[slot.buffer][slot.dest]
                part = scale[slot.source].to(dest.device)
                dest.copy_(torch.maximum(dest, part) if slot.largest else part)
                if slot.largest and "weight_scale" in slot.buffer:
                    own[slot.weight] = (scale.item(), dest)
    return {
        name: (scale, whole)
        for name, (scale, dest) in own.items()
        if (whole := dest.item()) != scale
    }


def positive(scale: Tensor, info: TensorInfo) -> Tensor:
    """The scales of a tensor.

    Raises:
        UserError: one is not a positive number.
    """
    bad = ~((scale > 0) & scale.isfinite())
    if bad.any():
        raise UserError(
            f"tensor {info.name} in {info.file} holds {scale[bad][0].item()}, expected positive "
            "numbers; calibrate and quantize the model again"
        )
    return scale
