"""``MemoryReport`` says what device memory is used for.

Graphs are predicted before they are captured; all else is measured.  The sum can be compared with
what the driver counts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from ..config import UserError


class CaptureMemoryError(UserError):
    """The device has no room for a graph."""

    def __init__(self, graph: str, device: torch.device) -> None:
        super().__init__(
            f"{graph}: out of memory while it was captured{say_free(device)}; capture fewer or "
            "smaller sizes (--cudagraph-sizes), or lower --gpu-memory-utilization"
        )


def say_free(device: torch.device) -> str:
    """Say how much of a GPU's memory the driver has left, as the end of a sentence."""
    if device.type == "cpu":
        return ""
    left, total = torch.cuda.mem_get_info(device)
    return f", {left / 1e9:.2f} of {total / 1e9:.1f} GB free"


@dataclass
class MemoryReport:
    """Bytes by purpose.  ``driver`` is all memory in use, as the driver counts it."""

    context: int = 0
    weights: int = 0
    kv_cache: int = 0
    activations: int = 0
    graphs: int = 0
    graphs_predicted: int = 0
    driver: int = 0

    @property
    def accounted(self) -> int:
        return self.context + self.weights + self.kv_cache + self.activations + self.graphs

    def to_json(self) -> dict[str, int]:
        report = {f.name: int(getattr(self, f.name)) for f in fields(self)}
        return {**report, "accounted": self.accounted}
