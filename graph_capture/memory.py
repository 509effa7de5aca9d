"""Where the device memory went: predicted before, measured after, summed against the driver."""

from __future__ import annotations

from dataclasses import dataclass, fields


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
