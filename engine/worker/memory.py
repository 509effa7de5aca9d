"""Says where a device's memory is: weights, KV caches, graphs, and what lies outside of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...config import Hardware
from ...graph_capture import Graphs, MemoryReport
from ...model_executor.cache_spec import LayerGroup
from ..messages.requests import CoreStats


def driver_bytes(hardware: Hardware) -> int:
    if hardware.device == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def outside_bytes(hardware: Hardware) -> int:
    """``driver_bytes`` less what PyTorch's allocator holds: the CUDA context, loaded kernels and
    library workspaces; 0 on a CPU."""
    if hardware.device == "cpu":
        return 0
    return driver_bytes(hardware) - torch.cuda.memory_reserved()


def report_kv_groups(
    groups: Sequence[LayerGroup], stats: CoreStats, bytes_per_block: int
) -> list[dict[str, Any]]:
    """Plain data of each group of layers: what it keeps, the blocks that requests hold of it now,
    their bytes, and the most blocks that they ever held."""
    return [
        {
            "kind": group.spec.kind.name,
            "window": group.spec.window,
            "layers": list(group.layers),
            "blocks": held,
            "bytes": held * bytes_per_block,
            "peak_blocks": peak,
        }
        for group, held, peak in zip(groups, stats.num_held, stats.peak_held, strict=True)
    ]


def account(
    hardware: Hardware,
    graphs: Sequence[Graphs],
    *,
    context: int,
    weights: int,
    kv_cache: int,
    predicted: int,
) -> MemoryReport:
    """Say where the device memory is now; ``context`` is ``outside_bytes`` before the graphs."""
    report = MemoryReport(
        weights=weights,
        kv_cache=kv_cache,
        graphs=sum(each.bytes for each in graphs),
        graphs_predicted=predicted,
    )
    if hardware.device == "cuda":
        reserved = torch.cuda.memory_reserved()
        pool = sum(each.pool_bytes for each in graphs)
        report.context, report.driver = context, driver_bytes(hardware)
        report.activations = reserved - weights - kv_cache - pool
    return report
