"""FlashInfer's prefill kernel for Hopper, in modules that artifacts hold.

``prefill_sm90.cu`` here makes FlashInfer's headers into one shared object for each head dimension;
``fusewright compile --attention-backend flashinfer`` has it built, loading an artifact makes it
known here, and ``paged_attention``'s implementation ``flashinfer`` calls it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("prefill_sm90.cu")


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a tile, and tiles of K and V in flight."""

    queries: int
    keys: int
    stages: int


# Measured on an H200: bench/NOTES.md.
TILES: Mapping[int, Tile] = {64: Tile(128, 128, 2), 128: Tile(128, 96, 2)}
"""Head dimension -> tile of its module."""

_LIBRARIES: dict[int, ctypes.CDLL] = {}


def load_module(head_dim: int, path: Path) -> None:
    """Make the module of ``head_dim`` known, from now on.

    Raises:
        RuntimeError: the file is no such module.
    """
    try:
        library = ctypes.CDLL(str(path))
        library.fw_prefill.argtypes = [ctypes.POINTER(_Call), ctypes.c_void_p]
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"the FlashInfer module {path} does not load: {error}") from error
    _LIBRARIES[head_dim] = library


def missing_module(head_dim: int) -> str:
    """Empty, or what to do for a module of ``head_dim``."""
    if head_dim in _LIBRARIES:
        return ""
    return (
        f"no FlashInfer module for head_dim {head_dim} is loaded: "
        "`fusewright compile --attention-backend flashinfer` builds it into the artifact"
    )


class _Call(ctypes.Structure):
    """``FwPrefill`` of the source."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("kv_cache", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("query_start_loc", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("table_stride", ctypes.c_int64),
        ("num_tokens", ctypes.c_int32),
        ("num_seqs", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("page", ctypes.c_int32),
        ("fewest", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
        ("scale", ctypes.c_float),
    ]


def prefill(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    out: Tensor,
    scale: float,
    *,
    fewest: int,
    num_sms: int,
) -> None:
    """``paged_attention`` of the sequences with ``fewest`` queries or more, on the current stream.

    Algorithm: FlashAttention-3 (Shah et al., 2024), as FlashInfer has it.

    Args:
        q .. scale: as in ``paged_attention``; bfloat16.
        fewest: at least 1.
        num_sms: multiprocessors of the GPU.

    Raises:
        RuntimeError: the module is not loaded, or CUDA refuses the launch.
    """
    num_tokens, num_heads, head_dim = q.shape
    if reason := missing_module(head_dim):
        raise RuntimeError(f"paged_attention: {reason}")
    # A tile is of one sequence.
    tiles = min(num_tokens // TILES[head_dim].queries + len(seq_lens), num_tokens // fewest)
    if tiles == 0:
        return
    call = _Call(
        q.data_ptr(),
        kv_cache.data_ptr(),
        block_table.data_ptr(),
        seq_lens.data_ptr(),
        query_start_loc.data_ptr(),
        out.data_ptr(),
        q.stride(0),
        block_table.stride(0),
        num_tokens,
        len(seq_lens),
        num_heads,
        kv_cache.shape[3],
        kv_cache.shape[2],
        fewest,
        min(num_sms, tiles * num_heads),
        scale,
    )
    with torch.cuda.device(q.device):
        stream = torch.cuda.current_stream().cuda_stream
        if error := _LIBRARIES[head_dim].fw_prefill(ctypes.byref(call), stream):
            raise RuntimeError(f"paged_attention: FlashInfer's prefill gave CUDA error {error}")
