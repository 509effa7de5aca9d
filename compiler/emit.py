"""Compile the distinct pieces with Inductor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..passes import Subgraph, fake_value


def emit(
    pieces: Mapping[str, Subgraph],
    *,
    tune: bool,
    on_piece: Callable[[str], None] = lambda progress: None,
) -> dict[str, Callable[..., Any]]:
    """Compile each lowered piece once; a piece maps its inputs to a sequence of outputs.

    Args:
        tune: search each Triton kernel's configuration by coordinate descent (``-O3``).
        on_piece: told "1 of 3" and so on before each piece.
    """
    from torch._inductor import standalone_compile

    options = {"coordinate_descent_tuning": tune}
    compiled: dict[str, Callable[..., Any]] = {}
    for number, (name, piece) in enumerate(pieces.items(), start=1):
        on_piece(f"{number} of {len(pieces)}")
        placeholders = piece.module.graph.find_nodes(op="placeholder")
        example_inputs = [fake_value(node) for node in placeholders]
        with torch.inference_mode(), torch._inductor.config.patch(options):
            compiled[name] = standalone_compile(
                piece.module, example_inputs, dynamic_shapes="from_graph"
            )
    return compiled
