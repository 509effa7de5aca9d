"""Defines what an emitter makes of one piece, and how generated code names its values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ...passes import Subgraph, fake_value


class EmitError(RuntimeError):
    """A piece cannot be turned into code that stands alone."""


@dataclass(frozen=True)
class PieceCode:
    """Generated code of one piece.

    Attributes:
        source: a Python module that defines ``call(*inputs)``, which returns the outputs.
        emitter: "direct" or "inductor".
        files: name -> content of what lies beside it: kernels that it loads (.so, .cubin), and
            the sources that those were compiled from, for people.
    """

    source: str
    emitter: str
    files: Mapping[str, bytes] = field(default_factory=dict)


def describe(value: Any, dims: Mapping[str, str]) -> str:
    """``bfloat16[num_tokens, 256]``; a size by its name; "" for what is neither.

    Args:
        value: a fake tensor, a symbolic size or a tuple of them.
        dims: name of each size symbol; one without a name stays a symbol.
    """
    if isinstance(value, Tensor):
        shape = ", ".join(describe(d, dims) for d in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}[{shape}]"
    if isinstance(value, torch.SymInt):
        expression = value.node.expr
        if expression.is_Symbol:
            return dims.get(str(expression), str(expression))
        return str(expression.subs({s: dims.get(str(s), s) for s in expression.free_symbols}))
    if isinstance(value, (list, tuple)):
        return ", ".join(describe(v, dims) for v in value)
    return str(value) if isinstance(value, int) else ""


def op_name(node: fx.Node) -> str:
    """``fw_native::linear`` for a dispatcher op, else the name of the function or method."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.name())
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def module_docstring(piece: Subgraph, how: str, sizes: Iterable[str]) -> str:
    """The docstring of a piece's generated module, which says what the piece is."""
    nodes = (n for n in piece.module.graph.nodes if n.op in ("call_function", "call_method"))
    counts = Counter(op_name(n) for n in nodes)
    ops = ", ".join(f"{name} x {n}" if n > 1 else name for name, n in counts.items())
    named = ", ".join(sizes) or "none"
    return f'"""One piece of a model. {how}\n\nOps: {ops}.\nSize inputs: {named}.\n"""\n'


def placeholders(piece: Subgraph) -> list[fx.Node]:
    return list(piece.module.graph.find_nodes(op="placeholder"))


def output_values(piece: Subgraph) -> list[Any]:
    (output,) = piece.module.graph.find_nodes(op="output")
    returned: Any = output.args[0]
    return [fake_value(node) for node in returned]
