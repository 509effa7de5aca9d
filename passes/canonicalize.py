"""Reads plain PyTorch math in any spelling: Dynamo's functions and methods, or ATen's ops.

The rules that raise it to semantic ops (``canonicalize_norm``, ``canonicalize_rope``,
``fuse_act``) ask here what a node computes and check eps, dimensions and dtypes on the nodes; no
pattern graphs are listed anywhere.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .rule import Tier
from .sites import Miss
from .subgraph import equal_sizes, fake_value

_ATEN = torch.ops.aten
_TARGETS: dict[str, tuple[Any, ...]] = {
    "add": (operator.add, operator.iadd, torch.add, "add", _ATEN.add.Tensor, _ATEN.add.Scalar),
    "sub": (operator.sub, operator.isub, torch.sub, "sub", _ATEN.sub.Tensor),
    "mul": (operator.mul, operator.imul, torch.mul, "mul", _ATEN.mul.Tensor, _ATEN.mul.Scalar),
    "div": (operator.truediv, torch.div, "div", _ATEN.div.Tensor, _ATEN.div.Scalar),
    "pow": (operator.pow, torch.pow, "pow", _ATEN.pow.Tensor_Scalar),
    "square": (torch.square, "square", _ATEN.square.default),
    "mean": (torch.mean, "mean", _ATEN.mean.dim),
    "sum": (torch.sum, "sum", _ATEN.sum.dim_IntList),
    "rsqrt": (torch.rsqrt, "rsqrt", _ATEN.rsqrt.default),
    "sqrt": (torch.sqrt, "sqrt", _ATEN.sqrt.default),
    "reciprocal": (torch.reciprocal, "reciprocal", _ATEN.reciprocal.default),
    "neg": (operator.neg, torch.neg, "neg", _ATEN.neg.default),
    "cos": (torch.cos, "cos", _ATEN.cos.default),
    "sin": (torch.sin, "sin", _ATEN.sin.default),
    "sigmoid": (torch.sigmoid, F.sigmoid, "sigmoid", _ATEN.sigmoid.default),
    "silu": (F.silu, _ATEN.silu.default),
    "gelu": (F.gelu, torch._C._nn.gelu, _ATEN.gelu.default),
    "relu": (F.relu, torch.relu, "relu", _ATEN.relu.default),
    "tanh": (torch.tanh, "tanh", _ATEN.tanh.default),
    "rms_norm": (F.rms_norm, torch.rms_norm, _ATEN.rms_norm.default),
    "layer_norm": (F.layer_norm, torch.layer_norm, _ATEN.layer_norm.default),
    "cast": (
        *("to", "float", "half", "bfloat16", "type", "type_as"),
        _ATEN._to_copy.default,
        torch.ops.prims.convert_element_type.default,
    ),
    "cat": (torch.cat, _ATEN.cat.default),
    "stack": (torch.stack, _ATEN.stack.default),
    "view": (
        *("view", "reshape", "flatten", torch.reshape, torch.flatten),
        *(_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default),
    ),
    "expand": ("expand", _ATEN.expand.default),
    "clone": ("clone", "contiguous", torch.clone, _ATEN.clone.default),
    "as_complex": (torch.view_as_complex, _ATEN.view_as_complex.default),
    "as_real": (torch.view_as_real, _ATEN.view_as_real.default),
    "polar": (torch.polar, _ATEN.polar.default),
    "ones": (torch.ones_like, _ATEN.ones_like.default),
    "clamp": (torch.clamp, "clamp", _ATEN.clamp.default),
    "unsqueeze": (torch.unsqueeze, "unsqueeze", _ATEN.unsqueeze.default),
    "split": (
        *(torch.chunk, "chunk", torch.split, "split", torch.tensor_split, "tensor_split"),
        *(_ATEN.split.Tensor, _ATEN.split_with_sizes.default),
    ),
    "item": (operator.getitem,),
    "slice": (_ATEN.slice.Tensor,),
    "select": (torch.select, "select", _ATEN.select.int),
}
_KINDS: dict[Any, str] = {target: kind for kind, many in _TARGETS.items() for target in many}
HALF_STEPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_COMPUTED = (torch.float32, *HALF_STEPS)
"""Dtypes of the ops' tensors.  All are computed in float32, which holds their values."""


