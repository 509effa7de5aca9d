"""Lowered pieces of a small real model, and inputs that they accept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import fusewright.model_executor.abacus as abacus
from fusewright.compiler.capture.trace import trace
from fusewright.compiler.lowering.lower import lower
from fusewright.compiler.lowering.partition import partition
from fusewright.config import LEVELS
from fusewright.engine.worker.source import module_arguments
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.kv_cache import allocate_kv_caches
from fusewright.model_executor.loader import load_model
from fusewright.passes import Subgraph, build_passes, digest, fake_value, run_passes

BLOCK_SIZE = 16
HAND_KERNELS = {
    **dict.fromkeys(("rms_norm", "add_rms_norm", "silu_mul"), "triton"),
    **dict.fromkeys(("rotary_embedding", "kv_store", "rope_kv_store", "embedding"), "triton"),
    "chain": "library",
}
"""Op -> the implementation that is a kernel of ours, or runs around one."""


@dataclass(frozen=True)
class Pieces:
    """Distinct pieces by digest, and what each size symbol counts."""

    by_digest: Mapping[str, Subgraph]
    dims: Mapping[str, str]


def lowered_pieces(
    level: int, device: torch.device, kernels: Mapping[str, str] | None = None, **changes: Any
) -> Pieces:
    """The pieces between attention ops of a model of two layers: the first, middle and last.

    Args:
        kernels: op -> implementation to force.
        changes: fields of the model's spec.
    """
    (folder,) = abacus.__path__
    spec = replace(read_spec(folder), num_layers=2, sliding_windows=(0, 0), **changes)
    model = load_model(spec, folder, device, load_format="dummy")
    num_tokens, num_seqs = 37, 3
    sizes = {
        "input_ids": ("num_tokens", (num_tokens,)),
        "positions": ("num_tokens", (num_tokens,)),
        "slot_mapping": ("num_tokens", (num_tokens,)),
        "block_table": ("num_seqs", (num_seqs, 4)),
        "seq_lens": ("num_seqs", (num_seqs,)),
        "query_start_loc": ("num_seqs_plus_1", (num_seqs + 1,)),
    }
    named: dict[str, Tensor] = {
        name: torch.zeros(shape, dtype=torch.int32, device=device)
        for name, (_, shape) in sizes.items()
    }
    caches = allocate_kv_caches(spec.cache_groups, 5, BLOCK_SIZE, device)
    named |= {f"kv_cache/{i}": cache for i, cache in enumerate(caches)}
    dynamic = {name: {0: dim} for name, (dim, _) in sizes.items()}
    dynamic |= {f"kv_cache/{i}": {0: "num_blocks"} for i in range(len(caches))}
    traced = trace(model, module_arguments(named, spec), named, dynamic)
    row = LEVELS[level]
    run_passes(traced.gm, build_passes(row.passes), verify=False)
    regions = partition(traced.gm)
    lower(traced.gm, hand_kernels=row.hand_kernels, kernels=kernels or {}, sm=0)
    found: dict[str, Subgraph] = {}
    for region in regions:
        if not region.is_single_op:
            piece = region.subgraph()
            found.setdefault(digest(piece.module), piece)
    return Pieces(found, traced.dims)


def piece_inputs(piece: Subgraph, dims: Mapping[str, str], num_tokens: int, seed: int) -> list[Any]:
    """Values for a piece's inputs: floats normal, integers 0, 1, 2 and so on, which are distinct
    slots of the cache, made large enough for them."""
    sizes = {"num_tokens": num_tokens, "num_blocks": num_tokens // BLOCK_SIZE + 2}

    def size(value: Any) -> int:
        return value if isinstance(value, int) else sizes[dims[str(value)]]

    values: list[Any] = []
    generator = torch.Generator().manual_seed(seed)
    for node in piece.module.graph.find_nodes(op="placeholder"):
        fake = fake_value(node)
        if not isinstance(fake, Tensor):
            values.append(size(fake))
            continue
        shape = [size(d) for d in fake.shape]
        if fake.dtype.is_floating_point:
            made = torch.randn(shape, generator=generator)
        else:
            made = torch.arange(num_tokens)
        values.append(made.to(fake.dtype).to(fake.device))
    return values


def copied(values: list[Any]) -> list[Any]:
    return [v.clone() if isinstance(v, Tensor) else v for v in values]
