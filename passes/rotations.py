"""Reads rotations of queries or keys by angles, in the spellings that models have.

Two columns of a head, ``a`` and ``b``, become ``a * cos - b * sin`` and ``b * cos + a * sin``.
They are half a head apart or neighbours (``Cut``), and a model says it in one of three ways:

- as a sum: ``x * cos + join(-b, a) * sin``, with every cosine twice, as Llama and GPT-J, or
  ``join(b, -a)``, which turns back, as NanoChat;
- as two parts: ``join(a * cos - b * sin, b * cos + a * sin)``, as gpt-oss and DeepSeek V3;
- as complex numbers: ``view_as_real(view_as_complex(x) * freqs_cis)``, as Llama 4.

Rotations compute in x's dtype, or in float32 from x and cast back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import fx

from .angles import Half, read_complex, read_half, read_spread
from .canonicalize import (
    argument,
    columns,
    is_dense,
    is_same,
    kind,
    only_user,
    other_operand,
    same_shape,
    tensor,
    widened,
)
from .cuts import Cut, Join, cut, is_part, joined, part_nodes
from .rule import EXACT, Tier
from .sites import Miss

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROUNDED = {torch.bfloat16: Tier(0.0, 0.0, 2.0**-6), torch.float16: Tier(0.0, 0.0, 2.0**-9)}
"""Spellings round both products and their sum; the op rounds once.  In float32 no bit differs."""
_STEPS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@dataclass(frozen=True)
class Rotation:
    """One rotated tensor [batch, heads, tokens, head_dim], or with the heads in dimension 2, or
    without the batch.  ``heads_dim`` counts the batch in any case.

    ``layout`` is ``rotary_embedding``'s.  ``by_head`` says that the result's rows are dense head by
    head, not token by token.  ``tier`` says how far its roundings may lie from the op's.
    """

    x: fx.Node
    result: fx.Node
    layout: str
    cos: Half
    sin: Half
    heads_dim: int
    by_head: bool
    tier: Tier
    nodes: list[Any] = field(compare=False)


@dataclass
class _Found:
    """A rotation as one spelling has it.  ``xs`` are the tensor wherever it is read, perhaps cast
    to float32 more than once; ``result`` is the last node before it is cast back; ``factors`` must
    have the result's dtype.  ``tier`` None means that of the dtype that it computes in."""

    xs: tuple[fx.Node, ...]
    result: fx.Node
    layout: str
    cos: Half
    sin: Half
    factors: list[fx.Node]
    nodes: list[Any]
    tier: Tier | None = None


def rotations(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, Any]]:
    """(site, how to read it) of every rotation.  A site is yielded when its turn comes, since
    earlier ones may have been replaced."""
    for node in list(gm.graph.nodes):
        for spelling in (_as_sum, _as_parts, _as_complex):
            if (read := spelling(node)) is not None:
                yield node, read
                break


def read(site: Any) -> Rotation:
    """Read the rotation at a site; raises ``Miss`` if the op computes something else."""
    found: _Found = site()
    nodes, result = [*found.nodes, *found.xs, found.result], found.result
    computed, x = tensor(result).dtype, widened(found.xs[0])
    if computed == torch.float32 and tensor(x).dtype != computed:
        user = next(iter(result.users)) if len(result.users) == 1 else None
        if kind(user) == "cast" and tensor(user).dtype == tensor(x).dtype:
            result = only_user(result)
            nodes.append(result)
        elif all(one is found.xs[0] for one in found.xs):
            x = found.xs[0]  # a tensor of float32 that is cast to it just before
    if tensor(x).dtype != tensor(result).dtype:
        raise Miss(f"the result is {tensor(result).dtype}, the rotated tensor {tensor(x).dtype}")
    _check_dtypes(x, computed, found)
    heads_dim = _heads_dim(x, found)
    if (whole := _whole(x, result)) is not None:
        nodes += [x, *part_nodes(x), *part_nodes(whole[2]), whole[2], whole[1]]
        x, result = whole[:2]
    return Rotation(
        x,
        result,
        found.layout,
        found.cos,
        found.sin,
        heads_dim,
        _is_by_head(result, heads_dim),
        found.tier or _ROUNDED.get(computed, EXACT),
        [node for node in nodes if node is not x],
    )