def kind(node: Any) -> str:
    """The name of what ``node`` computes, such as "mul"; "" if no rule reads it."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return ""
    return _KINDS.get(node.target, "")


_POINTWISE_KINDS = frozenset(
    [
        *("add", "sub", "mul", "div", "pow", "square", "rsqrt", "sqrt", "reciprocal", "neg"),
        *("cos", "sin", "sigmoid", "silu", "gelu", "relu", "tanh", "cast", "clamp"),
        "clone",
    ]
)


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element is computed of those at its place, as they are spread over the shape."""
    if kind(node) in _POINTWISE_KINDS:
        return True
    return (
        isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    )


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """An argument, by position or by keyword."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def tensor(node: Any) -> Tensor:
    """The fake tensor of a node; raises ``Miss`` if it has none."""
    value = fake_value(node) if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor):
        raise Miss(f"{node} is not a tensor of the graph")
    return value


def cast_source(node: Any) -> Any:
    """Return the node that ``node`` casts; ``node`` itself if it does anything else."""
    if kind(node) != "cast":
        return node
    source = fake_value(node.args[0])
    made = fake_value(node)
    if not isinstance(source, Tensor) or not isinstance(made, Tensor):
        return node
    moved = source.device != made.device or not source.dtype.is_floating_point
    return node if moved or not made.dtype.is_floating_point else node.args[0]


def widened(node: Any) -> Any:
    """Return the node that ``node`` casts to float32, where no value changes by it; else ``node``
    itself."""
    source = cast_source(node)
    if source is node or tensor(source).dtype not in _COMPUTED:
        return node
    return source if tensor(node).dtype == torch.float32 else node


def computed_dtype(node: Any) -> torch.dtype:
    """The dtype of a tensor that an op is to read.  Raises ``Miss`` if float32, in which the op
    computes, does not hold its values, or if it has no last dimension."""
    value = tensor(node)
    if value.dtype not in _COMPUTED:
        raise Miss(f"{node.name} is {value.dtype}, the op computes in float32")
    if value.dim() == 0:
        raise Miss(f"{node.name} has no dimension, expected one or more")
    return value.dtype


def check_rounding(nodes: Iterable[Any], dtype: torch.dtype) -> None:
    """Raise ``Miss`` unless these nodes compute float32, or round to ``dtype`` as the op's result
    does."""
    for node in nodes:
        if tensor(node).dtype not in (torch.float32, dtype):
            rounds = "" if dtype == torch.float32 else f" and rounds to {dtype}"
            raise Miss(f"{node.name} is {tensor(node).dtype}, the op computes in float32{rounds}")


def is_same(a: Any, b: Any) -> bool:
    """Whether both nodes have the same values: one node, or two wide casts of one."""
    return isinstance(a, fx.Node) and widened(a) is widened(b)


def with_number(node: fx.Node) -> tuple[Any, float | None]:
    """Read a sum, product, quotient or power with a number as (the tensor operand, the number)."""
    left, right = (
        argument(node, 0, "input"),
        argument(node, 1, "other", node.kwargs.get("exponent")),
    )
    if argument(node, 2, "alpha", 1) != 1 or node.kwargs.get("rounding_mode"):
        return left, None
    if isinstance(right, (int, float)):
        return left, float(right)
    if isinstance(left, (int, float)) and kind(node) in ("add", "mul"):
        return right, float(left)
    return left, None


def other_operand(node: fx.Node, known: fx.Node) -> Any:
    """The operand beside ``known`` of a sum or product of two; raises ``Miss`` otherwise."""
    operands = [argument(node, 0, "input"), argument(node, 1, "other")]
    if known not in operands or argument(node, 2, "alpha", 1) != 1:
        raise Miss(f"{node.name} is not of two operands")
    return operands[1] if operands[0] is known else operands[0]


def only_user(node: fx.Node) -> fx.Node:
    """The only user of a value inside a site; raises ``Miss`` if it has several."""
    if len(node.users) != 1:
        raise Miss(f"{node.name} has {len(node.users)} users, expected one")
    return next(iter(node.users))


def columns(node: Any) -> tuple[Any, int, int] | None:
    """Read ``node`` as (tensor, start, stop), a range of another tensor's columns; else None."""
    if not isinstance(node, fx.Node) or not isinstance(fake_value(node), Tensor):
        return None
    if fake_value(node).dim() == 0:
        return None
    width, start = fake_value(node).shape[-1], None
    source: Any = node.args[0] if node.args else None
    num_dims = fake_value(node).dim()
    if kind(node) == "slice" and argument(node, 1, "dim", 0) in (-1, num_dims - 1):
        start = argument(node, 2, "start") if argument(node, 4, "step", 1) == 1 else None
    elif kind(node) == "item" and kind(source) == "split":
        parts, index, source = fake_value(source), node.args[1], source.args[0]
        dim = argument(node.args[0], 2, "dim", 0)  # type: ignore[arg-type]
        if dim in (-1, num_dims - 1) and isinstance(index, int):
            start = sum(part.shape[-1] for part in parts[:index])
    elif kind(node) == "item" and isinstance(source, fx.Node):
        start = _slice_start(node.args[1], fake_value(source))
    elif kind(node) == "select" and kind(source) == "view" and isinstance(width, int):
        dim, index, source = argument(node, 1, "dim"), argument(node, 2, "index"), source.args[0]
        if dim % (num_dims + 1) == num_dims - 1 and _are_alike_but_last(node, source):
            start = index * width if index >= 0 else tensor(source).shape[-1] + index * width
    if not isinstance(start, int) or not isinstance(width, int):
        return None
    if start < 0:
        start += tensor(source).shape[-1]
    return source, start, start + width


