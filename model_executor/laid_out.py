"""Fills layers from weights of 4 and 8 bits that a checkpoint has in a layout of its own.

What a layer holds is the same whatever project wrote the checkpoint: ``quant/convert`` reads one
weight, or a rank's part of it, and it is copied to its place among those that are merged with it.
A layer of experts has a weight in the checkpoint for each expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..config.errors import UserError
from ..config.weight_format import StoredFormat
from .checkpoint import OpenFiles, TensorInfo
from .experts import ExpertLinear
from .layers import Linear
from .models.decoder import DecoderModel
from .parallel import TensorParallelRank
from .quant.convert import LaidOut, Part, laid_out, names_beside, order_of, read_part
from .quant.layouts import Layout
from .sharding import ModulePart
from .spec import ModelSpec

GATE_UP, DOWN = "mlp.gate_up", "mlp.down"
_USE_UNSORTED = "use a checkpoint with desc_act=false (actorder: weight, static or null)"


@dataclass(frozen=True)
class LaidOutRead:
    """One weight to read.

    Attributes:
        source: the weight in the checkpoint.
        name, layer: the layer that it is, or is a part of.
        part: what of it this rank reads.
        dest: the row at which it begins, of the layer or of the expert's share of it.
        expert: whose weight it is, in a layer of experts.
        reader: the weight that reads the rows of this one, if that puts them in an order.
    """

    source: LaidOut
    name: str
    layer: Linear | ExpertLinear
    part: Part
    dest: int
    expert: int | None = None
    reader: LaidOut | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        rows, columns = self.part.rows, self.part.columns
        numbers = (rows.stop - rows.start) * (columns.stop - columns.start)
        share: int = self.source.nbytes * numbers // math.prod(self.source.shape)
        return share


def layout_of(spec: ModelSpec, module: Any) -> Layout | None:
    """The layout in which the checkpoint has a module's weight; None: in the tensors of the
    module."""
    form = getattr(module, "quant", None)
    if not isinstance(form, StoredFormat) or spec.quant is None or spec.quant.online:
        return None
    return spec.quant.layout_of(form.name)


def laid_out_reads(
    model: DecoderModel,
    tp: TensorParallelRank,
    names: Iterable[tuple[str, ModulePart]],
    found: Mapping[str, TensorInfo],
) -> tuple[list[LaidOutRead], set[str]]:
    """The reads of this rank, and the names of all tensors that belong to them or to other ranks'
    experts.

    Raises:
        UserError: a tensor is missing or has another type or shape; the order of a layer's columns
            cannot become that of the rows before it.
    """
    if model.spec.quant is None or model.spec.quant.online:
        return [], set()
    modules, reads, used = dict(model.named_modules()), list[LaidOutRead](), set[str]()
    for name, target in names:
        module = modules.get(target.module)
        layout = layout_of(model.spec, module)
        if layout is None or not isinstance(module, Linear | ExpertLinear):
            continue
        if isinstance(module, ExpertLinear) and target.expert is None:
            continue  # refused with the tensor's name where its slot is made
        rule = module.weight_rule
        sizes = [*module.shape[-2:]]
        sizes[rule.dim] = rule.size_of(target.part)
        source = laid_out(name, layout, found, (sizes[0], sizes[1]))
        used |= {info.name for info in source.tensors.values()}
        used |= {beside for beside in names_beside(name, layout) if beside in found}
        if isinstance(module, ExpertLinear) and target.expert not in module.numbers:
            continue
        place = rule.place(target.part, tp.rank, tp.world)
        ranges = [slice(0, sizes[0]), slice(0, sizes[1])]
        ranges[place.dim] = slice(place.source_start, place.source_start + place.length)
        dest, part = place.dest_start if place.dim == 0 else 0, Part(ranges[0], ranges[1])
        reads.append(LaidOutRead(source, target.module, module, part, dest, target.expert))
    readers = {read.name: read.source for read in reads if read.source.layout.order is not None}
    return list(_with_readers(reads, readers, modules)), used


def _with_readers(
    reads: Iterable[LaidOutRead], readers: Mapping[str, LaidOut], modules: Mapping[str, Any]
) -> Iterator[LaidOutRead]:
    """The reads, of which gate and up are put in the order of down."""
    left = {name for name in readers if name.endswith(f".{DOWN}")}
    for read in reads:
        down = read.name.replace(GATE_UP, DOWN)
        if not read.name.endswith(f".{GATE_UP}") or down not in readers:
            yield read
            continue
        left.discard(down)
        if modules[read.name].bias is not None:
            raise _unabsorbed(readers[down], f"{read.name} has a bias")
        yield replace(read, reader=readers[down])
    for down in sorted(left):
        before = down.replace(DOWN, GATE_UP)
        if modules[before].quant is None or before not in {read.name for read in reads}:
            raise _unabsorbed(readers[down], f"{before} is not quantized")


def _unabsorbed(down: LaidOut, reason: str) -> UserError:
    info = down.tensors["order"]
    return UserError(
        f"tensor {info.name} in {info.file} sorts columns by activation (desc_act), which the rows "
        f"before them cannot follow: {reason}; {_USE_UNSORTED}"
    )


@torch.no_grad()
def fill_laid_out(reads: Iterable[LaidOutRead], advance: Callable[[int], Any]) -> None:
    """Fill layers that have memory.

    Raises:
        UserError: as of ``read_part``; the parts of a layer have their columns in several orders,
            or an expert has them in one.
    """
    orders: dict[str, tuple[LaidOut, Tensor | None]] = {}

    def place(read: LaidOutRead) -> tuple[str, str]:
        return str(read.source.tensors["weight"].file), read.source.module

    for _, of_file in groupby(sorted(reads, key=place), key=lambda read: place(read)[0]):
        with OpenFiles() as files:
            for read in of_file:
                _fill(read, files, orders)
                advance(read.nbytes)


def _fill(
    read: LaidOutRead, files: OpenFiles, orders: dict[str, tuple[LaidOut, Tensor | None]]
) -> None:
    layer, part, source = read.layer, read.part, read.source
    if isinstance(layer, ExpertLinear):
        check_unordered(source, files)
    elif layer.x_order is not None:
        first = orders.setdefault(read.name, (source, order_of(source, files)))
        set_order(layer.x_order, first, source, files)
    if read.reader is not None and (order := order_of(read.reader, files)) is not None:
        part = Part(part.rows, part.columns, order)
    share, _ = layer.share(read.expert)
    for kind, tensor in read_part(source, part, files, layer.weight.device).items():
        getattr(share, kind)[read.dest : read.dest + len(tensor)] = tensor


def check_unordered(source: LaidOut, files: OpenFiles) -> None:
    """Refuse an expert's weight whose columns are sorted: each expert has an order of its own, and
    x is one for all.

    Raises:
        UserError: they are.
    """
    if order_of(source, files) is not None:
        info = source.tensors["order"]
        raise UserError(
            f"tensor {info.name} in {info.file} sorts columns of an expert by activation "
            f"(desc_act), but the experts of a token read one x, in one order; {_USE_UNSORTED}"
        )


def set_order(
    held: Tensor, first: tuple[LaidOut, Tensor | None], source: LaidOut, files: OpenFiles
) -> None:
    """Set the order in which a layer takes the columns of its input; that of all of its parts."""
    of_first, order = first
    own = order if of_first is source else order_of(source, files)
    if (own is None) != (order is None) or not (
        own is None or order is None or torch.equal(own, order)
    ):
        one, other = (each.tensors["order"] for each in (of_first, source))
        raise UserError(
            f"tensors {one.name} and {other.name} in {other.file} sort columns in two orders, but "
            f"the weights are one matrix here; {_USE_UNSORTED}"
        )
    if order is not None:
        held.copy_(order)
