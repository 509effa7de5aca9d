"""``canonicalize_linear`` raises products with a weight that is stored by output: ``x @ w.t()``.

Before: ``mm(x, w.t())`` or ``addmm(b, x, w.t())``.  After: ``linear(x, w[, b])``.  A weight
[in_features, out_features] that lies in memory by output is ``w.t()`` of such a weight, as
``linear(x, w.t()[, b])`` says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..canonicalize import roundings, tensor
from ..rule import Tier, is_call
from ..sites import Build, Match, Miss, SitePass, call
from ..subgraph import fake_value

_ATEN = torch.ops.aten


def _read(node: fx.Node) -> Match | None:
    """Expected sites: every product of two matrices of which the second has no dynamic size.

    Tolerant: a kernel may sum in another order than the one of the product.
    """
    bias: Any = None
    if is_call(node, _ATEN.mm.default):
        x, weight = node.args
    elif is_call(node, _ATEN.addmm.default) and not node.kwargs:
        bias, x, weight = node.args
    else:
        return None
    if not all(isinstance(size, int) for size in tensor(weight).shape):
        return None
    if bias is not None and tensor(bias).dim() != 1:
        raise Miss(f"{bias} has {tensor(bias).dim()} dimensions, the bias of a layer has one")
    stored = _untransposed(weight)
    if stored is None and _lies_by_output(weight):
        return Match(node, [node], [node], _transposing(x, weight, bias), _tier(node))
    if stored is None:
        raise Miss("the weight is stored by input")
    args = (x, stored) if bias is None else (x, stored, bias)
    linear = call(torch.ops.fw.linear.default, args)
    return Match(node, [weight, node], [node], linear, _tier(node))


def _tier(node: fx.Node) -> Tier:
    return roundings(tensor(node).dtype, 2)


def _lies_by_output(weight: Any) -> bool:
    """Whether a matrix [in_features, out_features] has the columns of each output side by side."""
    value = tensor(weight)
    return value.shape[0] > 1 and value.stride(0) == 1 and value.stride(1) == value.shape[0]


def _transposing(x: Any, weight: Any, bias: Any) -> Build:
    def build(graph: fx.Graph) -> list[fx.Node]:
        rows = graph.call_function(_ATEN.t.default, (weight,))
        args = (x, rows) if bias is None else (x, rows, bias)
        return [graph.call_function(torch.ops.fw.linear.default, args)]

    return build


def _untransposed(weight: Any) -> fx.Node | None:
    """w of ``w.t()``."""
    dims: Any = weight.args[1:] if is_call(weight, "transpose") else ()
    swaps = is_call(weight, "t") or sorted(dim % 2 for dim in dims) == [0, 1]
    if not swaps or fake_value(weight.args[0]).dim() != 2:
        return None
    source: fx.Node = weight.args[0]
    return source


CANONICALIZE_LINEAR = SitePass("canonicalize_linear", Tier(1e-6, 2.0**-6), _read)
