"""``fuse_act``: the gated activation in one kernel.

Before: ``gate, up = gate_up.chunk(2, -1); y = silu(gate) * up`` (or tanh-GELU).
After: ``y = silu_mul(gate_up)`` (``gelu_tanh_mul``).  Saves a write and a read of the gate.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .report import PassReport
from .rule import Context, Tier, is_call, writes_shared
from .subgraph import fake_value

_MULS = (operator.mul, operator.imul, torch.mul, "mul", torch.ops.aten.mul.Tensor)
_CHUNKS = ("chunk", torch.chunk)


class FuseAct:
    """Expected sites: every SiLU or tanh-GELU.

    Tolerant: unfused, the activation is rounded to the tensors' dtype before the product; fused,
    only the product is (one rounding of a 16-bit type: 2^-8).
    """

    name = "fuse_act"
    tier = Tier(atol=1e-5, rtol=2.0**-7)

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        report = PassReport(self.name)
        for act in list(gm.graph.nodes):
            op = _fused_op(act)
            if op is None:
                continue
            mul, chunk, reason = _match(act)
            if mul is None or chunk is None:
                report.miss(act.name, reason)
                continue
            source = chunk.args[0]
            gate, up = act.args[0], next(a for a in mul.args if a is not act)
            old = [n for n in act.graph.nodes if n in (chunk, gate, up, act, mul)]
            name = act.name

            def build(graph: fx.Graph, op: Any = op, source: Any = source) -> list[fx.Node]:
                return [graph.call_function(op, (source,))]

            context.replace(self, mul, old=old, outputs=[mul], build=build)
            report.match(name)
        return report


def _fused_op(node: fx.Node) -> Any:
    if is_call(node, F.silu, torch.ops.aten.silu.default):
        return torch.ops.fw.silu_mul.default
    if is_call(node, F.gelu, torch._C._nn.gelu) and node.kwargs.get("approximate") == "tanh":
        return torch.ops.fw.gelu_tanh_mul.default
    return None


def _match(act: fx.Node) -> tuple[Any, Any, str]:
    """(mul, chunk, "") when ``act`` is the gate of a gated activation, else without nodes."""
    if len(act.users) != 1:
        return None, None, f"the activation has {len(act.users)} users, not one product"
    mul = next(iter(act.users))
    if not is_call(mul, *_MULS) or len(mul.args) != 2:
        return None, None, f"the activation feeds {mul.name}, not a product"
    if writes_shared(mul):
        return None, None, f"{mul.name} overwrites memory that others may read"
    gate: Any = act.args[0]
    up: Any = mul.args[1] if mul.args[0] is act else mul.args[0]
    for half, index in ((gate, 0), (up, 1)):
        if not is_call(half, operator.getitem) or half.args[1] != index:
            return None, None, "gate and up are not the two halves of one tensor"
    chunk: Any = gate.args[0]
    if chunk is not up.args[0] or not is_call(chunk, *_CHUNKS):
        return None, None, "gate and up are not the two halves of one tensor"
    halved: Any = chunk.args[0]
    source: Tensor = fake_value(halved)
    parts = chunk.args[1] if len(chunk.args) > 1 else chunk.kwargs.get("chunks")
    dim = chunk.args[2] if len(chunk.args) > 2 else chunk.kwargs.get("dim", 0)
    if parts != 2 or dim not in (-1, source.dim() - 1):
        return None, None, f"chunk({parts}, dim={dim}) does not halve the last dimension"
    if source.shape[-1] % 2:
        return None, None, f"odd last dimension {source.shape[-1]}"
    return mul, chunk, ""
