"""``cleanup`` drops what computes nothing, or what is there already.

Before: ``x.view(x.shape)``, ``x.to(x.dtype)``, ``x.contiguous()`` of a contiguous tensor;
``x.float().to(x.dtype)``; copies of what nobody writes to; a call with the arguments of an earlier
one; sizes read back from tensors; values nobody uses.  After: ``x`` itself, the earlier result, the
size's graph input, nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Set
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from .report import PassReport
from .rule import EXACT, Context, memory, refresh_view, writes, written
from .subgraph import fake_value, layout

_VIEWS = {
    *("view", "reshape", "flatten", "expand", "view_as", "reshape_as", "expand_as", "squeeze"),
    *("unsqueeze", "transpose", "permute", "t", "chunk", "split", "detach", "narrow", "unflatten"),
    *(torch.reshape, torch.flatten, torch.squeeze, torch.unsqueeze, torch.transpose),
    *(torch.permute, torch.chunk, torch.split, operator.getitem),
}
_CASTS = {"to", "float", "double", "half", "bfloat16", "type_as"}
_COPIES = {"contiguous", "clone", torch.clone}
_ARITHMETIC = {
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.matmul),
    *(torch.add, torch.sub, torch.mul, torch.div, torch.neg, torch.matmul, torch.rsqrt, torch.cat),
    *("add", "sub", "mul", "div", "neg", "matmul", "pow", "mean", "rsqrt", "sum", "sigmoid"),
    *(F.silu, F.gelu, F.linear, torch.sigmoid),
}
_NOOPS = _VIEWS | _CASTS | {"contiguous"}
_REPEATABLE = _VIEWS | _CASTS | _COPIES | _ARITHMETIC
_WIDER = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}
"""The wider dtypes that hold every value of a dtype."""


class Cleanup:
    """Removes no-op reshapes, casts and copies, common subexpressions, reads of known sizes, and
    dead code.

    A write shows which tensors share memory.  So copies stay where memory is written to, as do
    equal expressions with a write between; and the graph returns the same tensors as before, since
    its caller may write to them.
    """

    tier = EXACT

    def __init__(self, name: str = "cleanup") -> None:
        self.name = name

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        report = PassReport(self.name)
        sizes, owned, table = _size_inputs(gm), _owned(gm), _Expressions()
        replaced = False
        for node in list(gm.graph.nodes):
            if replaced:
                refresh_view(node)
            replacement = (
                _noop_input(node)
                or _known_size(node, sizes)
                or _copied_input(node, owned)
                or table.earlier(node, owned)
            )
            if replacement is not None:
                node.replace_all_uses_with(replacement)
                gm.graph.erase_node(node)
                report.match(node.name)
                replaced = True
        before = {node.name for node in gm.graph.nodes}
        gm.graph.eliminate_dead_code(writes)
        for name in sorted(before - {node.name for node in gm.graph.nodes}):
            report.match(name)
        return report


def _size_inputs(gm: fx.GraphModule) -> dict[str, fx.Node]:
    sizes: dict[str, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder" and isinstance(fake_value(node), torch.SymInt):
            sizes[str(fake_value(node))] = node
    return sizes


def _known_size(node: fx.Node, sizes: dict[str, fx.Node]) -> fx.Node | None:
    value: Any = node.meta.get("example_value")
    if node.op == "placeholder" or not isinstance(value, torch.SymInt):
        return None
    return sizes.get(str(value))


def _owned(gm: fx.GraphModule) -> set[int]:
    """Storages that are written to, or returned to a caller who may do so."""
    (output,) = gm.graph.find_nodes(op="output")
    owned = memory(*output.all_input_nodes)
    for node in gm.graph.nodes:
        if writes(node):
            owned |= memory(*written(node))
    return owned


def _noop_input(node: fx.Node) -> fx.Node | None:
    """The input that this node returns unchanged (same memory, shape, strides, dtype), if any."""
    if not _calls(node, _NOOPS):
        return None
    source: Any = node.args[0]
    before, after = fake_value(source), fake_value(node)
    if not _alike(before, after) or str(before.storage_offset()) != str(after.storage_offset()):
        return None
    return source if memory(node) == memory(source) else None


def _copied_input(node: fx.Node, owned: set[int]) -> fx.Node | None:
    """Return the node that this one copies, or casts back from a wider dtype; None if the two can
    be told apart."""
    if not _calls(node, _CASTS | _COPIES):
        return None
    source: Any = node.args[0]
    if not _alike(fake_value(source), fake_value(node)):
        wide = source
        if not _calls(node, _CASTS) or not _calls(wide, _CASTS):
            return None
        source = wide.args[0]
        if not _alike(fake_value(source), fake_value(node)) or not _widens(source, wide):
            return None
    return None if owned & (memory(node) | memory(source)) else source


def _calls(node: fx.Node, targets: Set[Any]) -> bool:
    """Whether the node calls one of these functions or methods on a node."""
    calls = node.op in ("call_function", "call_method") and node.target in targets
    return calls and bool(node.args) and isinstance(node.args[0], fx.Node)


def _widens(source: fx.Node, wide: fx.Node) -> bool:
    old, new = fake_value(source), fake_value(wide)
    return old.device == new.device and new.dtype in _WIDER.get(old.dtype, ())


def _alike(left: Any, right: Any) -> bool:
    """Whether these are tensors of one shape, stride, dtype and device."""
    return layout(left) is not None and layout(left) == layout(right)


def _repeatable(target: Any) -> bool:
    """Whether equal arguments give equal results."""
    if isinstance(target, torch._ops.OpOverload) and target.namespace in ("fw", "aten"):
        return torch.Tag.nondeterministic_seeded not in target.tags
    return target in _REPEATABLE


class _Expressions:
    """The calls seen so far, by what they compute."""

    def __init__(self) -> None:
        self.seen: dict[Any, tuple[fx.Node, int]] = {}
        self.written: dict[int, int] = {}  # storage -> the place of the last write to it
        self.place = 0

    def earlier(self, node: fx.Node, owned: set[int]) -> fx.Node | None:
        """The earlier call that gave what this one gives."""
        self.place += 1
        if writes(node):
            self.written |= dict.fromkeys(memory(*written(node)), self.place)
            return None
        if not node.op.startswith("call_") or not _repeatable(node.target):
            return None
        key = (node.op, node.target, _key(node.args), _key(node.kwargs))
        first, place = self.seen.setdefault(key, (node, self.place))
        if first is node:
            return None
        read = memory(*node.all_input_nodes)
        if any(self.written.get(storage, 0) > place for storage in read):
            self.seen[key] = (node, self.place)
            return None
        made = (memory(node) | memory(first)) - read  # views share what they are made of
        return None if made & owned else first


def _key(arg: Any) -> Any:
    if isinstance(arg, (list, tuple)):
        return tuple(_key(item) for item in arg)
    if isinstance(arg, dict):
        return tuple((name, _key(item)) for name, item in sorted(arg.items()))
    if isinstance(arg, slice):
        return "slice", _key(arg.start), _key(arg.stop), _key(arg.step)
    return type(arg), arg if isinstance(arg, fx.Node) else repr(arg)
