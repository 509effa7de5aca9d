"""Reads activations in the spellings that need more than one node: clamped gates and plain ones.

gpt-oss's gated activation is clamped, scaled and offset:
``gate.clamp(max=limit)``, ``up.clamp(-limit, limit)``;
``(up + offset) * (gate * sigmoid(alpha * gate))``, in any order of factors, with or without alpha
and offset.  Gate and up are halves of one tensor, its pairs of neighbours, or two tensors.

What gates nothing is ReLU, its square, and GELU, also as GPT-2 spells it:
``0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..ops.core.gate import Gate
from .canonicalize import (
    argument,
    check_dense,
    computed_dtype,
    in_order,
    kind,
    only_user,
    other_operand,
    roundings,
    same_shape,
    squared_source,
    tensor,
    with_number,
)
from .cuts import cut, part_nodes
from .rule import EXACT, Tier, writes_shared
from .sites import Miss

_ROUNDINGS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class Gated:
    """One site: the ``args`` of ``silu_mul``, the matched nodes, and the node with the result."""

    args: tuple[Any, ...]
    nodes: list[fx.Node]
    result: fx.Node
    tier: Tier


def clamped_gate(node: fx.Node) -> fx.Node | None:
    """The product ``gate * sigmoid(alpha * gate)`` of a clamped gate, if ``node`` is the logistic
    function in it; else None."""
    if kind(node) != "sigmoid":
        return None
    scaled = node.args[0]
    gate = with_number(scaled)[0] if kind(scaled) == "mul" else scaled  # type: ignore[arg-type]
    products = [user for user in node.users if kind(user) == "mul" and gate in user.args]
    return products[0] if products and kind(gate) == "clamp" else None


def read_clamped(logistic: fx.Node, glu: fx.Node) -> Gated:
    """Read the site; raises ``Miss`` if the op computes something else."""
    scaled, alpha = logistic.args[0], 1.0
    gate: Any = other_operand(glu, logistic)
    nodes: list[Any] = [logistic, glu, only_user(logistic)]
    if gate is not scaled:
        number = with_number(scaled)[1]  # type: ignore[arg-type]
        if number is None:
            raise Miss(f"{scaled} scales the gate by a tensor")
        nodes.append(scaled)
        alpha = number
    if len(glu.users) != 1:
        raise Miss(f"the activation has {len(glu.users)} users, not one product")
    result = only_user(glu)
    if kind(result) != "mul":
        raise Miss(f"the activation feeds {result.name}, not a product")
    up: Any = other_operand(result, glu)
    offset: float | None = 0.0
    if kind(up) == "add" and with_number(up)[1] is not None:
        nodes.append(up)
        up, offset = with_number(up)
    limits = [_limits(one, nodes) for one in (gate, up)]
    gate, up = (one.args[0] if kind(one) == "clamp" else one for one in (gate, up))
    limit = limits[0][1]
    expected = (None, None) if limit is None else (-limit, limit)
    if limits[0][0] is not None or limits[1] != expected or (limit is not None and limit <= 0):
        raise Miss(f"the gate is clamped to {limits[0]}, up to {limits[1]}: no limit of both")
    for node in (*nodes, result):
        if isinstance(node, fx.Node) and writes_shared(node):
            raise Miss(f"{node.name} overwrites memory that others may read")
    computed_dtype(gate)
    _check_dtypes([gate, up, *nodes, result])
    check_dense(result)
    args = _packed(gate, up, Gate(alpha, limit, offset or 0.0), nodes)
    return Gated(args, in_order([*nodes, result]), result, _tier(tensor(result).dtype))


def _limits(node: Any, nodes: list[Any]) -> tuple[Any, Any]:
    """The least and the greatest value of a clamped tensor; (None, None) for any other."""
    if kind(node) != "clamp":
        return None, None
    nodes.append(node)
    bounds = argument(node, 1, "min"), argument(node, 2, "max")
    if any(not isinstance(bound, (int, float, type(None))) for bound in bounds):
        raise Miss(f"{node.name} is clamped by a tensor")
    return bounds


def _check_dtypes(nodes: list[Any]) -> None:
    """Refuse a mixture of dtypes: every step is rounded to one dtype, in the op only the last."""
    dtypes = {tensor(node).dtype for node in nodes}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise Miss(f"it is computed in {names}: expected one dtype")


def _packed(gate: Any, up: Any, how: Gate, nodes: list[Any]) -> tuple[Any, ...]:
    """The op's arguments: one tensor of gate and up if there is one, else both."""
    if not same_shape(tensor(gate), tensor(up)):
        raise Miss(f"gate is {[*tensor(gate).shape]}, up {[*tensor(up).shape]}")
    attributes = (how.alpha, how.limit, how.up_offset)
    found = cut(gate, up)
    if found is None or tensor(found.source).dim() != tensor(gate).dim():
        return (gate, up, *attributes)
    nodes += [*part_nodes(gate), *part_nodes(up)]
    interleaved = (True,) if found.layout == "pairs" else ()
    return (found.source, None, *attributes, *interleaved)


def _tier(dtype: torch.dtype) -> Tier:
    """The tier of six roundings.  The rounding of ``alpha * gate`` moves the logistic function of a
    large gate by more, but that is then next to 0, or next to 1, where the row's largest values
    count."""
    step = _ROUNDINGS.get(dtype)
    return Tier(1e-6, 2.0**-18) if step is None else Tier(1e-6, 6 * step, 4 * step)


@dataclass(frozen=True)
class Plain:
    """An activation ``name`` of ``PLAIN_ACTS``: its input, the nodes that compute it, and how far
    one rounding may move it."""

    name: str
    x: Any
    nodes: list[fx.Node]
    tier: Tier


def plain_activation(node: fx.Node) -> Plain | None:
    """The activation whose result ``node`` is, if it is one of those that gate nothing."""
    if kind(node) == "relu":
        is_part = any(squared_source(user) is node for user in node.users)
        return None if is_part else Plain("relu", argument(node, 0, "input"), [node], EXACT)
    if kind(base := squared_source(node)) == "relu" and len(base.users) == 1:
        return Plain("relu2", argument(base, 0, "input"), [base, node], EXACT)
    if kind(node) == "gelu":
        name = "gelu_new" if node.kwargs.get("approximate") == "tanh" else "gelu"
        return Plain(name, node.args[0], [node], roundings(tensor(node).dtype, 2))
    return _read_gelu_new(node)


def _read_gelu_new(node: fx.Node) -> Plain | None:
    if kind(node) != "mul" or with_number(node)[1] is not None:
        return None
    for half, rest in (node.args[:2], node.args[1::-1]):
        x = _times(half, "mul", 0.5)
        tanh = _times(rest, "add", 1.0)
        scaled = tanh.args[0] if kind(tanh) == "tanh" else None
        inner = _times(scaled, "mul", math.sqrt(2 / math.pi))
        if x is None or kind(inner) != "add" or x not in inner.args:
            continue
        cubic = other_operand(inner, x)
        cube = _times(cubic, "mul", 0.044715)
        if _times(cube, "pow", 3.0) is x:
            nodes = [half, cube, cubic, inner, scaled, tanh, rest, node]
            step = _ROUNDINGS.get(tensor(node).dtype, 2.0**-20)
            return Plain("gelu_new", x, nodes, Tier(1e-6, 8 * step, 8 * step))
    return None


def _times(node: Any, name: str, number: float) -> Any:
    """x of an operation with a number, such as ``x * 0.5``; None of all else."""
    if kind(node) != name:
        return None
    x, found = with_number(node)
    return x if found is not None and math.isclose(found, number, rel_tol=1e-6) else None
