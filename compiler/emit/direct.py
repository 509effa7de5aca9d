"""Prints a piece as Python, one line a node, where there is nothing to fuse.

Such a piece has only opaque kernels, library GEMMs, views, size arithmetic and uninitialized
memory.  A compiler would call them in turn; so does this code, without a compiler.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ... import ops
from ...passes import Subgraph, fake_value
from .piece_code import EmitError, PieceCode, describe, module_docstring, op_name, placeholders


def is_library_call(node: fx.Node) -> bool:
    """Whether an inline implementation is one library call, from which a compiler alone gains
    nothing: a linear layer without more than a bias."""
    attached = (*node.args[3:], *node.kwargs.values())
    return op_name(node) == "fw_native::linear" and all(arg is None for arg in attached)


_VIEWS = frozenset(
    [
        "chunk",
        "expand",
        "flatten",
        "movedim",
        "narrow",
        "permute",
        "reshape",
        "select",
        "split",
        "squeeze",
        "swapaxes",
        "t",
        "transpose",
        "unbind",
        "unflatten",
        "unsqueeze",
        "view",
        "view_as",
    ]
)
_ALLOCATIONS = frozenset(["empty", "empty_like", "empty_strided", "new_empty"])
_SIZES = frozenset(["dim", "numel", "size", "stride"])

_OPERATORS: dict[Any, str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
}


def fusable(piece: Subgraph) -> list[str]:
    """Names of a piece's ops that a compiler may fuse; if there are none, it can be printed."""
    nodes = [n for n in piece.module.graph.nodes if n.op not in ("placeholder", "output")]
    return [op_name(node) for node in nodes if not is_plain(node)]


def is_plain(node: fx.Node) -> bool:
    """Whether a lowered node is one call in which there is nothing to fuse."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return is_library_call(node) or _is_opaque(target.name())
    if target is operator.getitem:
        return _is_item(node)
    if target in _OPERATORS:
        return not isinstance(fake_value(node), Tensor)
    if node.op == "call_function" and target is getattr:
        return node.args[1] in ("shape", "ndim")
    name = op_name(node)
    if node.op == "call_function" and getattr(torch, name, None) is not target:
        return False
    if name in _VIEWS:
        return _is_view(node)
    return name in _ALLOCATIONS or (name in _SIZES and node.op == "call_method")


def is_spelled(node: fx.Node) -> bool:
    """Whether a node's call can be printed: an op, a method, an operator or a function of torch."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) or node.op == "call_method":
        return True
    known = target in _OPERATORS or target is operator.getitem
    return known or getattr(torch, op_name(node), None) is target or target is operator.neg


def _is_opaque(qualified: str) -> bool:
    namespace, _, name = qualified.partition("::")
    name = name.partition(".")[0]
    prefix = f"{ops.NAMESPACE}_"
    if not namespace.startswith(prefix) or name not in ops.BY_NAME:
        return False
    return not ops.BY_NAME[name].implementation(namespace.removeprefix(prefix)).inline


def _is_item(node: fx.Node) -> bool:
    """Whether a node is an item of a tuple, or a slice of a tensor and not a gather by a tensor."""
    return not isinstance(fake_value(node.all_input_nodes[0]), Tensor) or _is_view(node)


def _is_view(node: fx.Node) -> bool:
    """Whether the results share memory with the first argument; a reshape may be a copy."""
    source = fake_value(node.all_input_nodes[0])
    results = fake_value(node)
    if not isinstance(source, Tensor):
        return False
    for result in results if isinstance(results, (list, tuple)) else [results]:
        if not isinstance(result, Tensor) or _storage(result) != _storage(source):
            return False
    return True


def _storage(fake: Tensor) -> int:
    return int(fake.untyped_storage()._cdata)


def emit_direct(piece: Subgraph, dims: Mapping[str, str]) -> PieceCode:
    """Print ``piece``, for which ``fusable()`` is empty.

    Args:
        dims: name of each size symbol, for names and comments.

    Raises:
        EmitError: an argument has no spelling.
    """
    names = _names(piece, dims)
    dead = _dead_after(piece)
    body: list[str] = []
    for node in piece.module.graph.nodes:
        if node.op == "output":
            returned: Any = node.args[0]
            body.append(f"return [{', '.join(names[value] for value in returned)}]")
        elif node.op != "placeholder" and _unpacked(node) is None:
            body.append(_line(node, names, dims))
            unused = [names[value] for value in dead.get(node, ())]
            unused += ["_"] if any(_is_unused(users) for users in _items(node)) else []
            body += [f"del {', '.join(unused)}"] if unused else []
    inputs = placeholders(piece)
    sizes = [names[n] for n in inputs if isinstance(fake_value(n), torch.SymInt)]
    how = "Every op is one call: there was nothing to fuse, and nothing was compiled."
    parameters = "".join(f"    {names[n]},{_comment([n], dims)}\n" for n in inputs)
    source = (
        f"{module_docstring(piece, how, sizes)}\nimport torch\n\n\n"
        f"def call(\n{parameters}):\n" + "".join(f"    {line}\n" for line in body)
    )
    return PieceCode(source, "direct")


