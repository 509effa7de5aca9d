"""Arithmetic of tiles."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up; b positive."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below ``n``, 1 or more."""
    return 1 << max(n - 1, 0).bit_length()
