"""Describes a mixture of experts between two dense layers as data: the call of
``linear_add_norm_moe``, its ops in turn, and how its dense layers are streamed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from ..core.in_turn import Visit
from ..core.op import parameters_of
from ..linear.desc import LinearDesc
from ..linear.linear import OP as LINEAR
from ..linear.linear_add_norm_linear import LinearAddNorm
from ..norm.norm import ADD_RMS_NORM, NORMS, Norm
from ..norm.quantize import QUANTIZE
from .fused_moe import OP as FUSED_MOE
from .moe import Call as Experts, check as check_experts

Results = tuple[Tensor, Tensor]
QUANTIZE_ROWS, ADD_NORM_QUANTIZE = QUANTIZE["dynamic"], NORMS[Norm(add=True, quant="dynamic")]


class Call(NamedTuple):
    """The arguments of a call.

    Attributes:
        head: the first layer, with x a matrix, and the norm before the experts.
        experts: the arguments of ``fused_moe``, on the residual in place of the norm, without
            static scales of inputs and without a shared expert.
        next_norm_weight, next_eps: of the norm after the experts.  In a model's last layer,
            ``next_norm_weight`` and all of the layer behind it are None.
        next_weight, next_bias: of the second linear layer, [out_features, hidden] and
            [out_features]; the bias may be None.
        weight_scale, next_scale: of dense layers, if all layers but the router are FP8: float32,
            as of ``linear`` beside scales found in x, for groups of ``experts.group_size``.
    """

    head: LinearAddNorm
    experts: Experts
    next_norm_weight: Tensor | None
    next_eps: float
    next_weight: Tensor | None
    next_bias: Tensor | None
    weight_scale: Tensor | None
    next_scale: Tensor | None

    @classmethod
    def of(cls, args: Iterable[Any]) -> Call:
        """The call with these arguments, in the order of ``PARAMETERS``."""
        *plain, scale, gate_up_scale, down_scale, next_scale, group_size = args
        head = LinearAddNorm(*plain[:6])
        of_experts = (gate_up_scale, down_scale, None, None, group_size, None, None)
        experts = Experts._make((head.residual, *plain[6:10], *of_experts, *plain[10:17], None))
        return cls._make((head, experts, *plain[17:], scale, next_scale))

    @property
    def is_last(self) -> bool:
        """Whether nothing follows the experts."""
        return self.next_norm_weight is None

    @property
    def is_fp8(self) -> bool:
        return self.weight_scale is not None


_EXPERTS = parameters_of(Experts)
_NAMED = {found.name: found for found in (*_EXPERTS, *parameters_of(Call))}
_FP8 = ("weight_scale", "gate_up_scale", "down_scale", "next_scale", "group_size")
PARAMETERS = (
    *parameters_of(LinearAddNorm),
    *(*_EXPERTS[1:5], *_EXPERTS[12:19]),
    *parameters_of(Call)[2:6],
    *(_NAMED[name] for name in _FP8),
)


def check(call: Call) -> None:
    """Raises ValueError: shapes do not fit, or some of the scales are missing; names what was
    expected."""
    call.head.check_matrix("linear_add_norm_moe")
    if (call.next_norm_weight is None) is not (call.next_weight is None):
        raise ValueError(
            "linear_add_norm_moe: one of next_norm_weight and next_weight is given, expected both "
            "or none"
        )
    scales = [call.weight_scale, call.experts.gate_up_scale, call.experts.down_scale]
    scales += [] if call.is_last else [call.next_scale]
    if any((scale is None) is call.is_fp8 for scale in scales):
        raise ValueError(
            "linear_add_norm_moe: some of weight_scale, gate_up_scale, down_scale and next_scale "
            "are given, expected all or none"
        )
    check_experts(call.experts)


def in_turn(call: Call, visit: Visit) -> Results:
    """Compute a call op by op, with activations quantized before each layer of FP8."""
    head, group_size = call.head, call.experts.group_size

    def layer(x: Iterable[Any], weight: Any, bias: Any, scale: Any) -> Any:
        if scale is None:
            return visit(LINEAR, *x, weight, bias, *(None,) * 5)
        q, x_scale = x
        return visit(LINEAR, q, weight, bias, x_scale, scale, head.x.dtype, None, None)

    x = visit(QUANTIZE_ROWS, head.x, group_size) if call.is_fp8 else (head.x,)
    y = layer(x, head.weight, head.bias, call.weight_scale)
    normed, total = visit(ADD_RMS_NORM, *head.between(y))
    y = visit(FUSED_MOE, *call.experts._replace(x=normed))
    if call.is_last:
        return y, total
    norm = (total, call.next_norm_weight, call.next_eps)
    if call.is_fp8:
        *x, total = visit(ADD_NORM_QUANTIZE, y, *norm, group_size)
    else:
        *x, total = visit(ADD_RMS_NORM, y, *norm)
    return layer(x, call.next_weight, call.next_bias, call.next_scale), total


def streamed_layers(call: Call) -> list[LinearDesc]:
    """Describe the dense layers as the streaming kernel runs them, of activations in x's dtype: the
    first adds a residual, the second reads a norm."""
    dtype = call.head.x.dtype
    name = str(dtype).removeprefix("torch.")
    if call.is_fp8:
        name = "fp8 block weight" if call.experts.group_size else "fp8 weight"

    def layer(weight: Tensor, bias: Tensor | None, **how: Any) -> LinearDesc:
        rows, columns = weight.shape
        return LinearDesc(name, dtype, rows, columns, bias=bias is not None, **how)

    found = [layer(call.head.weight, call.head.bias, add=True)]
    if call.next_weight is not None:
        found.append(layer(call.next_weight, call.next_bias, prologue="norm"))
    return found
