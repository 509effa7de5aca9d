"""Says where a device's memory is: weights, KV caches, graphs, and what lies outside of PyTorch;
and allocates the caches of a program, of keys and values and of hidden states that are kept."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...compiler.run.program import Program
from ...config import Hardware, ResolvedConfig, UserError
from ...config.process.memory import host_bytes
from ...graph_capture import Graphs, MemoryReport, StepBuffers
from ...model_executor.cache_spec import LayerGroup
from ...model_executor.kv_cache import (
    allocate_hidden_caches,
    allocate_kv_caches,
    kv_cache_bytes_per_block,
)
from ...model_executor.loader import out_of_memory
from ...model_executor.spec import ModelSpec
from ..messages.requests import CoreStats
from .step_arguments import cache_names

_log = logging.getLogger(__name__)


def log_rows_of_drafts(config: ResolvedConfig, spec: ModelSpec, buffers: StepBuffers) -> None:
    """Say how many rows a step may have beyond one a request, and what memory they take."""
    rows, seqs = config.scheduler.max_num_rows, config.scheduler.max_num_seqs
    if rows == seqs:
        return
    tables = len(buffers.schema.tables) * buffers.max_blocks * 4
    logits = spec.vocab_size * spec.dtype.itemsize
    _log.info(
        "drafts: a step has up to %d rows for %d requests; those beyond one a request take %.1f MB "
        "for logits and %.1f MB for block tables",
        rows,
        seqs,
        (rows - seqs) * logits / 1e6,
        (rows - seqs) * tables / 1e6,
    )


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


def bind_kv_caches(
    program: Program,
    spec: ModelSpec,
    config: ResolvedConfig,
    num_blocks: int,
    *,
    apart: bool = False,
) -> list[Tensor]:
    """Allocate ``num_blocks`` KV blocks and bind every layer's to the program, and the caches of
    hidden states that are kept; returns them in the order of ``cache_names``.

    Args:
        apart: a block id is in use in all groups at once, so none shares memory with another.

    Raises:
        UserError: the device has no room for them.
    """
    size = config.cache.block_size
    device = torch.device(config.hardware.device)
    together = [[group] for group in spec.cache_groups] if apart else [spec.cache_groups]
    caches: dict[int, Tensor] = {}
    needed = num_blocks * (
        hidden_block_bytes(spec, size)
        + sum(kv_cache_bytes_per_block(groups, size) for groups in together)
    )
    # Linux would give more memory than there is, and end the process when it is written.
    most = host_bytes() if device.type == "cpu" else None
    has = f"{device.type} has left" if most is None else f"the {most / 1e9:.2f} GB of this machine"
    no_room = UserError(
        f"KV cache: {num_blocks} blocks of {size} tokens take {needed / 1e9:.2f} GB, more than "
        f"{has}; lower num_gpu_blocks_override, kv_cache_memory_bytes or gpu_memory_utilization"
    )
    if most is not None and needed > most:
        raise no_room
    try:
        for groups in together:
            layers = sorted(layer for group in groups for layer in group.layers)
            of_layers = allocate_kv_caches(groups, num_blocks, size, device)
            caches |= dict(zip(layers, of_layers, strict=True))
        kept = allocate_hidden_caches(spec.hidden_cache, len(spec.kept), num_blocks, size, device)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise no_room from error
    memory = [*(caches[layer] for layer in sorted(caches)), *kept]
    program.bind(dict(zip(cache_names(spec), memory, strict=True)))
    return memory


def bytes_per_block(spec: ModelSpec, block_size: int) -> int:
    """Bytes that one block id takes, in all layers of the group that holds it and for the hidden
    states that are kept."""
    return kv_cache_bytes_per_block(spec.cache_groups, block_size) + hidden_block_bytes(
        spec, block_size
    )


def hidden_block_bytes(spec: ModelSpec, block_size: int) -> int:
    """Bytes that one block id takes for the hidden states that are kept."""
    return len(spec.kept) * spec.hidden_cache.block_bytes(block_size) if spec.kept else 0