def _names(piece: Subgraph, dims: Mapping[str, str]) -> dict[fx.Node, str]:
    """The name of each node in the code: its own, but a size is called by what it counts."""
    taken = {node.name for node in piece.module.graph.nodes}
    names = {node: node.name for node in piece.module.graph.nodes}
    for node in placeholders(piece):
        name = dims.get(str(fake_value(node)), node.name)
        if isinstance(fake_value(node), torch.SymInt) and name not in taken:
            names[node] = name
    return names


def _unpacked(node: fx.Node) -> fx.Node | None:
    """The tuple that a node is an item of, if that tuple is unpacked where it is made."""
    if node.target is not operator.getitem:
        return None
    source = node.all_input_nodes[0]
    return source if _items(source) else None


def _items(node: fx.Node) -> list[list[fx.Node]]:
    """For each item of a tuple, the nodes that take it, at most one; empty if any has several, or
    the tuple has other users."""
    value = fake_value(node)
    if node.op == "placeholder" or not isinstance(value, (list, tuple)):
        return []
    items: list[list[fx.Node]] = [[] for _ in value]
    for user in node.users:
        index = user.args[1] if user.target is operator.getitem else None
        if not isinstance(index, int):
            return []
        items[index].append(user)
    return items if all(len(users) <= 1 for users in items) else []


def _is_unused(users: list[fx.Node]) -> bool:
    return not users or not users[0].users


def _dead_after(piece: Subgraph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the named values that no later node reads."""
    last: dict[fx.Node, fx.Node] = {}
    for node in piece.module.graph.nodes:
        if (source := _unpacked(node)) is None:
            last |= dict.fromkeys((node, *node.all_input_nodes), node)
        elif node.users:
            last[node] = source  # where it is made; its users come later
    dead: dict[fx.Node, list[fx.Node]] = {}
    for value, node in last.items():
        has_name = value.op != "placeholder" and fake_value(value) is not None
        if has_name and not _items(value):
            dead.setdefault(node, []).append(value)
    return dead


def _comment(values: list[fx.Node], dims: Mapping[str, str]) -> str:
    tensors = [fake_value(n) for n in values if isinstance(fake_value(n), (Tensor, tuple, list))]
    return f"  # {'; '.join(describe(t, dims) for t in tensors)}" if tensors else ""


def _line(node: fx.Node, names: Mapping[fx.Node, str], dims: Mapping[str, str]) -> str:
    call = _call(node, lambda value: _spell(value, names))
    if fake_value(node) is None:
        return call
    if items := _items(node):
        targets = ["_" if _is_unused(users) else names[users[0]] for users in items]
        used = [users[0] for users in items if not _is_unused(users)]
        return f"{', '.join(targets)} = {call}{_comment(used, dims)}"
    return f"{names[node]} = {call}{_comment([node], dims)}"


def _call(node: fx.Node, spell: Callable[[Any], str]) -> str:
    target = node.target
    if target is operator.getitem:
        return f"{spell(node.args[0])}[{_index(node.args[1], spell)}]"
    if target is getattr:
        return f"{spell(node.args[0])}.{node.args[1]}"
    args = [spell(a) for a in node.args]
    if target in _OPERATORS:
        return f"{args[0]} {_OPERATORS[target]} {args[1]}"
    receiver = f"torch.{op_name(node)}"
    if isinstance(target, torch._ops.OpOverload):
        receiver = f"torch.ops.{target}"
    elif node.op == "call_method":
        receiver = f"{args.pop(0)}.{target}"
    keywords = [f"{k}={spell(v)}" for k, v in node.kwargs.items()]
    return f"{receiver}({', '.join([*args, *keywords])})"


def _index(index: Any, spell: Callable[[Any], str]) -> str:
    if isinstance(index, tuple):
        return ", ".join(_index(part, spell) for part in index)
    if not isinstance(index, slice):
        return spell(index)
    start, stop = ("" if v is None else spell(v) for v in (index.start, index.stop))
    return f"{start}:{stop}" + ("" if index.step is None else f":{spell(index.step)}")


def _spell(value: Any, names: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        items = [_spell(v, names) for v in value]
        if isinstance(value, list):
            return f"[{', '.join(items)}]"
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if isinstance(value, torch.device):
        return f'torch.device("{value.type}")'
    if isinstance(value, float) and not -torch.inf < value < torch.inf:
        return f'float("{value}")'
    known = (bool, int, float, str, torch.dtype, torch.layout, torch.memory_format)
    if value is None or isinstance(value, known):
        return repr(value)
    if value is ...:
        return "..."
    raise EmitError(f"argument {value!r} of type {type(value).__name__} has no spelling in code")
