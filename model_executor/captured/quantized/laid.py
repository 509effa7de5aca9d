"""Fills layers of a captured model from weights that a checkpoint has in a layout of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ....config.errors import UserError
from ...experts import ExpertLinear
from ...laid_out import set_order
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
        UserError: as of ``read_part``; a part of a layer has its columns in another order, or a
            weight moves in a way that its format does not allow.
    """
    orders: dict[str, tuple[LaidOut, Tensor | None]] = {}
    for name, moves in groupby(weights, key=lambda each: each[0].source.name):
        source = laid[name]
        rows, columns = source.shape
        device = next(iter(tensors.values())).device
        held = read_part(source, Part(slice(0, rows), slice(0, columns)), device)
        for move, layer_name, layer in moves:
            if isinstance(layer, Linear) and layer.x_order is not None:
                first = orders.setdefault(layer_name, (source, order_of(source)))
                set_order(layer.x_order, first, source)
            for kind, tensor in source.layout.form.tensors.items():
                try:
                    part = by_units(move, tensor.steps, (rows, columns))
                except ValueError as error:
                    raise UserError(
                        f"tensor {source.tensors['weight'].name} cannot go to {layer_name}, which "
                        f"is made of parts of several weights: {error}; use weights with a scale "
                        "for each channel"
                    ) from error
                dest = part.part_of(tensors[f"{layer_name}.{kind}"])
                dest.copy_(part.part_read(held[kind][part.read_index()]))
        advance(source.nbytes)
