"""Where the device memory went: predicted before, measured after, summed against the driver."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from ..config import UserError


class CaptureMemoryError(UserError):
    """The device has no room for a graph."""

    def __init__(self, graph: str, device: torch.device) -> None:
        free = ""
        if device.type == "cuda":
            left, total = torch.cuda.mem_get_info(device)
            free = f", {left / 1e9:.2f} of {total / 1e9:.1f} GB free"
        super().__init__(
            f"{graph}: out of memory while it was captured{free}; capture fewer or smaller sizes "
            "(--cudagraph-sizes), or lower --gpu-memory-utilization"
        )


@dataclass
class MemoryReport:
    """Bytes by purpose.  ``driver`` is what the driver says is in use in all."""

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
