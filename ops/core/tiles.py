"""Arithmetic of tiles, and the memory that kernels read as rows."""

from __future__ import annotations

from torch import Tensor


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up; b positive."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below ``n``, 1 or more."""
    return 1 << max(n - 1, 0).bit_length()


def dense_rows(x: Tensor) -> Tensor:
    """``x``, or a copy if the elements of its last dimension are apart."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
