"""Describes linear layers as data: weight formats, prologues and epilogues.

``describe`` reads a call's arguments, tensors or descriptions of them, as a ``LinearDesc``.  From
that and a number of rows, ``select`` (``kernels.py``) chooses the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch

from ..core.desc import TensorDesc
from ..core.float8 import E4M3
from ..core.gate import name_of
from ..norm.gated_act import ACTIVATIONS, PLAIN_ACTS
from .formats import (
    BLOCK as BLOCK,
    OUT_DTYPES,
    WEIGHT_FORMATS as WEIGHT_FORMATS,
    WeightFormat as WeightFormat,
    describe_stored,
)

_CALLS = 4096


@dataclass(frozen=True)
class LinearDesc:
    """One linear layer, but for its number of rows.

    Attributes:
        weight_format: one of ``WEIGHT_FORMATS``.
        dtype: what sums are rounded to: the dtype of the result, unless that is quantized.
        out_features, in_features: shape of the weight; ``out_features`` counts gate and up.
        groups: weights that a routing table chooses from; 1 for a dense layer.
        prologue: "", or "norm": x is multiplied by a norm's weight already, and the kernel finds
            the norm's scale in sums of squares.
        bias: a bias is added before anything else.
        activation: "", or the activation of the epilogue: a gated or a plain one.
        add: the epilogue adds a residual, and makes what the prologue "norm" of the next takes.
        quantize: the epilogue quantizes to FP8 by a static scale.
    """

    weight_format: str
    dtype: torch.dtype
    out_features: int
    in_features: int
    groups: int = 1
    prologue: str = ""
    bias: bool = False
    activation: str = ""
    add: bool = False
    quantize: bool = False

    @property
    def format(self) -> WeightFormat:
        return WEIGHT_FORMATS[self.weight_format]

    @property
    def has_epilogue(self) -> bool:
        """Whether something follows that no library GEMM does: all but the bias."""
        return bool(self.activation) or self.add or self.quantize

    @property
    def columns(self) -> int:
        """Columns of the result."""
        columns: int = columns_of(self.activation, self.out_features)
        return columns


def columns_of(activation: str | None, out_features: Any) -> Any:
    """Columns of the result of a layer: half of its rows are ups if its activation is gated."""
    return out_features // 2 if name_of(activation) in ACTIVATIONS else out_features


def format_of(x: Any, weight: Any, x_scale: Any, weight_scale: Any) -> WeightFormat:
    """The format that dtypes and shapes mean.

    Raises:
        ValueError: they mean none; names what was found and what was expected.
    """
    if x_scale is None and weight_scale is None:
        return _unscaled_format(x, weight)
    operands = (x, x_scale, weight, weight_scale)
    if any(t is None for t in operands):
        raise ValueError("linear: one of x_scale and weight_scale is given, expected both")
    dtypes = tuple(t.dtype for t in operands)
    if dtypes != (E4M3, torch.float32, E4M3, torch.float32):
        raise ValueError(
            f"linear of scaled {', '.join(map(str, dtypes))}, expected {E4M3}, torch.float32, "
            f"{E4M3}, torch.float32"
        )
    shapes = [tuple(t.shape) for t in operands]
    if len(shapes[0]) == len(shapes[2]) == 2 and shapes[0][1] == shapes[2][1]:
        m, (n, k) = shapes[0][0], shapes[2]
        for found in WEIGHT_FORMATS.values():
            if found.x_scale and not found.stored:
                of_x, of_weight = found.scale_shapes(m, n, k)
                # The weight's shape first: it is known where the number of tokens is a symbol.
                if shapes[3] == of_weight and shapes[1] == of_x:
                    return found
    raise ValueError(
        f"linear of x, x_scale, weight, weight_scale {', '.join(str([*s]) for s in shapes)}: "
        "expected [M, K], [N, K] and scales [1, 1] with [1, 1], [M, 1] with [N, 1], or "
        "[M, K / 128] with [N / 128, K / 128]"
    )


def _unscaled_format(x: Any, weight: Any) -> WeightFormat:
    found = WEIGHT_FORMATS.get(str(x.dtype).removeprefix("torch."))
    if x.dtype != weight.dtype or found is None or found.stored:
        raise ValueError(
            f"linear of {x.dtype} by {weight.dtype}, expected one floating-point dtype for both, "
            "or FP8 with scales"
        )
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x has {x.shape[-1]} features, expected in_features {weight.shape[1]} of weight "
            f"{list(weight.shape)}"
        )
    return found


def describe(
    x: Any,
    weight: Any,
    bias: Any = None,
    x_scale: Any = None,
    weight_scale: Any = None,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    out_scale: Any = None,
    weight_zero: Any = None,
    weight_format: str | None = None,
    weight_row_scale: Any = None,
) -> LinearDesc:
    """Describe a call of ``linear`` from its arguments, of which shapes and dtypes are read.

    Raises:
        ValueError: they do not fit each other; names the argument and what was expected.
    """
    if weight_format is None:
        if weight_zero is not None or weight_row_scale is not None:
            name = "weight_row_scale" if weight_zero is None else "weight_zero"
            raise ValueError(f"linear: {name} is given, expected weight_format beside it")
        found = format_of(x, weight, x_scale, weight_scale)
        out_features, in_features = weight.shape
    else:
        tensors = {
            "weight": weight,
            "weight_scale": weight_scale,
            "weight_zero": weight_zero,
            "weight_row_scale": weight_row_scale,
        }
        found, (out_features, in_features) = describe_stored(weight_format, x, x_scale, tensors)
    dtypes: tuple[Any, ...] = OUT_DTYPES if found.quantizes_x else (x.dtype,)
    dtype: Any = out_dtype if found.quantizes_x else out_dtype or x.dtype
    if dtype not in dtypes:
        expected = " or ".join(map(str, dtypes))
        raise ValueError(f"linear of {found.name} to {dtype}, expected {expected}")
    if bias is not None and (bias.dtype != dtype or tuple(bias.shape) != (out_features,)):
        raise ValueError(
            f"linear: bias is {bias.dtype} {[*bias.shape]}, expected {dtype} [{out_features}]"
        )
    if activation is not None:
        check_activation(activation, out_features)
    if out_scale is not None and (
        tuple(out_scale.shape) != (1, 1) or out_scale.dtype != torch.float32 or len(x.shape) != 2
    ):
        raise ValueError(
            f"linear: x {[*x.shape]} and out_scale {out_scale.dtype} {[*out_scale.shape]}, "
            "expected [num_tokens, in_features] and torch.float32 [1, 1]"
        )
    return LinearDesc(
        found.name,
        dtype,
        out_features,
        in_features,
        bias=bias is not None,
        activation=activation or "",
        quantize=out_scale is not None,
    )


def check_activation(activation: str, out_features: int) -> None:
    """Raise ValueError if the activation is unknown, or gated and the rows of the weight are not
    those of gate and up."""
    if activation in PLAIN_ACTS:
        return
    if activation not in ACTIVATIONS:
        expected = " or ".join(map(repr, (*ACTIVATIONS, *PLAIN_ACTS)))
        raise ValueError(f"a linear layer's activation is {activation!r}, expected {expected}")
    if out_features % 2 == 1:
        raise ValueError(
            f"linear: weight has {out_features} rows, expected an even number: gate, then up"
        )


class LinearArgs(NamedTuple):
    """The arguments of a call of ``linear``."""

    x: Any
    weight: Any
    bias: Any = None
    x_scale: Any = None
    weight_scale: Any = None
    out_dtype: Any = None
    activation: str | None = None
    out_scale: Any = None
    weight_zero: Any = None
    weight_format: str | None = None
    weight_row_scale: Any = None

    @property
    def epilogue(self) -> tuple[str | None, Any]:
        """The steps that no library GEMM runs: the activation, and the scale by which the result is
        quantized."""
        return self.activation, self.out_scale


Shapes: TypeAlias = tuple[tuple[torch.dtype, torch.Size] | None, ...]
"""Dtype and shape of a call's tensors: x, weight, bias, x_scale, weight_scale, out_scale,
weight_zero and weight_row_scale."""


def shapes_of(call: LinearArgs) -> Shapes:
    """Dtypes and shapes of the tensors of a call of ``linear``, as a key."""
    operands = (call.x, call.weight, call.bias, call.x_scale, call.weight_scale)
    tensors = (*operands, call.out_scale, call.weight_zero, call.weight_row_scale)
    return tuple([None if t is None else (t.dtype, t.shape) for t in tensors])


@lru_cache(_CALLS)
def describe_shapes(
    shapes: Shapes,
    out_dtype: torch.dtype | None,
    activation: str | None,
    weight_format: str | None = None,
) -> tuple[LinearDesc, int]:
    """Describe a call whose tensors have these dtypes and shapes, and count its rows."""
    held = [None if s is None else TensorDesc(*s) for s in shapes]
    x, weight, bias, x_scale, weight_scale, out_scale, weight_zero, weight_row_scale = held
    how = (out_dtype, activation, out_scale, weight_zero, weight_format, weight_row_scale)
    desc = describe(x, weight, bias, x_scale, weight_scale, *how)
    return desc, held[0].numel // max(desc.in_features, 1)  # type: ignore[union-attr]


def describe_call(args: tuple[Any, ...]) -> tuple[LinearDesc, int]:
    """``describe`` of real tensors, remembered by their shapes, and the number of rows."""
    call = LinearArgs(*args)
    return describe_shapes(shapes_of(call), call.out_dtype, call.activation, call.weight_format)
