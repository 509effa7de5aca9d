"""``canonicalize_route`` raises routers, and ``share_experts`` the sum with a shared expert.

Before: ``p = softmax(logits); w, i = topk(p, k); w /= w.sum(-1, keepdim=True);
combine_experts(...(i.int()), w) * 2.5``, in any spelling that ``routers`` reads.  After: ``w, i =
route(logits, bias, k, ...); combine_experts(...(i), w)``.

Before: ``combine_experts(y, w) + shared``, or ``+ sigmoid(gate) * shared``.  After:
``combine_experts(y, w, shared[, gate])``.
"""

from __future__ import annotations

import operator
from dataclasses import astuple
from typing import Any

import torch
from torch import fx

from ..canonicalize import (
    HALF_STEPS,
    argument,
    is_dense,
    kind,
    same_shape,
    tensor,
    widened,
    with_number,
)
from ..rule import Tier, is_call, written_between
from ..sites import Match, Miss, SitePass, call
from .routers import Router, read_router

_COMBINE = torch.ops.fw.combine_experts.default
_ROUTE = torch.ops.fw.route.default
_LINEAR = torch.ops.fw.linear.default
_TIER = Tier(1e-6, 2.0**-6, 2.0**-6)


def _read(combine: fx.Node) -> Match | None:
    """Expected sites: every sum of experts whose weights ``route`` does not make.

    Tolerant: ``route`` computes in float32, and sums the experts in the order of their scores,
    which a ``topk`` that does not sort leaves open.
    """
    if not is_call(combine, _COMBINE):
        return None
    weights: Any = combine.args[1]
    if is_call(weights, operator.getitem) and is_call(weights.args[0], _ROUTE):
        return None
    router = read_router(weights)
    result, scaling = _scaled(combine)
    between = _between(router.logits, result)
    ids = [u for u in router.ids.users if u in between and kind(u) == "cast"]
    behind = _readers(ids, between)
    if not ids or combine not in behind or any(tensor(u).dtype != torch.int32 for u in ids):
        raise Miss(f"its weights and the ids of its experts are not both of {router.ids.args[0]}")
    if reason := written_between(router.logits, result):
        raise Miss(reason)

    def build(graph: fx.Graph) -> list[fx.Node]:
        made = graph.call_function(_ROUTE, _arguments(graph, router, scaling))
        copies: dict[Any, fx.Node] = {
            weights: graph.call_function(operator.getitem, (made, 0)),
            **dict.fromkeys(ids, graph.call_function(operator.getitem, (made, 1))),
        }
        for node in behind[: behind.index(combine) + 1]:
            copies[node] = graph.node_copy(node, lambda arg: copies.get(arg, arg))
        return [copies[combine]]

    return Match(result, between, [result], build, _tier(combine))


def _tier(node: fx.Node) -> Tier:
    """Of weights and sums that are rounded to the results' dtype."""
    step = 4 * HALF_STEPS.get(tensor(node).dtype, 2.0**-18)
    return Tier(1e-6, step, step)


def _scaled(combine: fx.Node) -> tuple[fx.Node, float]:
    """(the sum, what it is multiplied by), if a number scales it and nothing else reads it."""
    user = next(iter(combine.users)) if len(combine.users) == 1 else None
    number = with_number(user)[1] if kind(user) == "mul" else None  # type: ignore[arg-type]
    return (combine, 1.0) if number is None else (user, number)  # type: ignore[return-value]


def _between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """All that is computed of ``first`` and that ``last`` is computed of, with it, in order."""
    needed, waiting = set[fx.Node](), [last]
    while waiting:
        node = waiting.pop()
        if node not in needed and first < node:
            needed.add(node)
            waiting += node.all_input_nodes
    return _readers([first], sorted(needed))


def _readers(of: list[fx.Node], among: list[fx.Node]) -> list[fx.Node]:
    """Those that read these values, or read what does, in order."""
    found = set(of)
    for node in among:
        if any(arg in found for arg in node.all_input_nodes):
            found.add(node)
    return [node for node in among if node in found and node not in of]


def _arguments(graph: fx.Graph, router: Router, scaling: float) -> tuple[Any, ...]:
    bias: Any = router.bias
    if bias is not None and tensor(bias).dtype != torch.float32:
        bias = graph.call_method("to", (bias, torch.float32))
    *how, last = astuple(router.how)
    return router.logits, bias, *how, last * scaling


def _read_shared(total: fx.Node) -> Match | None:
    """Expected sites: every sum of experts' results and those of a linear layer.

    Tolerant: the op rounds once.
    """
    if kind(total) != "add" or argument(total, 2, "alpha", 1) != 1:
        return None
    pair = [widened(arg) for arg in total.args[:2] if isinstance(arg, fx.Node)]
    combine = next((node for node in pair if is_call(node, _COMBINE)), None)
    if combine is None or len(pair) != 2 or len(combine.args) > 2:
        return None
    nodes: list[Any] = [combine, total, *total.args]
    shared, gate = _gated(pair[1 - pair.index(combine)], nodes)
    if not is_call(shared, _LINEAR):
        return None
    result = total
    if tensor(total).dtype != tensor(combine).dtype:
        result = next(iter(total.users)) if len(total.users) == 1 else total
        nodes.append(result)
    values = [tensor(node) for node in (combine, shared, result)]
    if any(v.dtype != values[0].dtype or not same_shape(v, values[0]) for v in values):
        raise Miss(f"{shared} is {values[1].dtype}, the experts' sum {values[0].dtype}")
    if len(combine.users) > 1:
        raise Miss(f"{combine} has {len(combine.users)} users, not one sum")
    if not is_dense(tensor(result)):
        raise Miss(f"{result} is not dense")
    if reason := written_between(combine, result):
        raise Miss(reason)
    beside = (shared,) if gate is None else (shared, gate)
    old = [node for node in nodes if node is not shared and node is not gate]
    return Match(result, old, [result], call(_COMBINE, (*combine.args, *beside)), _tier(combine))


def _gated(node: Any, nodes: list[Any]) -> tuple[Any, Any]:
    """(x, gate) of ``sigmoid(gate) * x`` with a gate for each token, else (the node, None)."""
    if kind(node) != "mul":
        return node, None
    for gate, x in (node.args, reversed(node.args)):
        source: Any = gate.args[0] if kind(gate) == "sigmoid" else None
        if source is not None and tensor(source).shape[1:] == (1,):
            nodes += [node, gate]
            return x, source
    return node, None


CANONICALIZE_ROUTE = SitePass("canonicalize_route", _TIER, _read)
SHARE_EXPERTS = SitePass("share_experts", _TIER, _read_shared)
