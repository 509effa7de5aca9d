"""``fuse_moe`` joins a router, its experts and the sum of their results in one op.

Before: ``w, ids = route(linear(x, r), ...); h = expert_linear(x, gate_up, ids, activation=...);
y = combine_experts(expert_linear(h, down, ids), w[, shared, gate])``, with inputs quantized if the
weights are FP8.  After: ``y = fused_moe(x, r, gate_up, down, ...)``.  The slots are sorted by
expert once for both layers, and with few tokens not at all.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..ops.core.gate import spelled
from ..ops.norm.gated_act import activation_of
from .canonicalize import tensor, widened
from .fuse_gated_linear import (
    expert_linear_args,
    gate_of,
    has_epilogue,
    linear_args,
    why_two,
    without_defaults,
)
from .rule import EXACT, is_call, written_between
from .sites import Match, Miss, SitePass, call, read_elsewhere

_ROUTE = torch.ops.fw.route.default
_DEFAULTS = ("softmax", True, 1, 1, 1.0)
"""Defaults of the attributes of ``route`` behind ``top_k``."""


@dataclass(frozen=True)
class _Layer:
    """A layer of experts: its input before quantization, its arguments, and its quantization."""

    source: fx.Node
    args: dict[str, Any]
    input_scale: Any
    group_size: int
    nodes: list[fx.Node]


def _read(combine: fx.Node) -> Match | None:
    """Expected sites: every ``combine_experts``.

    Exact: the op rounds as the ops that it replaces do.  A kernel may sum in another order than the
    kernel that it replaces.
    """
    if not is_call(combine, torch.ops.fw.combine_experts.default):
        return None
    y, weights, shared, gate, residual = (*combine.args, None, None, None)[:5]
    if residual is not None:
        raise Miss("it adds a residual already")
    down = _layer(y)
    act, gate_up = _gate_up(down.source)
    if down.args["activation"] is not None:
        raise Miss(f"{y.name} has an activation")  # type: ignore[union-attr]
    router = _item(weights, 0)
    for layer in (gate_up, down):
        if _item(layer.args["topk_ids"], 1) is not router:
            raise Miss(f"its weights and the ids of {layer.nodes[0].name} are not of one route")
    logits, bias, top_k, *how = router.args
    made = linear_args(logits)
    if (
        made is None
        or made["x_scale"] is not None
        or made["weight_format"] is not None
        or has_epilogue(made)
    ):
        raise Miss(f"the router's logits come from {_name(logits)}, not from a plain linear layer")
    wide, read, router_weight, router_bias = _operands(made, gate_up.source)
    if read is not gate_up.source:
        raise Miss(f"the router reads {_name(read)}, the experts {gate_up.source.name}")
    if gate_up.args["weight_format"] != down.args["weight_format"]:
        raise Miss("the experts' layers are stored in two formats")
    if (gate_up.args["x_scale"] is None) is not (down.args["x_scale"] is None):
        raise Miss("one of the experts' layers is FP8, the other is not")
    if down.group_size != gate_up.group_size:
        raise Miss("the experts' layers are quantized in groups of different sizes")
    if down.args["first_expert"] is not gate_up.args["first_expert"]:
        raise Miss("the experts' layers are of different experts")
    inner: list[Any] = [*gate_up.nodes, *act, *down.nodes, logits]
    items = [user for user in router.users if is_call(user, operator.getitem)]
    casts = {made["x"], made["weight"], made["bias"]} - {gate_up.source, router_weight, router_bias}
    nodes = sorted({*inner, router, *items, combine, *casts} - {None})
    _check_readers([down.nodes[0], gate_up.nodes[0], *act, *items], nodes)
    if reason := written_between(nodes[0], combine):
        raise Miss(reason)
    scales = (gate_up.args["weight_scale"], down.args["weight_scale"])
    inputs = (gate_up.input_scale, down.input_scale, gate_up.group_size)
    held = [layer.args[name] for name in ("bias", "weight_zero") for layer in (gate_up, down)]
    args = (
        *(gate_up.source, router_weight, bias, gate_up.args["weight"], down.args["weight"]),
        *(*scales, *inputs, shared, gate, top_k, *how, *_DEFAULTS[len(how) :]),
        *(gate_up.args["activation"], gate_up.args["first_expert"]),
        *without_defaults(wide, router_bias, *held, gate_up.args["weight_format"]),
    )
    return Match(combine, nodes, [combine], call(torch.ops.fw.fused_moe.default, args))


def _operands(router: dict[str, Any], experts_read: fx.Node) -> tuple[bool, Any, Any, Any]:
    """(whether the router computes in float32 what the experts read in 16 bits, what it reads, its
    weight, its bias), with casts taken away."""
    x, weight, bias = widened(router["x"]), router["weight"], router["bias"]
    if x is router["x"] or router["x"] is experts_read:
        return False, router["x"], weight, bias
    narrow = [None if one is None else widened(one) for one in (weight, bias)]
    same = all(one is None or tensor(one).dtype == tensor(x).dtype for one in narrow)
    return (True, x, *(narrow if same else (weight, bias)))


def _gate_up(node: Any) -> tuple[list[fx.Node], _Layer]:
    """Read a gated layer from its node, or from the node of its separate activation."""
    activation = activation_of(getattr(node, "target", None))
    if activation is None:
        found = _layer(node)
        if found.args["activation"] is None:
            raise Miss(f"{node.name} has no gated activation")
        return [], found
    if reason := why_two(node, "layers"):
        raise Miss(reason)
    found = _layer(node.args[0])
    if found.args["activation"] is not None:
        raise Miss(f"{found.nodes[0].name} has two activations")
    found.args["activation"] = spelled(activation, gate_of(node))
    return [node], found


def _layer(node: Any) -> _Layer:
    args = expert_linear_args(node)
    if args is None:
        raise Miss(f"what it adds comes from {_name(node)}, not from layers of experts")
    if args["x_scale"] is None:
        return _Layer(args["x"], args, None, 0, [node])
    q, scale = args["x"], args["x_scale"]
    if is_call(q, torch.ops.fw.quant_fp8_static.default) and q.args[1] is scale:
        return _Layer(q.args[0], args, scale, 0, [node, q])  # type: ignore[arg-type]
    quant = q.args[0] if is_call(q, operator.getitem) else None
    if is_call(quant, torch.ops.fw.quant_fp8_dynamic.default) and _item(scale, 1) is quant:
        source, group_size = quant.args
        return _Layer(source, args, None, group_size, [node, quant, q, scale])  # type: ignore[arg-type]
    raise Miss(f"the input of {node.name} is not quantized for it alone")


def _item(node: Any, index: int) -> fx.Node:
    """The tuple that ``node`` is an item of."""
    if not is_call(node, operator.getitem) or node.args[1] != index:
        raise Miss(f"{_name(node)} is not a result of a router")
    source: Any = node.args[0]
    if index == 1 and not is_call(source, _ROUTE, torch.ops.fw.quant_fp8_dynamic.default):
        raise Miss(f"{_name(node)} is not a result of a router")
    return source  # type: ignore[no-any-return]


def _check_readers(inner: list[fx.Node], nodes: list[fx.Node]) -> None:
    """Raise ``Miss`` if a value that the op does not return has another reader."""
    for node in inner:
        if reason := read_elsewhere(node, nodes):
            raise Miss(reason)


def _name(node: Any) -> str:
    return node.name if isinstance(node, fx.Node) else repr(node)


FUSE_MOE = SitePass("fuse_moe", EXACT, _read)
