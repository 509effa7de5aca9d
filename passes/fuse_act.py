"""``fuse_act`` raises the gated activation, however it is spelled, to one op and one kernel.

Before: ``gate, up = gate_up.chunk(2, -1); y = silu(gate) * up`` (or tanh-GELU), the halves by split
or slices or from two products, SiLU also as ``x * sigmoid(x)``, in the tensors' dtype or float32.
After: ``y = silu_mul(gate_up)`` or ``silu_mul(gate, up)`` (``gelu_tanh_mul``).  This saves a write
and a read of the gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .canonicalize import (
    check_dense,
    check_rounding,
    columns,
    computed_dtype,
    in_order,
    is_same,
    kind,
    only_user,
    other_operand,
    roundings,
    same_shape,
    tensor,
    widened,
    with_number,
)
from .cuts import part_nodes
from .report import PassReport
from .rule import Context, Tier, writes_shared
from .sites import Miss, NotASite
from .spellings_act import clamped_gate, read_clamped


@dataclass(frozen=True)
class _Act:
    """An activation in a graph; ``op`` computes its product with another tensor.  ``gates`` are all
    nodes that are read as the gate: the same values, though perhaps two casts."""

    op: Any
    node: fx.Node
    gates: tuple[Any, ...]
    inner: tuple[fx.Node, ...] = ()

    @property
    def gate(self) -> Any:
        return self.gates[0]


class FuseAct:
    """Expected sites: every SiLU or tanh-GELU that is multiplied by a tensor, and every gate that
    ``spellings_act`` reads.  An activation that feeds a linear layer or a convolution is none.

    Tolerant: unfused, the activation is rounded to the tensors' dtype before the product, and once
    more in ``x * sigmoid(x)``; fused, only the product is rounded.
    """

    name = "fuse_act"
    tier = Tier(atol=1e-6, rtol=2.0**-6)

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        report = PassReport(self.name)
        for node in list(gm.graph.nodes):
            act, glu = _activation(node), clamped_gate(node)
            if glu is not None and self._fuse_clamped(node, glu, context, report, last=act is None):
                continue
            if act is None:
                continue
            name = act.node.name
            try:
                args, old, result = _read(act)
            except NotASite:
                continue
            except Miss as miss:
                report.miss(name, str(miss))
                continue

            def build(graph: fx.Graph, op: Any = act.op, args: Any = args) -> list[fx.Node]:
                return [graph.call_function(op, args)]

            tier = roundings(tensor(result).dtype, 2 + 2 * len(act.inner))
            context.replace(self, result, old=old, outputs=[result], build=build, tier=tier)
            report.match(name)
        return report

    def _fuse_clamped(
        self, logistic: fx.Node, glu: fx.Node, context: Context, report: PassReport, *, last: bool
    ) -> bool:
        """Fuse the site if it is a clamped gate; returns whether it is done with.  A miss is
        reported if this is the last way to read the site."""
        name = glu.name
        try:
            found = read_clamped(logistic, glu)
        except Miss as miss:
            if last:
                report.miss(name, str(miss))
            return last

        def build(graph: fx.Graph) -> list[fx.Node]:
            return [graph.call_function(torch.ops.fw.silu_mul.default, found.args)]

        outputs, site = [found.result], found.result
        context.replace(self, site, old=found.nodes, outputs=outputs, build=build, tier=found.tier)
        report.match(name)
        return True


def _activation(node: fx.Node) -> _Act | None:
    if kind(node) == "silu":
        return _Act(torch.ops.fw.silu_mul.default, node, (node.args[0],))
    if kind(node) == "gelu" and node.kwargs.get("approximate") == "tanh":
        return _Act(torch.ops.fw.gelu_tanh_mul.default, node, (node.args[0],))
    if kind(node) == "sigmoid":
        for user in node.users:
            same = tuple(a for a in user.args if is_same(a, node.args[0]))
            if kind(user) == "mul" and same:
                gates = (node.args[0], *same)
                return _Act(torch.ops.fw.silu_mul.default, user, gates, (node,))
    return None


def _is_gated(activation: fx.Node) -> bool:
    """Whether a product with a tensor reads the activation, also behind casts, views and numbers
    that scale it."""
    same = [activation]
    for node in same:
        for user in node.users:
            if kind(user) == "mul" and with_number(user)[1] is None:
                return True
            if kind(user) in ("cast", "view", "clone", "mul"):
                same.append(user)
    return False


def _read(act: _Act) -> tuple[tuple[Any, ...], list[fx.Node], fx.Node]:
    """Read a site as (arguments of the op, matched nodes, the node that has the result)."""
    if not _is_gated(act.node):
        raise NotASite(f"{act.node.name} gates nothing")
    for node in act.inner:
        only_user(node)
    if len(act.node.users) != 1:
        raise Miss(f"the activation has {len(act.node.users)} users, not one product")
    gate = widened(act.gate)
    nodes: list[Any] = [*act.inner, act.node]
    nodes += [cast for cast in act.gates if cast is not gate]
    dtype, factor, mul = computed_dtype(gate), act.node, only_user(act.node)
    if kind(mul) == "cast" and len(mul.users) == 1:
        nodes.append(mul)
        factor, mul = mul, only_user(mul)
    if kind(mul) != "mul" or len(mul.args) != 2:
        raise Miss(f"the activation feeds {mul.name}, not a product")
    check_rounding([*act.inner, act.node, factor], dtype)
    wide = other_operand(mul, factor)
    up = wide if tensor(wide).dtype == dtype else widened(wide)
    nodes += [mul, wide if up is not wide else None]
    if writes_shared(mul):
        raise Miss(f"{mul.name} overwrites memory that others may read")
    result = mul
    if tensor(mul).dtype != dtype:
        result = only_user(mul)
        if kind(result) != "cast" or tensor(result).dtype != dtype:
            raise Miss(f"the product is {tensor(mul).dtype}, the gate {dtype}")
        nodes.append(result)
    if tensor(up).dtype != dtype or not same_shape(tensor(gate), tensor(up)):
        raise Miss(f"gate and up differ: {_describe(gate)}, {_describe(up)}")
    check_dense(result)
    halves = _halves(gate, up)
    if halves is None:
        return (gate, up), in_order(nodes), result
    source, views = halves
    return (source,), in_order([*nodes, *views]), result


def _halves(gate: fx.Node, up: fx.Node) -> tuple[fx.Node, list[Any]] | None:
    """(the packed tensor, the nodes that cut it) if gate and up are its halves, else None."""
    first, second = columns(gate), columns(up)
    if first is None or second is None or first[0] is not second[0]:
        return None
    source, middle = first[0], first[2]
    if first[1] != 0 or second[1:] != (middle, 2 * middle):
        return None
    if tensor(source).shape[-1] != 2 * middle or tensor(source).dim() != tensor(gate).dim():
        return None
    return source, [*part_nodes(gate), *part_nodes(up)]


def _describe(node: fx.Node) -> str:
    return f"{tensor(node).dtype}{list(tensor(node).shape)}"
