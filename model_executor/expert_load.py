"""How evenly a router spreads tokens over experts, from the counts that the layers keep.

The counts are buffers of the model, which its own program adds to on the device.  They are read
here, between steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .loader import Model
from .models.moe import MoE

Load = dict[int, list[int]]
"""For each layer with experts, how many tokens chose each expert since the start."""


def read_load(model: Model) -> Load:
    """Copy the counts to the host, which waits for the device.  Empty if none are kept."""
    layers = ((number, layer.mlp) for number, layer in enumerate(getattr(model, "layers", ())))
    return {
        number: mlp.load.flatten().tolist()
        for number, mlp in layers
        if isinstance(mlp, MoE) and mlp.load is not None
    }


def load_since(now: Load, before: Load) -> Load:
    """The tokens that were counted between two readings."""
    return {
        number: [a - b for a, b in zip(counts, before[number], strict=True)]
        for number, counts in now.items()
    }


def describe_load(load: Mapping[int, Sequence[int]]) -> list[dict[str, Any]]:
    """Describe how evenly each layer's experts are used, as plain data.

    Returns:
        For each layer its number, ``tokens`` of each expert, ``most_over_mean``, the busiest
        expert's tokens over the mean (1 is perfect balance; the number of experts if one has all
        of a token's choices), and ``idle``, how many experts had no token.
    """
    return [
        {
            "layer": number,
            "tokens": list(counts),
            "most_over_mean": round(max(counts) * len(counts) / max(1, sum(counts)), 3),
            "idle": counts.count(0),
        }
        for number, counts in load.items()
    ]
