"""Chooses the library's algorithm for the linear layers that the streaming kernels leave to it.

A device table (``config/device_table.py``) names the fastest measured for a GPU, a version of
cuBLASLt, a shape of weight and a range of rows.  Where none does, torch's own call serves.  The
choice is by shapes alone, when an op is called, so that a captured graph holds it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _cublaslt, _device_table

_SHAPES = 4096


@lru_cache(_SHAPES)
def _planned(
    operands: str, device: torch.device, rows: int, out_features: int, in_features: int
) -> tuple[_cublaslt.Product, bytes] | None:
    answer = _device_table.algorithm(operands, device, rows, out_features, in_features)
    if answer is None:
        return None
    table, found = answer
    index = _device_table.index_of(device)
    product = _cublaslt.Product(operands, index, rows, out_features, in_features)
    if reason := product.refuses(found):
        raise RuntimeError(
            f"{table.name}: the algorithm for {operands} {[out_features, in_features]} and {rows}"
            f" rows: {reason}; write the table anew with python -m fusewright.bench.ops.tune_linear"
        )
    return product, found


_device_table.on_take(_planned.cache_clear)


def _plain(*tensors: Tensor) -> bool:
    """Whether the tensors are like those on which the algorithms were measured, so that their
    copies can read them."""
    return all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors)


def _check_devices(op: str, x: Tensor, **others: Tensor) -> None:
    """Refuse operands on several devices: the library would take any address for x's device."""
    for name, t in others.items():
        if t.device != x.device:
            raise ValueError(
                f"{op}: {name} is on {t.device}, expected {x.device}, where x is: move one of them"
            )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear``; for bfloat16 on a GPU by the table's algorithm, if it names one.

    Raises:
        ValueError: x and weight are on different devices.
    """
    _check_devices("linear", x, weight=weight)
    fits = x.dtype == weight.dtype == torch.bfloat16 and x.shape[-1] == weight.shape[1]
    if not fits or bias is not None or not _plain(x, weight):
        return F.linear(x, weight, bias)
    planned = _planned("bfloat16", x.device, x.numel() // max(x.shape[-1], 1), *weight.shape)
    if planned is None:
        return F.linear(x, weight, bias)
    product, algorithm = planned
    return product.run(x, weight, x.new_empty((*x.shape[:-1], weight.shape[0])), algorithm)


def linear_fp8(
    scheme: str,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor | None:
    """``linear_fp8`` on a GPU by the table's algorithm; None if it names none.

    Raises:
        ValueError: the operands are on different devices.
    """
    _check_devices("linear_fp8", x, x_scale=x_scale, weight=weight, weight_scale=weight_scale)
    planned = _planned(f"fp8 {scheme}", x.device, x.shape[0], *weight.shape)
    other = bias is not None or out_dtype != torch.bfloat16
    if planned is None or other or not _plain(x, x_scale, weight, weight_scale):
        return None  # scheme_of has compared shapes and dtypes
    product, algorithm = planned
    y = x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)
    return product.run(x, weight, y, algorithm, x_scale, weight_scale)