def _whole(x: fx.Node, result: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """(heads, joined, rest) if x is the first columns of ``heads``, and ``joined`` puts the rest of
    them behind the rotated ones, as the op does; None if not."""
    first = columns(x)
    join = next(iter(result.users)) if len(result.users) == 1 else None
    if first is None or first[1] != 0 or kind(join) != "cat":
        return None
    parts: Any = argument(join, 0, "tensors")  # type: ignore[arg-type]
    last = argument(join, 1, "dim", 0) in (-1, tensor(join).dim() - 1)  # type: ignore[arg-type]
    if len(parts) != 2 or parts[0] is not result or not last:
        return None
    rest, width = columns(parts[1]), tensor(first[0]).shape[-1]
    if rest is None or rest[0] is not first[0] or rest[1:] != (first[2], width):
        return None
    same = tensor(first[0]).dim() == tensor(x).dim() and tensor(join).dtype == tensor(x).dtype
    return (first[0], join, parts[1]) if same else None  # type: ignore[return-value]


def _check_dtypes(x: fx.Node, computed: torch.dtype, found: _Found) -> None:
    if tensor(x).dtype not in _DTYPES or computed not in (tensor(x).dtype, torch.float32):
        raise Miss(f"{tensor(x).dtype} is rotated in {computed}, the op computes in float32")
    for factor in found.factors:
        if tensor(factor).dtype != computed:
            raise Miss(f"{factor.name} is {tensor(factor).dtype}, the sum {computed}")
    if found.cos.dtype not in _DTYPES or found.sin.dtype != found.cos.dtype:
        raise Miss(f"cosines are {found.cos.dtype}, sines {found.sin.dtype}, the op's float32")


def _heads_dim(x: fx.Node, found: _Found) -> int:
    """The dimension of the heads, 1 or 2, over which the angles are spread."""
    if tensor(x).dim() not in (3, 4):
        raise Miss(f"the rotated tensor has {tensor(x).dim()} dimensions, expected 3 or 4")
    value = with_batch(tensor(x))
    if found.cos.shape != found.sin.shape:
        raise Miss(f"cosines are {found.cos.describe()}, sines {found.sin.describe()}")
    batch, *middle, half = found.cos.shape
    shape = [str(d) for d in value.shape]
    fits = batch in ("1", shape[0]) and str(2 * int(half)) == shape[3]
    for heads_dim in (1, 2) if fits else ():
        if middle[heads_dim - 1] == "1" and middle[2 - heads_dim] == shape[3 - heads_dim]:
            if not isinstance(value.shape[heads_dim], int):
                raise Miss("the number of heads is dynamic")
            return heads_dim
    raise Miss(f"angles of {found.cos.describe()} do not match a tensor of {[*tensor(x).shape]}")


def with_batch(value: torch.Tensor) -> torch.Tensor:
    """[batch, heads, tokens, head_dim] of a tensor that may lack the batch."""
    return value.unsqueeze(0) if value.dim() == 3 else value


def _is_by_head(result: fx.Node, heads_dim: int) -> bool:
    value = with_batch(tensor(result))
    if is_dense(value.transpose(1, 2) if heads_dim == 1 else value):
        return False
    if heads_dim == 1 and is_dense(value):
        return True
    raise Miss(f"the result has strides {list(value.stride())}, the op's are by token")


def _as_sum(site: fx.Node) -> Any:
    """Read ``x * cos + join(-b, a) * sin``: a site is the join of two parts, one of it negated."""
    join = joined(site)
    if join is None or "neg" not in (kind(join.first), kind(join.second)):
        return None
    bare = [one.args[0] if kind(one) == "neg" else one for one in (join.first, join.second)]
    return partial(_read_sum, site, join, *bare) if is_part(*bare) else None


def _read_sum(site: fx.Node, join: Join, b: Any, a: Any) -> _Found:
    parts, back = cut(a, b), kind(join.second) == "neg"
    if parts is None or kind(join.first) == kind(join.second):
        raise Miss(f"the parts are not the two {join.layout} of the last dimension")
    if parts.layout != join.layout:
        raise Miss(f"{parts.layout} of the last dimension are joined as {join.layout}")
    turned, joins = only_user(site), [site]
    if kind(turned) == "cast" and widened(turned) is site:
        # As Ernie 4.5, which joins in 16 bits: to negate a number there rounds nothing.
        joins.append(turned)
        turned = only_user(turned)
    if kind(turned) != "mul":
        raise Miss(f"{joins[-1].name} feeds {turned.name}, not a product with the sines")
    result = only_user(turned)
    if kind(result) != "add":
        raise Miss(f"{turned.name} feeds {result.name}, not a sum")
    straight: Any = other_operand(result, turned)
    x: Any = None
    if kind(straight) == "mul" and len(straight.users) == 1:
        x = next((one for one in straight.args if is_same(one, parts.source)), None)
    if x is None:
        raise Miss(f"{result.name} adds {straight}, not the tensor times the cosines")
    nodes = [*join.nodes, *joins, *parts.nodes, join.first, join.second, turned, straight]
    sin = read_spread(other_operand(turned, joins[-1]), "sin", join.layout, nodes)
    cos = read_spread(other_operand(straight, x), "cos", join.layout, nodes)
    _check_same_angles(cos, sin)
    if back:
        sin = replace(sin, steps=(*sin.steps, ("neg",)))
    xs = (x, parts.source)
    return _Found(xs, result, join.layout, cos, sin, [turned, straight], nodes)


def _check_same_angles(cos: Half, sin: Half) -> None:
    if ("angle",) in cos.angles and (cos.root, cos.angles) != (sin.root, sin.angles):
        raise Miss("cosines and sines are not of the same angles")


def _as_parts(site: fx.Node) -> Any:
    """Read ``join(a * cos - b * sin, b * cos + a * sin)``: a site is the join of two sums or
    differences of products with two parts of a tensor."""
    join = joined(site)
    if join is None:
        return None
    first, second = _products(join.first), _products(join.second)
    if first is None or second is None:
        return None
    for a, b in product(first[0].args, first[1].args):
        if is_part(a, b):
            return partial(_read_parts, join, first, second, cut(a, b) or cut(b, a))
    return None


def _products(node: fx.Node) -> list[fx.Node] | None:
    """The two products that ``node`` adds or subtracts, else None."""
    if kind(node) not in ("add", "sub") or argument(node, 2, "alpha", 1) != 1:
        return None
    made = [argument(node, 0, "input"), argument(node, 1, "other")]
    return made if [kind(one) for one in made] == ["mul", "mul"] else None


def _read_parts(
    join: Join, first: list[fx.Node], second: list[fx.Node], parts: Cut | None
) -> _Found:
    if parts is None:
        raise Miss("the parts are not the two halves, or pairs, of the last dimension")
    factors = [_factors(one, parts) for one in (*first, *second)]
    nodes = [*join.nodes, *parts.nodes, join.first, join.second, *first, *second]
    nodes += [node for one in factors for node in one.nodes]
    (cos, sin), crossed = factors[:2], sorted(factors[2:], key=lambda one: -one.index)
    if kind(join.first) != "sub" or (cos.index, sin.index) != (0, 1):
        raise Miss(f"{join.first.name} is not the first part times cos less the second times sin")
    halves = read_half(cos.other, "cos", nodes), read_half(sin.other, "sin", nodes)
    again = [read_half(one.other, "", nodes) for one in crossed]
    same = [(h.root, h.shape) for h in again] == [(h.root, h.shape) for h in halves]
    if kind(join.second) != "add" or [one.index for one in crossed] != [1, 0] or not same:
        raise Miss(f"{join.second.name} is not the second part times cos plus the first times sin")
    rounded = [*first, *second, join.first, join.second]
    for one in rounded:
        only_user(one)
    layout = parts.layout if parts.layout == join.layout else f"{parts.layout}_to_{join.layout}"
    return _Found((parts.source,), join.nodes[-1], layout, *halves, rounded, nodes)


@dataclass(frozen=True)
class _Factors:
    """The product of one of two parts with something else."""

    index: int
    other: Any
    nodes: list[Any]


def _factors(node: fx.Node, parts: Cut) -> _Factors:
    for one in node.all_input_nodes:
        if (index := parts.index(one)) is not None:
            return _Factors(index, other_operand(node, one), part_nodes(one))
    raise Miss(f"{node.name} is not a product with a part of {parts.source.name}")


def _as_complex(site: fx.Node) -> Any:
    """Read ``view_as_real(view_as_complex(pairs of x) * freqs_cis)``: a site is the product."""
    numbers = [one for one in site.args if kind(one) == "as_complex"] if kind(site) == "mul" else []
    return partial(_read_complex, site, numbers[0]) if len(numbers) == 1 else None


def _read_complex(site: fx.Node, number: Any) -> _Found:
    paired = number.args[0]
    x = paired.args[0] if kind(paired) == "view" else None
    if tensor(site).dtype != torch.complex64:
        raise Miss(f"{site.name} is {tensor(site).dtype}, the op computes in float32")
    if x is None or not _are_pairs(tensor(paired), tensor(x)):
        raise Miss(f"{number.name} is not of the pairs of neighbours of a tensor")
    real = only_user(site)
    flat = only_user(real) if kind(real) == "as_real" else None
    if flat is None or kind(flat) != "view" or not same_shape(tensor(flat), tensor(x)):
        raise Miss(f"{site.name} feeds {real.name}, not the view of its pairs as a tensor like x")
    nodes = [number, paired, site, real]
    cos, sin = read_complex(other_operand(site, number), nodes)
    # Products of complex numbers, and cosines, may differ in the last bit of float32, after which a
    # value may be rounded to another one of 16 bits.
    tier = Tier(0.0, _STEPS.get(tensor(widened(x)).dtype, 0.0), 2.0**-21)
    return _Found((x,), flat, "pairs", cos, sin, [], nodes, tier)


def _are_pairs(paired: torch.Tensor, x: torch.Tensor) -> bool:
    shape, width = [*map(str, x.shape)], x.shape[-1]
    halves = [*shape[:-1], str(width // 2), "2"]
    return isinstance(width, int) and [*map(str, paired.shape)] == halves