def _are_alike_but_last(node: fx.Node, source: Any) -> bool:
    a, b = tensor(node), tensor(source)
    return a.dim() == b.dim() and all(map(equal_sizes, a.shape[:-1], b.shape[:-1]))


def _slice_start(index: Any, source: Any) -> int | None:
    """The ``start`` of ``source[..., start:stop]``, if all other dimensions are taken whole."""
    if not isinstance(index, tuple) or not isinstance(source, Tensor):
        return None
    *rest, last = index
    whole = all(i is Ellipsis or i == slice(None) for i in rest)
    reaches = Ellipsis in rest or len(index) == source.dim()
    if not (whole and reaches and isinstance(last, slice) and last.step in (None, 1)):
        return None
    return 0 if last.start is None else last.start


def same_shape(a: Tensor, b: Tensor) -> bool:
    """Whether the shapes are equal as expressions; comparing these makes no guards."""
    return a.dim() == b.dim() and all(map(equal_sizes, a.shape, b.shape))


def is_dense(value: Tensor) -> bool:
    """Whether the rows follow one another, as in the ops' results; makes no guards."""
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if str(size) == "1":
            continue
        if str(stride) != str(expected):
            return False
        expected = expected * (1 if str(size) == "0" else size)
    return True


def check_dense(node: fx.Node) -> None:
    if not is_dense(tensor(node)):
        raise Miss(
            f"{node.name} has strides {list(tensor(node).stride())}, the op's result is dense"
        )


def roundings(dtype: torch.dtype, count: int) -> Tier:
    """The most that ``count`` roundings to ``dtype`` amount to; in float32, a few last bits."""
    if dtype not in HALF_STEPS:
        return Tier(atol=1e-6, rtol=2.0**-18)
    # What is rounded to a subnormal number of float16 is off by 2^-25, and then scaled by factors
    # that verification draws up to 2^13 together.
    atol = 2.0**-11 if dtype == torch.float16 else 1e-6
    return Tier(atol=atol, rtol=count * HALF_STEPS[dtype])


def in_order(nodes: Iterable[Any]) -> list[fx.Node]:
    """The distinct nodes among ``nodes``, in the order of the graph."""
    return sorted({node for node in nodes if isinstance(node, fx.Node)})


def squared_source(node: Any) -> Any:
    """x of ``x ** 2`` or ``x * x``, else None."""
    if kind(node) == "square":
        return argument(node, 0, "input")
    if kind(node) == "pow":
        base, power = with_number(node)
        return base if power == 2 else None
    if kind(node) == "mul" and len(node.args) == 2 and is_same(*node.args):
        return node.args[0]
    return None


def uncentered(squared: Any) -> tuple[Any, Any]:
    """(x, its mean) of ``x - mean(x)``, as a layer norm squares it; (None, None) of all else, of
    which the op is an RMSNorm."""
    if kind(squared) != "sub" or len(squared.args) != 2:
        return None, None
    x, mean = squared.args
    if kind(mean) != "mean" or not is_same(mean.args[0], x) or tensor(mean).dtype != torch.float32:
        return None, None
    return (x, mean) if is_over_last(mean) else (None, None)


def is_over_last(mean: fx.Node) -> bool:
    """Whether a mean is over the last dimension alone, which is kept."""
    dims = dims_of(mean)
    last = tensor(mean.args[0]).dim() - 1
    return dims in ([-1], [last]) and bool(argument(mean, 2, "keepdim", False))


def dims_of(mean: fx.Node) -> list[int]:
    dims = argument(mean, 1, "dim", ())
    return [dims] if isinstance(dims, int) else list(dims or ())


def is_centered_alike(scaled: Any, squared: fx.Node) -> bool:
    """Whether both are ``x - mean(x)`` of the same two nodes."""
    if kind(scaled) != "sub" or len(scaled.args) != 2:
        return False
    return is_same(scaled.args[0], squared.args[0]) and scaled.args[1] is squared.args[1]
