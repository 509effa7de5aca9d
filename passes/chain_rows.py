"""Reads the stages of chains that need no linear layer: products with a number, and lone adds."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..ops.chain.row_stages import Add, Scale
from .canonicalize import is_dense
from .chain_readers import Read, Reading, read_add_norm, read_norm, why_read_elsewhere
from .fuse_add_norm import ADDS, why_not_summed
from .rule import is_call, writes_shared
from .sites import Miss, read_elsewhere
from .subgraph import fake_value

_PRODUCTS = (
    *(operator.mul, operator.imul, torch.mul, "mul", "mul_"),
    *(torch.ops.aten.mul.Tensor, torch.ops.aten.mul_.Tensor),
)


def read_scale(chain: Reading, node: fx.Node) -> Read | None:
    """A product with a number."""
    if not is_call(node, *_PRODUCTS) or len(node.args) != 2 or node.args[0] is not chain.value:
        return None
    factor: Any = node.args[1]
    if type(factor) not in (int, float) or node.kwargs:
        return None
    value = fake_value(node)
    if value.dtype != chain.dtype or not is_dense(value) or writes_shared(node):
        return None
    is_sum = chain.value in chain.totals
    # No site, so no reason: the chain ends before a product of what others read too.
    if why_read_elsewhere(chain, [node]) or (is_sum and read_elsewhere(chain.value, [node])):
        return None
    totals = (node,) if is_sum else ()
    return Read(
        lambda names: Scale(tensors=names, factor=float(factor)), {}, [node], node, totals=totals
    )


def read_add(chain: Reading, node: fx.Node) -> Read | None:
    """An add of the residual stream whose sum goes to no norm."""
    if not is_call(node, *ADDS) or chain.value not in node.args or chain.totals:
        return None
    if reason := why_not_summed(node) or why_read_elsewhere(chain, [node]):
        raise Miss(reason)
    left, right = node.args
    if left is right:
        raise Miss("what a layer makes is added to itself")
    other: Any = right if left is chain.value else left
    if chain.dtype != fake_value(other).dtype:
        raise Miss(f"the residual is {fake_value(other).dtype}, what is added {chain.dtype}")
    return Read(lambda names: Add(tensors=names), {}, [node], node, residual=other, totals=(node,))


ROW_READERS = (read_norm, read_scale, read_add_norm, read_add)
"""The readers of all that the kernel of rows computes."""
