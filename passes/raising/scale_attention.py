"""``scale_attention`` gives attention the number by which queries are multiplied, as in OPT.

Before: ``q = (x * s).view(...); out = empty_like(q); paged_attention(q, ..., out, scale)``.  After:
``q = x.view(...); ...; paged_attention(q, ..., out, s * scale)``.  This saves a launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..canonicalize import HALF_STEPS, kind, tensor, with_number
from ..rule import Tier, is_call
from ..sites import Match, Miss, SitePass, read_elsewhere

_ATTENTION = torch.ops.fw.paged_attention.default
_OUT, _SCALE = 5, 6
"""Positions of ``out`` and ``scale`` among the arguments of ``paged_attention``."""


def _read(attention: fx.Node) -> Match | None:
    """Expected sites: every attention whose queries are a product with a number.

    Tolerant: the products are not rounded.
    """
    if not is_call(attention, _ATTENTION):
        return None
    q, out = attention.args[0], attention.args[_OUT]
    product: Any = q
    views: list[Any] = []
    while kind(product) == "view" or is_call(product, "detach"):
        views.insert(0, product)
        product = product.args[0]
    if kind(product) != "mul" or (number := with_number(product)[1]) is None:
        return None
    scale: Any = attention.args[_SCALE]
    if number * scale <= 0:
        raise Miss(f"the queries are multiplied by {number}, attention's scale is positive")
    if not is_call(out, torch.empty_like) or out.args != (q,):
        raise Miss("the output lies in another tensor than one like the queries")
    nodes = [product, *views, out, attention]
    for node in (product, *views):
        if reason := read_elsewhere(node, nodes):
            raise Miss(reason)
    if any(user < attention for user in out.users):
        raise Miss("the output is read before attention writes it")

    def build(graph: fx.Graph) -> list[fx.Node]:
        copies: dict[Any, Any] = {product: with_number(product)[0]}
        for node in (*views, out):
            copies[node] = graph.node_copy(node, lambda arg: copies.get(arg, arg))
        args = [copies.get(arg, arg) for arg in attention.args]
        args[_SCALE] = number * scale
        graph.call_function(_ATTENTION, tuple(args))
        return [copies[out]]

    step = 8 * HALF_STEPS.get(tensor(q).dtype, 2.0**-20)
    return Match(attention, nodes, [out], build, Tier(1e-6, step, step))


SCALE_ATTENTION = SitePass("scale_attention", Tier(1e-6, 2.0**-5, 2.0**-5), _read)
