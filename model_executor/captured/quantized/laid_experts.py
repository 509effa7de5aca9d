"""Weights of all experts that a checkpoint has as blocks and scales, as gpt-oss has MXFP4.

``…gate_up_proj_blocks`` is [experts, rows, blocks, bytes of a block] and ``…gate_up_proj_scales``
[experts, rows, blocks]: those of the transpose of the library's parameter.  Bytes are copied to
their places as they are, a part of a tensor at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....config.errors import UserError
from ....config.weight_format import StoredFormat
from ...checkpoint import TensorInfo
from ...experts import ExpertLinear
from ...quant.layouts import Layout
from ..moves import Move, copy_moves, in_file_order, narrowed, shifted, viewed, whole

_KINDS = {"weight": "blocks", "weight_scale": "scales"}
_NAN = 255
"""The exponent that is none (OCP Microscaling Formats, 1.0, section 5.4.1)."""


@dataclass(frozen=True)
class ExpertsLaidOut:
    """One weight of all experts as a checkpoint has it.

    Attributes:
        tensors: by the names that they have in a layer.
        shape: (experts, rows, columns) of its numbers.
        logical: the tensor that the library's parameter would be.
    """

    form: StoredFormat
    tensors: Mapping[str, TensorInfo]
    shape: tuple[int, int, int]
    logical: TensorInfo

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return sum(info.nbytes for info in self.tensors.values())


def experts_laid_out(
    found: Mapping[str, TensorInfo], layout_of: Callable[[str], Layout | None]
) -> dict[str, ExpertsLaidOut]:
    """The weights of experts among a checkpoint's tensors, by the names of parameters.

    Raises:
        UserError: a weight lacks its blocks or scales, or one has another type or shape.
    """
    weights: dict[str, ExpertsLaidOut] = {}
    for name in found:
        module, _, suffix = name.rpartition("_")
        is_new = suffix in _KINDS.values() and module not in weights
        # A linear layer, whose tensors begin with "weight", is gathered by its module.
        layout = layout_of(module) if is_new and not module.endswith(".weight") else None
        if layout is not None and layout.weight.packing and not layout.zero:
            weights[module] = _weight(module, layout.form, found)
    return weights


def _weight(module: str, form: StoredFormat, found: Mapping[str, TensorInfo]) -> ExpertsLaidOut:
    tensors = {}
    for kind, suffix in _KINDS.items():
        name = f"{module}_{suffix}"
        if (info := found.get(name)) is None:
            raise UserError(
                f"the checkpoint lacks {name}, which a weight of experts in {form.name} has; "
                "download the model again"
            )
        types = ("U8", "F8_E8M0") if kind == "weight_scale" else ("U8",)
        if info.dtype not in types:
            raise UserError(
                f"tensor {name} in {info.file} is of type {info.dtype}, expected {types[0]} of "
                f"experts in {form.name}; download the model again"
            )
        tensors[kind] = info
    blocks, scales = tensors["weight"], tensors["weight_scale"]
    group = form.scale.unit[1]
    expected = (*blocks.shape[:3], group // form.weight.packed)
    if len(blocks.shape) != 4 or blocks.shape != expected or scales.shape != blocks.shape[:3]:
        raise UserError(
            f"tensors {blocks.name} and {scales.name} in {blocks.file} have shapes "
            f"{[*blocks.shape]} and {[*scales.shape]}, expected [experts, rows, blocks, "
            f"{expected[-1]}] and [experts, rows, blocks] of {form.name}; download the model again"
        )
    experts, rows, count, _ = blocks.shape
    shape = (experts, rows, count * group)
    logical = replace(blocks, name=module, shape=(experts, shape[2], rows), dtype=form.name)
    return ExpertsLaidOut(form, tensors, shape, logical)


def fill_experts(
    weights: Iterable[tuple[Move, str, ExpertLinear]],
    laid: Mapping[str, ExpertsLaidOut],
    tensors: Mapping[str, Tensor],
    advance: Callable[[int], Any],
    place: tuple[int, int] = (0, 1),
) -> None:
    """Copy blocks and scales into layers of experts.

    Args:
        weights: moves of the numbers of weights, with the name of the layer that they go to.
        tensors: of the library's model, by name.
        place: rank, and number of ranks: of each expert this rank's rows or columns are copied.

    Raises:
        UserError: a weight is not copied whole, a part of a rank shares a scale with another one's,
            or a scale is NaN.
    """
    bytes_of = {
        name: tensor.view(torch.uint8) if tensor.dtype == torch.float8_e8m0fnu else tensor
        for name, tensor in tensors.items()
    }
    moves = [
        part
        for move, name, layer in weights
        for part in _moves(move, laid[move.source.name], name, layer, place)
    ]

    def filled(move: Move, part: Tensor) -> None:
        if move.source.name.endswith("_scales") and bool((part == _NAN).any()):
            raise UserError(
                f"tensor {move.source.name} in {move.source.file} holds NaN; download it again"
            )

    copy_moves(in_file_order(moves), bytes_of, advance, filled)


def _moves(
    move: Move, source: ExpertsLaidOut, name: str, layer: ExpertLinear, place: tuple[int, int]
) -> Iterator[Move]:
    experts, rows, columns = source.shape
    if move.numel != experts * rows * columns or any(move.source_start):
        raise UserError(
            f"{source.logical.name} goes to {name} in parts, which {source.form.name} cannot; save "
            "the model in 16 bits"
        )
    for kind, info in source.tensors.items():
        shape = (experts, *source.form.tensors[kind].shape(rows, columns))
        (part,) = whole(info)
        part = viewed(part, info.shape, shape)._replace(parameter=f"{name}.{kind}")
        rule = layer.rules[kind]
        if not rule.split:
            yield part
            continue
        start = 0
        for own in rule.parts:
            at = rule.place(own.name, *place)
            for piece in narrowed(part, rule.dim + 1, start + at.source_start, at.length):
                yield shifted(piece, rule.dim + 1, at.dest_start)
            start += own.size // rule.step
