"""``canonicalize_norm`` raises RMSNorm and layer normalization, however they are spelled.

Before: ``x.float() * rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)``, cast and multiplied by
a weight, in any order of operands, with ``x * x`` or ``square``, ``sqrt`` and division or
``reciprocal``, the weight before or after the cast, or 1 + the weight; or no weight at all.
After: ``rms_norm(x, weight, eps[, weight_offset])``.  If x is what differs from a mean,
``x - x.mean(-1, keepdim=True)``, or in place of ``F.layer_norm``: ``layer_norm(x, weight, eps[,
bias])``.  A norm without a weight is given one of ones, which changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from .canonicalize import (
    HALF_STEPS,
    argument,
    check_dense,
    computed_dtype,
    dims_of,
    in_order,
    is_centered_alike,
    is_dense,
    is_over_last,
    is_same,
    kind,
    only_user,
    other_operand,
    roundings,
    squared_source,
    tensor,
    uncentered,
    widened,
    with_number,
)
from .report import PassReport
from .rule import EXACT, Context, Tier, writes, writes_shared
from .sites import Miss, NotASite
from .subgraph import fake_value

_ROOTS, _SHIFTS, _SCALES = ("sqrt", "rsqrt", "pow"), ("add", "clamp"), ("mul", "div")
_MOST_STEPS = 3
"""Operations between the statistic and the root that a wrong spelling of a norm may have."""


@dataclass
class _Norm:
    """A norm as far as it has been read: ``x`` in its own dtype, the nodes that compute the norm,
    and whether they round as the op does.  ``weight`` None means that it has none.  ``centered``:
    it is a layer norm, which subtracts the mean."""

    x: fx.Node
    eps: float
    weight: Any = None
    weight_offset: float | None = None
    nodes: list[Any] = field(default_factory=list)
    exact: bool = True
    centered: bool = False
    bias: Any = None

    @property
    def dtype(self) -> torch.dtype:
        return tensor(self.x).dtype

    @property
    def tier(self) -> Tier:
        if not self.centered:
            return EXACT if self.exact else roundings(self.dtype, 4)
        return replace(roundings(self.dtype, 4), of_row=2.0**-18)


class CanonicalizeNorm:
    """Expected sites: every root of a mean of squares, every ``torch.rms_norm`` and every
    ``layer_norm``.  An L2 norm is none, as it divides by no width, nor is a norm of 16 bits without
    a weight that goes on in float32, which the op rounds.

    Exact if root and mean are computed as in the op, and nothing is centered.  Otherwise, as with a
    division by the square root, statistics differ in the last bit of float32, and both roundings
    may go another way.
    """

    name = "canonicalize_norm"
    tier = Tier(atol=1e-6, rtol=2.0**-6)

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        report = PassReport(self.name)
        for site, squared in _sites(gm):
            try:
                norm, result = _read(site, squared)
            except NotASite:
                continue
            except Miss as miss:
                report.miss(site.name, str(miss))
                continue
            swapped = not is_dense(tensor(result))
            context.replace(
                self,
                result,
                old=in_order([*norm.nodes, result]),
                outputs=[result],
                build=partial(_build, norm, swapped),
                tier=norm.tier,
            )
            report.match(site.name)
        return report


def _build(norm: _Norm, swapped: bool, graph: fx.Graph) -> list[fx.Node]:
    x, weight, call = norm.x, norm.weight, graph.call_function
    if weight is None:
        value = tensor(x)
        like: dict[str, Any] = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        weight = call(torch.ops.aten.ones.default, ([value.shape[-1]],), like)
    elif tensor(weight).dtype not in (norm.dtype, torch.float32):
        weight = call(torch.ops.aten._to_copy.default, (weight,), {"dtype": torch.float32})
    if swapped:
        x = call(torch.ops.aten.transpose.int, (x, -3, -2))
    how = norm.bias if norm.centered else norm.weight_offset
    op = torch.ops.fw.layer_norm if norm.centered else torch.ops.fw.rms_norm
    normed = call(op.default, (x, weight, norm.eps, *(() if how is None else (how,))))
    return [call(torch.ops.aten.transpose.int, (normed, -3, -2)) if swapped else normed]


def _sites(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, Any]]:
    """(mean or sum, the tensor that is squared), or (a call of a norm, None), read when its turn
    comes: x may be the result of a norm that has been replaced."""
    for node in list(gm.graph.nodes):
        if kind(node) in ("rms_norm", "layer_norm"):
            yield node, None
        elif (
            kind(node) in ("mean", "sum") and (squared := squared_source(node.args[0])) is not None
        ):
            yield node, squared


def is_eps(number: fx.Node, user: fx.Node) -> bool:
    """Whether ``user`` is a norm that reads ``number`` as its eps, or adds it to a mean that one
    takes the root of."""
    if kind(user) in ("rms_norm", "layer_norm"):
        return argument(user, 3 + (kind(user) == "layer_norm"), "eps") is number
    operands = [argument(user, 0, "input"), argument(user, 1, "other")]
    if kind(user) != "add" or number not in operands or argument(user, 2, "alpha", 1) != 1:
        return False
    mean = other_operand(user, number)
    if kind(mean) in ("div", "mul"):
        mean = argument(mean, 0, "input")
    return kind(mean) in ("mean", "sum") and squared_source(argument(mean, 0, "input")) is not None


def _equal_operands(squares: fx.Node) -> list[Any]:
    """Both operands of ``x * x``, which may be two nodes: two casts of one tensor."""
    return [*squares.args] if kind(squares) == "mul" else []


def _read(site: fx.Node, squared: Any) -> tuple[_Norm, fx.Node]:
    """Read the norm around ``site``; returns it and the node with its result."""
    if squared is None:
        return _read_call(site)
    norm, root = _read_statistics(site, squared)
    normed = _read_scaling(norm, root, squared)
    read = _read_weight if _is_weighted(normed) else _read_no_weight
    result = read(norm, normed)
    for node in in_order([*norm.nodes, result]):
        if writes_shared(node):
            raise Miss(f"{node.name} overwrites memory that others may read")
    _check_layout(result)
    return norm, result


def _check_layout(result: fx.Node) -> None:
    """Refuse a result that is neither dense, as the op's is, nor heads that follow one another
    within each token."""
    value = tensor(result)
    if value.dim() not in (3, 4) or not is_dense(value.transpose(-3, -2)):
        check_dense(result)


def _read_call(site: fx.Node) -> tuple[_Norm, fx.Node]:
    x, weight = argument(site, 0, "input"), argument(site, 2, "weight")
    shape, eps, bias = argument(site, 1, "normalized_shape"), argument(site, 3, "eps"), None
    centered = kind(site) == "layer_norm"
    if centered:
        bias, eps = argument(site, 3, "bias"), argument(site, 4, "eps", 1e-5)
    if not isinstance(eps, float):
        raise Miss("eps is left to torch")
    if len(shape) != 1:
        raise Miss(f"no weight of one dimension: normalized_shape {list(shape)}")
    norm = _Norm(x, eps, weight, None if weight is None else 0.0, [], False, centered, bias)
    if tensor(site).dtype != computed_dtype(x):
        raise Miss(f"the result is {tensor(site).dtype}, x is {norm.dtype}")
    if weight is None:
        _check_width(norm)
    for given in (weight, bias):
        if given is not None:
            _check_weight(norm, given, site)
    _check_layout(site)
    return norm, site


def _read_statistics(site: fx.Node, squared: Any) -> tuple[_Norm, fx.Node]:
    """Read ``mean(x^2) + eps``; returns the norm and the sum, whose root is taken next."""
    stats, source = tensor(site), tensor(squared)
    if not _is_root_taken(site):
        raise NotASite(f"{site.name} is no statistic of a norm: no root of its mean is taken")
    computed_dtype(squared)
    if not is_over_last(site):
        raise Miss(f"the mean is over dimensions {dims_of(site)}, expected the last alone, kept")
    if stats.dtype != torch.float32 or source.dtype != torch.float32:
        raise Miss(f"squares of {source.dtype} are averaged in {stats.dtype}, the op's in float32")
    squares: Any = site.args[0]
    mean, nodes = site, [squared, *_equal_operands(squares), squares, site]
    if kind(site) == "sum":
        mean, hidden = only_user(site), source.shape[-1]
        divisor = with_number(mean)[1] if kind(mean) in ("div", "mul") else None
        if divisor != (hidden if kind(mean) == "div" else 1 / hidden):
            raise Miss(f"the squares are summed and not divided by {hidden}")
        nodes.append(mean)
    shifted = only_user(mean)
    eps = with_number(shifted)[1] if kind(shifted) == "add" else None
    if eps is None:
        raise Miss(f"the mean feeds {shifted.name}, not a sum with a number, eps")
    wide, average = uncentered(squared)
    if wide is None:
        x, centered = widened(squared), False
    else:
        x, centered = widened(wide), True
        nodes += [average, wide]
    exact = kind(site) == "mean"
    return _Norm(x, eps, nodes=[*nodes, shifted], exact=exact, centered=centered), shifted


def _is_root_taken(site: fx.Node) -> bool:
    """Whether the root of a mean is taken, with or without eps.  A sum is one behind another
    operation, which may scale it; the root of a bare sum is that of an L2 norm."""
    behind = [site]
    if kind(site) == "sum":
        behind = [user for user in site.users if kind(user) not in (*_SHIFTS, *_ROOTS)]
    for _ in range(_MOST_STEPS):
        users = [user for node in behind for user in node.users]
        if any(kind(user) in _ROOTS for user in users):
            return True
        # One in place is a step too: the norm is missed for it.
        behind = [user for user in users if kind(user) in (*_SHIFTS, *_SCALES) or writes(user)]
    return False


def _is_weighted(normed: fx.Node) -> bool:
    """Whether the norm is multiplied by a tensor that all tokens share."""
    results = [normed]
    for result in results:
        for user in result.users:
            if kind(user) == "cast":
                results.append(user)
            elif kind(user) == "mul":
                weight = other_operand(user, result)
                value = fake_value(weight) if isinstance(weight, fx.Node) else None
                if isinstance(value, Tensor) and all(str(d) == "1" for d in value.shape[:-1]):
                    return True
    return False


def _read_no_weight(norm: _Norm, normed: fx.Node) -> fx.Node:
    """Read the cast back, if there is one."""
    _check_width(norm)
    users = [*normed.users]
    if norm.dtype != torch.float32:
        if len(users) != 1 or kind(users[0]) != "cast" or tensor(users[0]).dtype != norm.dtype:
            raise NotASite(f"{normed.name} is a norm without a weight that goes on in float32")
        norm.nodes.append(normed)
        return users[0]
    while len(users) == 1 and kind(users[0]) == "view":
        users = [*users[0].users]
    for user in users:
        if kind(user) == "cast" and tensor(user).dtype != torch.float32:
            # As Mamba2 norms groups of a gated product: Inductor computes it all in one kernel.
            raise Miss(f"{user.name} rounds it to {tensor(user).dtype}, x is float32")
    return normed


def _check_width(norm: _Norm) -> None:
    if not isinstance(tensor(norm.x).shape[-1], int):
        raise Miss("the width is dynamic, and the norm has no weight of that size")


def _read_scaling(norm: _Norm, shifted: fx.Node, squared: Any) -> fx.Node:
    """Read ``x * rsqrt(shifted)``, or another spelling of the inverse root."""
    scale, divides = only_user(shifted), False
    norm.nodes.append(scale)
    if kind(scale) == "sqrt":
        norm.exact, divides = False, True
    elif kind(scale) == "pow" and with_number(scale)[1] == -0.5:
        norm.exact = False
    elif kind(scale) != "rsqrt":
        raise Miss(f"{shifted.name} feeds {scale.name}, not a square root")
    normed = only_user(scale)
    while divides and kind(normed) == "reciprocal":
        norm.nodes.append(normed)
        scale, normed, divides = normed, only_user(normed), False
    if divides and kind(normed) == "div" and normed.args[0] == 1:
        norm.nodes.append(normed)
        scale, normed, divides = normed, only_user(normed), False
    while kind(normed) == "mul" and with_number(normed)[1] == 1:
        norm.nodes.append(normed)
        scale, normed = normed, only_user(normed)
    if kind(normed) != ("div" if divides else "mul") or (divides and normed.args[1] is not scale):
        raise Miss(f"{scale.name} feeds {normed.name}, which does not scale the tensor")
    scaled: Any = normed.args[0] if divides else other_operand(normed, scale)
    if not is_same(scaled, squared) and not (norm.centered and is_centered_alike(scaled, squared)):
        raise Miss(f"{normed.name} scales another tensor than the one that is squared")
    if tensor(normed).dtype != torch.float32:
        raise Miss(f"{normed.name} scales in {tensor(normed).dtype}, the op in float32")
    norm.nodes += [normed, scaled if scaled is not norm.x else None]
    norm.nodes = [node for node in norm.nodes if node is not norm.x]
    return normed


def _read_weight(norm: _Norm, normed: fx.Node) -> fx.Node:
    """Read the product with the weight and the cast back, before or after it."""
    dtype, product = norm.dtype, only_user(normed)
    rounded = normed
    if kind(product) == "cast":
        if tensor(product).dtype != dtype:
            raise Miss(f"{product.name} casts to {tensor(product).dtype}, x is {dtype}")
        norm.nodes.append(product)
        rounded, product = product, only_user(product)
    if kind(product) != "mul":
        raise Miss(f"{rounded.name} feeds {product.name}, not a product with a weight")
    weight = other_operand(product, rounded)
    if rounded is normed:
        weight = _read_offset(norm, weight)
    norm.weight = weight
    _check_weight(norm, weight, product)
    if rounded is normed and dtype != torch.float32:
        norm.nodes.append(product)
        product = only_user(product)
        if kind(product) != "cast":
            raise Miss(f"the product with the weight is not cast to {dtype}")
    if tensor(product).dtype != dtype:
        raise Miss(f"the result is {tensor(product).dtype}, x is {dtype}")
    return product


def _read_offset(norm: _Norm, weight: Any) -> Any:
    """The weight of a product in float32, without its cast and without the number added to it."""
    is_sum = kind(weight) == "add" and not norm.centered
    offset = with_number(weight)[1] if is_sum else None
    if offset is not None and tensor(weight).dtype == torch.float32:
        norm.nodes.append(weight)
        weight = with_number(weight)[0]
        norm.weight_offset = offset
    elif norm.dtype != torch.float32:
        norm.weight_offset = 0.0
    if widened(weight) is not weight and tensor(widened(weight)).dtype == norm.dtype:
        norm.nodes.append(weight)
        weight = widened(weight)
    return weight


def _check_weight(norm: _Norm, weight: Any, product: fx.Node) -> None:
    value: Tensor | None = fake_value(weight) if isinstance(weight, fx.Node) else None
    if not isinstance(value, Tensor):
        raise Miss(f"{product.name} multiplies by a number, not by a weight")
    hidden = tensor(norm.x).shape[-1]
    if value.dim() != 1 or value.shape[0] != hidden:
        raise Miss(f"the weight has shape {list(value.shape)}, expected [{hidden}]")
    if norm.dtype == torch.float32 and value.dtype in HALF_STEPS:
        return  # a product in float32, which holds the weight's values
    if value.dtype != norm.dtype and norm.weight_offset is None:
        raise Miss(f"the weight is {value.dtype}, x is {norm.dtype}")
    if value.dtype not in (norm.dtype, torch.float32):
        raise Miss(f"the weight is {value.dtype}, x is {norm.dtype}")
