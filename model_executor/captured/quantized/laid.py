"""Fills layers of a captured model from weights that a checkpoint has in a layout of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ....config.errors import UserError
from ...checkpoint import OpenFiles
from ...experts import ExpertLinear
from ...laid_out import check_unordered, set_order
from ...layers import Linear
from ...quant.convert import LaidOut, Part, order_of, read_part
from ..moves import Move
from .scales import by_units


@torch.no_grad()
def fill_from_layouts(
    weights: Iterable[tuple[Move, str, Linear | ExpertLinear]],
    laid: Mapping[str, LaidOut],
    tensors: Mapping[str, Tensor],
    advance: Callable[[int], Any],
) -> None:
    """Read each weight once, bring it to its format, and move its tensors as the weight moves.

    Args:
        weights: moves of the numbers of weights, with the name of the layer that they go to.
        laid: the weights by their names.
        tensors: of the library's model, by name.

    Raises:
        UserError: as of ``read_part``; a part of a layer has its columns in another order, or an
            expert has them in one, or a weight moves in a way that its format does not allow.
    """
    orders: dict[str, tuple[LaidOut, Tensor | None]] = {}
    device = next(iter(tensors.values())).device
    ordered = sorted(weights, key=lambda each: (each[0].source.file, each[0].source.name))
    for _, of_file in groupby(ordered, key=lambda each: each[0].source.file):
        with OpenFiles() as files:
            for name, moves in groupby(of_file, key=lambda each: each[0].source.name):
                source = laid[name]
                rows, columns = source.shape
                held = read_part(source, Part(slice(0, rows), slice(0, columns)), files, device)
                for move, layer_name, layer in moves:
                    if isinstance(layer, ExpertLinear):
                        check_unordered(source, files)
                    elif layer.x_order is not None:
                        first = orders.setdefault(layer_name, (source, order_of(source, files)))
                        set_order(layer.x_order, first, source, files)
                    _move(move, source, held, layer_name, tensors)
                advance(source.nbytes)


def _move(
    move: Move,
    source: LaidOut,
    held: Mapping[str, Tensor],
    layer_name: str,
    tensors: Mapping[str, Tensor],
) -> None:
    """Move the tensors of a weight as its numbers move."""
    for kind, tensor in source.layout.form.tensors.items():
        try:
            part = by_units(move, tensor.steps, source.shape)
        except ValueError as error:
            raise UserError(
                f"tensor {source.tensors['weight'].name} cannot go to {layer_name}, which is made "
                f"of parts of several weights: {error}; use weights with a scale for each channel"
            ) from error
        dest = part.part_of(tensors[f"{layer_name}.{kind}"])
        dest.copy_(part.part_read(held[kind][part.read_index()]))
