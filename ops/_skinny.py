"""Decides when the linear ops use the streaming kernels of ``csrc/gemm``.

A program's number of rows is known only when it runs, so each of these functions chooses then: the
streaming kernel for few rows, else the function that it was given.  Under capture the choice is
fixed, and the kernel reads weights before the kernel ahead of it has finished: that one must not
write them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._cuda import why_no_csrc
from ._device_table import most_rows
from ._float8 import E4M3
from ._op import OpDesc

# Rows must be multiples of these bytes, for the kernels' copies; smaller weights are not measured.
_LINE_BYTES = 128
_LEAST_BYTES = 8 << 20
# The kernels support up to 32 rows; the device table says from where on others are faster.
_BLOCK_COLUMNS = 512


def skinny_rows(out_features: int, in_features: int, itemsize: int = 2) -> int:
    """The most rows for which a streaming kernel is chosen for a weight.

    With it, the bfloat16 linear layers of a Llama-3-8B token take 12 % less time than with cuBLAS
    at one row, 7 % less at 16 and 3 % more at 32, where x costs as much in L2 as the weight does in
    memory (bench/NOTES.md).  It is 0 if the kernel cannot run, and for weights below 8 MiB, which
    are not measured and whose time is that of launches rather than of bytes.
    """
    row_bytes = itemsize * in_features
    if row_bytes % _LINE_BYTES or out_features * row_bytes < _LEAST_BYTES:
        return 0
    return most_rows("stream bfloat16" if itemsize == 2 else "stream fp8", out_features)


def refuses_weight(desc: OpDesc, dtype: torch.dtype, name: str = "weight") -> str:
    """Why the kernels do not serve a call, because of its weight ``name``; "" if they do."""
    weight = desc[name]
    if desc.device != "cuda":
        return f"on {desc.device}, not CUDA"
    # Its tensor copies came with SM 9.0.  For 8.0 and 8.9 the seam is the producer: cp.async.
    if desc.sm != 90:
        return f"built for SM 9.0, not {desc.sm / 10 if desc.sm else 'an unknown one'}"
    if desc["x"].dtype != dtype or weight.dtype != dtype:
        return f"dtype {desc['x'].dtype}, not {str(dtype).removeprefix('torch.')}"
    if not skinny_rows(weight.shape[0], weight.shape[1], dtype.itemsize):
        return (
            f"{name} {list(weight.shape)}: in_features not a multiple of "
            f"{_LINE_BYTES // dtype.itemsize}, or less than {_LEAST_BYTES >> 20} MiB"
        )
    return why_no_csrc(desc)


def refuses_bf16(desc: OpDesc, name: str = "weight") -> str:
    return refuses_weight(desc, torch.bfloat16, name)


def _can_stream(t: Tensor) -> bool:
    """Whether the kernels' 16-byte copies can read the rows of a matrix."""
    return t.stride(1) == 1 and t.stride(0) * t.itemsize % 16 == 0 and t.data_ptr() % 16 == 0


def rows_to_stream(x: Tensor, *weights: Tensor) -> Tensor | None:
    """x as a matrix, if the kernels take it and the weights, and it has one to a few rows."""
    x_2d = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    most = min(skinny_rows(w.shape[0], w.shape[1], w.itemsize) for w in weights)
    return x_2d if 0 < x_2d.shape[0] <= most and all(map(_can_stream, (x_2d, *weights))) else None


def streams_fp8(x: Tensor, weight: Tensor, weight_scale: Tensor) -> bool:
    """Whether the streaming kernel is chosen for an FP8 linear layer."""
    kernel = "stream linear fp8 block" if weight_scale.shape[1] > 1 else "stream linear fp8"
    most = most_rows(kernel, weight.shape[0])
    return x.shape[0] <= most and rows_to_stream(x, weight) is not None


def linear_fp8(otherwise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``linear_fp8`` by the streaming kernel for few rows, else by ``otherwise``."""

    def run(*args: Any) -> Tensor:
        x, _, weight, weight_scale, *_ = args
        if not streams_fp8(x, weight, weight_scale):
            return otherwise(*args)
        return torch.ops.fw_cuda.skinny_linear_fp8.default(*args)  # type: ignore[no-any-return]

    return run


def linear_fp8_supports(otherwise: Callable[[OpDesc], str]) -> Callable[[OpDesc], str]:
    """``supports`` of ``linear_fp8``: whether the streaming kernel and the other can run a call."""

    def supports(desc: OpDesc) -> str:
        if reason := otherwise(desc) or refuses_weight(desc, E4M3):
            return reason
        (out_features, in_features), scales = desc["weight"].shape, _shape(desc["weight_scale"])
        if scales not in ((1, 1), (out_features, 1)) and in_features % _BLOCK_COLUMNS:
            return f"in_features {in_features}: block scales are copied for {_BLOCK_COLUMNS}"
        return ""

    return supports


def _shape(t: Any) -> tuple[int, ...]:
    return tuple(t.shape)
