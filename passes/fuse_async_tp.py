"""``fuse_async_tp`` joins the linear layers on both sides of a sum over ranks with its norm.

Before: ``y, r2 = all_reduce_add_rms_norm(linear(x, w[, b]), r, ..., group); z = linear(y, ...)``.
After: ``z, r2 = linear_all_reduce_add_norm_linear(x, w, b, r, ..., w2, b2, activation, group)``.
With few rows the first layer's kernel sums; with many the op hides the transfers of the sum behind
the GEMMs, which is known as sequence parallelism with asynchronous tensor parallelism.
"""

from __future__ import annotations

import torch
from torch import fx

from ..ops.norm.norm import Norm
from .fuse_norm_linear import join, norm_before
from .rule import EXACT
from .sites import Match, SitePass


def _read(second: fx.Node) -> Match | None:
    """Expected sites: every ``all_reduce_add_rms_norm`` whose normed result goes to ``linear``,
    quantized or not.  That op is made by ``fuse_all_reduce_norm``, which runs before.

    Exact: every step rounds as before.  A GEMM of fewer rows may sum in another order, and a
    kernel may round less often, since it applies the norm's scale to the sums.
    """
    norm = norm_before(second, Norm(reduce=True, add=True))
    if norm is None:
        return None
    first, residual, group_name = norm.args[0], norm.args[1], norm.args[-1]
    fused = torch.ops.fw.linear_all_reduce_add_norm_linear.default
    return join(norm, second, first, residual, fused, group_name)


FUSE_ASYNC_TP = SitePass("fuse_async_tp", EXACT, _read)
