"""Runs linear layers by the algorithms of cuBLASLt that a device table names.

A device table (``config/device_table.py``) names the fastest measured for a GPU, a version of
cuBLASLt, a shape of weight and a range of rows.  Where none does, ``kernels.py`` chooses
another kernel.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core import cublaslt as _cublaslt, device_table as _device_table
from .desc import format_of

_SHAPES = 4096


@lru_cache(_SHAPES)
def _planned(
    operands: str, device: torch.device, rows: int, out_features: int, in_features: int
) -> tuple[_cublaslt.GemmPlan, bytes] | None:
    answer = _device_table.algorithm(operands, device, rows, out_features, in_features)
    if answer is None:
        return None
    table, found = answer
    index = _device_table.index_of(device)
    plan = _cublaslt.GemmPlan(operands, index, rows, out_features, in_features)
    if reason := plan.refuses(found):
        raise RuntimeError(
            f"{table.name}: the algorithm for {operands} {[out_features, in_features]} and {rows}"
            f" rows: {reason}; write the table anew with python -m fusewright.bench.ops.tune_linear"
        )
    return plan, found


_device_table.on_change(_planned.cache_clear)


def _plain(*tensors: Tensor) -> bool:
    """Whether the tensors are like those on which the algorithms were measured, so that their
    copies can read them."""
    return all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors)


def _check_devices(x: Tensor, **others: Tensor | None) -> None:
    """Refuse operands on several devices: the library would take any address for x's device."""
    for name, t in others.items():
        if t is not None and t.device != x.device:
            raise ValueError(
                f"linear: {name} is on {t.device}, expected {x.device}, where x is: move one of "
                "them"
            )


def run(*args: Any) -> Tensor | None:
    """A call of ``linear`` without bias to bfloat16, by the table's algorithm for its shape; None
    if the table names none, or the operands are not like those on which it was measured.

    Raises:
        ValueError: the operands are on different devices.
    """
    x, weight, _, x_scale, weight_scale, *_ = args
    _check_devices(x, weight=weight, x_scale=x_scale, weight_scale=weight_scale)
    operands = format_of(x, weight, x_scale, weight_scale).name
    scales = () if x_scale is None or weight_scale is None else (x_scale, weight_scale)
    rows = x.numel() // max(x.shape[-1], 1)
    planned = _planned(operands, x.device, rows, *weight.shape)
    if planned is None or not _plain(x, weight, *scales):
        return None
    plan, algorithm = planned
    y = x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.bfloat16)
    return plan.run(x, weight, y, algorithm, *scales)
