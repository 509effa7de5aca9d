"""``fuse_add_norm`` joins the residual add and the norm after it in one kernel.

Before: ``r2 = r + x; y = rms_norm(r2, w, eps)``.  After: ``y, r2 = add_rms_norm(x, r, w, eps)``,
and so with ``layer_norm``.
This saves one write and one read of the residual stream, and a launch.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from ..ops.norm.norm import norm_axes, with_axes
from .canonicalize import is_dense
from .rule import EXACT, is_call, writes_shared, written_between
from .sites import Match, Miss, SitePass, call
from .subgraph import fake_value

ADDS = (
    *(operator.add, operator.iadd, torch.add, "add", "add_"),
    *(torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor),
)


def _read(norm: fx.Node) -> Match | None:
    """Expected sites: every norm whose input is a sum.  The first norm of a model reads the
    embedding, and QK-norms read a projection; neither has a residual to absorb.

    Exact: the sum is rounded to the tensors' dtype before it is normalized, as without fusion.
    """
    axes = norm_axes(norm.target)
    if axes is None or not axes.is_alone:
        return None
    add: Any = norm.args[0]
    if not is_call(add, *ADDS):
        return None
    if reason := _why_not(norm, add):
        raise Miss(reason)
    args = (add.args[1], add.args[0], *norm.args[1:])
    fused = call(with_axes(norm.target, add=True), args, 2)
    return Match(norm, [add, norm], [norm, add], fused)


def why_not_summed(add: fx.Node) -> str:
    """Why an add is not the sum of two tensors like it, or an empty string."""
    if add.kwargs.get("alpha", 1) != 1:
        return f"the add scales by alpha={add.kwargs['alpha']}"
    operands: tuple[Any, ...] = add.args
    if len(operands) != 2 or not all(isinstance(a, fx.Node) for a in operands):
        return "the add is not of two tensors"
    left, right, total = (fake_value(n) for n in (*operands, add))
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return "the add is not of two tensors"
    if not (left.dtype == right.dtype == total.dtype):
        return f"the add mixes {left.dtype} and {right.dtype}"
    if not (tuple(left.shape) == tuple(right.shape) == tuple(total.shape)):
        return "the add broadcasts"
    if not is_dense(total):
        return f"the sum has strides {list(total.stride())}, the op's is dense"
    if writes_shared(add):
        return f"the add overwrites {operands[0].name}, which others may read"
    return ""


def _why_not(norm: fx.Node, add: fx.Node) -> str:
    if reason := why_not_summed(add) or written_between(add, norm):
        return reason
    early = [user for user in add.users if user < norm]  # in graph order
    if early:
        return f"the sum is used before the norm, by {early[0].name}"
    return ""


FUSE_ADD_NORM = SitePass("fuse_add_norm", EXACT, _read)
