"""``canonicalize_linear`` raises products with a weight that is stored by output: ``x @ w.t()``.

Before: ``mm(x, w.t())`` or ``addmm(b, x, w.t())``.  After: ``linear(x, w[, b])``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..canonicalize import roundings, tensor
from ..rule import Tier, is_call
from ..sites import Match, Miss, SitePass, call
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
    if stored is None:
        raise Miss("the weight is stored by input")
    args = (x, stored) if bias is None else (x, stored, bias)
    linear = call(torch.ops.fw.linear.default, args)
    return Match(node, [weight, node], [node], linear, roundings(tensor(x).dtype, 2))


def _untransposed(weight: Any) -> fx.Node | None:
    """w of ``w.t()``."""
    dims: Any = weight.args[1:] if is_call(weight, "transpose") else ()
    swaps = is_call(weight, "t") or sorted(dim % 2 for dim in dims) == [0, 1]
    if not swaps or fake_value(weight.args[0]).dim() != 2:
        return None
    source: fx.Node = weight.args[0]
    return source


CANONICALIZE_LINEAR = SitePass("canonicalize_linear", Tier(1e-6, 2.0**-6), _read)
