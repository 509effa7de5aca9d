"""``fuse_norm_linear`` joins a linear layer into the residual stream and the next one out of it.

Before: ``y, r2 = add_rms_norm(linear(x, w[, b]), r, nw, eps); z = linear(y, w2[, b2, ...])``.
After: ``z, r2 = linear_add_norm_linear(x, w, b, r, nw, eps, w2, b2, activation)``.  With few rows
two kernels run where three did: the first adds the residual to its own result, and the second
normalizes that as it reads it.  With many rows it runs as before.
"""

from __future__ import annotations

import operator
import re
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..ops.norm.norm import Norm, norm_axes
from ..ops.norm.quantize import QUANTIZE
from .fuse_gated_linear import has_epilogue, linear_args
from .rule import EXACT, is_call, written_between
from .sites import Build, Match, Miss, SitePass, call, read_elsewhere

_QUANTS = tuple(op.overload() for op in QUANTIZE.values())


def _read(second: fx.Node) -> Match | None:
    """Expected sites: every ``add_rms_norm`` whose normed result goes to ``linear``, also by way of
    a quantization by a static scale.  The first norm of a model is none, since it adds nothing, nor
    is the last, which goes to the gather of last tokens.  FP8 layers with scales of their own x are
    sites of ``fuse_norm_mlp`` and ``fuse_norm_moe``, and norms behind a sum over ranks become sites
    of ``fuse_async_tp``.

    Exact: the op rounds as the ops that it replaces do.  A kernel may round less often, since it
    applies the norm's scale to the sums.
    """
    norm = norm_before(second, Norm(add=True))
    if norm is None:
        return None
    if any(is_call(x, torch.ops.fw.all_reduce.default) for x in norm.args[:2]):
        return None
    x: Any = (linear_args(second) or {})["x"]
    if is_call(x, operator.getitem) and is_call(x.args[0], torch.ops.fw.quant_fp8_dynamic.default):
        return None
    return join(norm, second, *summands(norm), torch.ops.fw.linear_add_norm_linear.default)


def norm_before(second: fx.Node, axes: Norm) -> fx.Node | None:
    """The norm with these axes whose first result a linear layer reads; the norm or a node behind
    it may quantize for the layer.  None if there is no such norm."""
    then = linear_args(second)
    normed: Any = then["x"] if then else None
    quant: Any = normed.args[0] if is_call(normed, operator.getitem) else normed
    if getattr(quant, "target", None) in _QUANTS:
        normed = quant.args[0]
    if not is_call(normed, operator.getitem) or normed.args[1] != 0:
        return None
    norm: Any = normed.args[0]
    found = norm_axes(getattr(norm, "target", None))
    return norm if found and replace(found, quant="") == axes else None


def join(
    norm: fx.Node, second: fx.Node, first: Any, residual: Any, target: Any, *group_name: Any
) -> Match:
    """Replace the layer before a norm, the norm and the layer behind it by a call of ``target``.

    Raises:
        Miss: why they cannot be.
    """
    made, then = linear_args(first) or {}, linear_args(second) or {}
    if then["x_scale"] is not None:
        raise Miss("the layer is FP8: the fused op takes what is normed as it is")
    normed = then["x"]
    if reason := _why_not(first, norm, normed, second):
        raise Miss(reason)
    args = (
        *(made[name] for name in ("x", "weight", "bias")),
        *(residual, *norm.args[2:4]),
        *(then[name] for name in ("weight", "bias", "activation")),
        *group_name,
    )
    totals = items(norm, 1)
    fused = call_with_totals(target, args, len(totals))
    return Match(second, [first, norm, normed, *totals, second], [second, *totals], fused)


def call_with_totals(target: Any, args: Any, count: int) -> Build:
    """Make a call of (y, the sum of the residual stream); ``count`` nodes were that sum."""

    def build(graph: fx.Graph) -> list[fx.Node]:
        y, total = call(target, args, 2)(graph)
        return [y, *[total] * count]

    return build


def items(node: fx.Node, index: int) -> list[fx.Node]:
    """The readers of one result of a call."""
    return [user for user in node.users if user.args[1] == index]


def summands(norm: fx.Node) -> tuple[Any, Any]:
    """The two summands of a norm; if one of them is a linear layer, it comes first."""
    x, residual = norm.args[:2]
    return (residual, x) if linear_args(residual) and not linear_args(x) else (x, residual)


def _what(node: Any) -> str:
    """The name of what a node calls, without its number, so that it is the same in every layer."""
    schema = getattr(node.target, "_schema", None)
    return schema.name.partition("::")[2] if schema else re.sub(r"_\d+$", "", node.name)


def _why_not(first: Any, norm: fx.Node, normed: fx.Node, second: fx.Node) -> str:
    made = linear_args(first)
    if made is None or has_epilogue(made):
        return f"what it adds comes from {_what(first)}, not from a linear layer"
    if made["x_scale"] is not None:
        return f"{first.name} has FP8 operands, for which there is no fused kernel"
    if any(offset is not None for offset in norm.args[4:5]):
        return "the norm's weight has an offset"
    if norm.args[0] is norm.args[1]:
        return f"{first.name} is added to itself"
    for node, reader in ((first, norm), (normed, second)):
        if reason := read_elsewhere(node, [reader]):
            return reason
    if len(items(norm, 0)) > 1:
        return f"the result of {norm.name} is also read elsewhere"
    early = [user for total in norm.users for user in total.users if user < second]
    if early:
        return f"the sum is used before {second.name}, by {early[0].name}"
    return written_between(first, second)


FUSE_NORM_LINEAR = SitePass("fuse_norm_linear", EXACT, _read)
