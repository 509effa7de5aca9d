"""Computes what launches over [num_tokens, num_heads, head_dim] share: heads a program, strides."""

from __future__ import annotations

from torch import Tensor

from ..core.tiles import next_power_of_2

# Fewer heads a program while the grid would leave SMs idle.
_FEW_TOKENS = 64
_MANY_HEADS = 8


def heads_per_program(num_tokens: int, num_heads: int, few: int) -> int:
    """Heads for one program, a power of two: at most ``few`` when there are few tokens."""
    most = few if num_tokens <= _FEW_TOKENS else _MANY_HEADS
    return min(most, next_power_of_2(num_heads))


def heads_args(name: str, x: Tensor) -> dict[str, Tensor | int]:
    """The kernel argument ``name: Heads``."""
    return {
        f"{name}_ptr": x,
        f"{name}_token_stride": x.stride(0),
        f"{name}_head_stride": x.stride(1),
    }


def cache_args(kv_cache: Tensor) -> dict[str, Tensor | int]:
    """The kernel argument ``cache: PagedCache``."""
    names = ("block", "kv", "slot", "head")
    strides = {f"cache_{name}_stride": kv_cache.stride(i) for i, name in enumerate(names)}
    return {"cache_ptr": kv_cache, **strides}
