"""Groups arguments of kernels that belong together, so that a tensor and its strides are one
parameter.

A kernel annotates a parameter with one of these classes and reads its fields.  Launches, and
variants in artifacts, have flat names: the field ``token_stride`` of the parameter ``q`` is
``q_token_stride`` there.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Rows(NamedTuple):
    """A matrix whose columns are contiguous."""

    ptr: Any
    stride: Any


class InnerRows(NamedTuple):
    """Rows with two strides, such as the heads of a packed qkv tensor."""

    ptr: Any
    outer_stride: Any
    inner_stride: Any


class NormOf(NamedTuple):
    """What a norm of rows is given; ``offset`` is added to the weight and ``bias``, a pointer, to
    the result, unless they are None."""

    ptr: Any
    eps: Any
    offset: Any
    bias: Any


class Heads(NamedTuple):
    """[tokens, heads, head_dim], the last dimension contiguous."""

    ptr: Any
    token_stride: Any
    head_stride: Any


class Scales(NamedTuple):
    """The scales of a matrix quantized by groups of its rows' columns."""

    ptr: Any
    row_stride: Any
    group_stride: Any


class Normed(NamedTuple):
    """Sums of squares [rows, parts] of the rows that an RMS norm scales."""

    ptr: Any
    parts: Any
    eps: Any


class Added(NamedTuple):
    """What the add of a residual is given, and the norm behind it: the residual, the norm's weight
    and what is added to that, or None; and what it writes: the sum and its squares, by tiles."""

    ptr: Any
    weight: Any
    offset: Any
    total: Any
    squares: Any


class PagedCache(NamedTuple):
    """[blocks, 2, block_size, kv_heads, head_dim], the last dimension contiguous."""

    ptr: Any
    block_stride: Any
    kv_stride: Any
    slot_stride: Any
    head_stride: Any
