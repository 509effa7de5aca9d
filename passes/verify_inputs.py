"""Draws inputs for verification: values that make every argument of a rewrite matter.

Inputs are drawn from the placeholders' fake values with dynamic sizes made small; a few entries
are outliers, some rows small and some large, because differences of rounding, of a norm's eps and
of attention's soft cap hide among standard normals.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from .subgraph import fake_value

_DYNAMIC_SIZE, _MOST_TRIED = 5, 64
_SEED = 20_240_229
MOST_AT_ONCE = 1 << 24
"""Numbers of a weight that are drawn at once."""
_OF_ROWS = (1.0, 2.0**-20, 2.0**-10, 2.0**4)
_LARGE = {torch.float16: 2.0**8, torch.float64: 2.0**130, torch.complex128: 2.0**130}
"""Scales of large rows: float16 goes beyond FP8, doubles beyond float32, others (2^17) beyond
float16."""


def draw_inputs(module: fx.GraphModule, seed: int, *, wide: bool = False) -> list[Any]:
    """Data for the placeholders of ``module``, the side before; the side after runs on it too."""
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    values = {}
    for i, node in enumerate(placeholders):
        values[node] = _input(fake_value(node), seed=seed + i)
        if wide:
            values[node] = _spread(values[node], i)
    target = torch.ops.fw.paged_attention.default
    for attention in module.graph.find_nodes(op="call_function", target=target):
        nodes = attention.args[1:5]
        if all(node in values for node in nodes):
            values.update(zip(nodes, _attention_inputs(*(values[n] for n in nodes)), strict=True))
    for node in _logits(module.graph):
        values[node] = _apart(values[node], seed)
    return list(values.values())


def _logits(graph: fx.Graph) -> list[fx.Node]:
    """The placeholders of a row for each token of which the largest are taken."""
    found = set(graph.find_nodes(op="call_function", target=torch.ops.aten.topk.default))
    for node in reversed(graph.nodes):
        if node in found:
            found.update(node.all_input_nodes)
    tokens = [node for node in graph.find_nodes(op="placeholder") if node in found]
    return [node for node in tokens if getattr(fake_value(node), "ndim", 0) == 2]


def _apart(logits: Tensor, seed: int) -> Tensor:
    """Numbers from -4 to 4 in random order, so far apart that no rounding makes two of a row's
    equal: which of them a ``topk`` takes is not defined."""
    generator = torch.Generator(device=logits.device).manual_seed(seed)
    order = torch.rand(logits.shape, generator=generator, device=logits.device).argsort(-1)
    return (order * (8 / logits.shape[-1]) - 4).to(logits.dtype)


def here(device: torch.device) -> torch.device:
    """The device to compute on in place of ``device``: the CPU if that is a GPU that is missing."""
    absent = device.type == "cuda" and not torch.cuda.is_available()
    return torch.device("cpu") if absent else device


def _input(value: Any, *, seed: int) -> Any:
    """Like ``random_value``, but vectors of integers can index memory that is written to: they are
    distinct, in random order, and start at -1, the slot of a padding row."""
    made = random_value(value, seed=seed)
    if isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64) and value.dim() == 1:
        order = torch.randperm(len(made), generator=torch.Generator().manual_seed(seed))
        return (order - 1).to(made)
    return made


def _attention_inputs(cache: Tensor, table: Tensor, seq_lens: Tensor, starts: Tensor) -> Any:
    """The arguments that must agree: one query a sequence, lengths from 1 to what a table holds."""
    num_seqs, capacity = table.shape[0], table.shape[1] * cache.shape[2]
    lengths = 1 + torch.arange(num_seqs) * (capacity - 1) // max(num_seqs - 1, 1)
    return cache, table, lengths.to(seq_lens), torch.arange(num_seqs + 1).to(starts)


def _spread(value: Any, first: int) -> Any:
    """Scale the rows of a tensor, or the elements of a vector, by turns, starting with scale
    ``first``.  Large values overflow the next narrower dtype."""
    floats = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    if not floats or value.dtype.itemsize == 1:
        return value
    scales = [*_OF_ROWS, _LARGE.get(value.dtype, 2.0**17)]
    shape = value.shape[:-1] if value.dim() > 1 else value.shape
    turns = torch.arange(first, first + math.prod(shape), device=value.device) % len(scales)
    wide = torch.complex128 if value.is_complex() else torch.float64
    row_scales = torch.tensor(scales, dtype=wide, device=value.device)[turns].view(shape)
    scaled = value * (row_scales[..., None] if value.dim() > 1 else row_scales)
    if value.dtype == torch.float16:
        scaled = scaled.clamp(-512, 512)
    return scaled.to(value.dtype)


def random_value(value: Any, *, seed: int, size: int = _DYNAMIC_SIZE) -> Any:
    """Data of a fake value's shape and dtype, in which dynamic sizes are ``size``.  Floats are
    standard normals with a few outliers, in all bits of their dtype, and tokens also have small and
    large rows; complex numbers have two such parts; integers are 0 or 1.  Anything but tensors and
    sizes is kept."""
    if isinstance(value, (list, tuple)):
        return [random_value(v, seed=seed + i, size=size) for i, v in enumerate(value)]
    if not isinstance(value, Tensor):
        return _size(value, size) if isinstance(value, torch.SymInt) else value
    shape = [d if isinstance(d, int) else _size(d, size) for d in value.shape]
    device = here(value.device)
    gen = torch.Generator(device=device).manual_seed(seed)
    if value.dtype.is_complex:
        part = torch.empty_like(value, dtype=value.dtype.to_real())
        parts = [random_value(part, seed=one, size=size) for one in (seed, seed + _SEED)]
        return torch.complex(parts[0].double(), parts[1].double()).to(value.dtype)
    if not value.dtype.is_floating_point:
        return torch.randint(0, 2, shape, generator=gen, device=device).to(value.dtype)
    if math.prod(shape) > MOST_AT_ONCE:
        return _large(shape, value.dtype, gen)
    drawn = torch.float64 if value.dtype == torch.float64 else torch.float32
    data = torch.randn(shape, generator=gen, device=device, dtype=drawn)
    outliers = torch.rand(shape, generator=gen, device=device) < 0.01
    if 1 < len(shape) < 4 and isinstance(value.shape[0], torch.SymInt):
        data[1::4] *= 2.0**-10  # tokens so small that a norm's eps decides
        data[2::4] *= 2.0**-20  # or, of their products, does
        data[3::4] *= 2.0**4  # and so large that attention's soft cap does
    return torch.where(outliers, data * 50, data).to(value.dtype)


def _size(value: torch.SymInt, size: int) -> int:
    """The value of an expression of sizes when each of them is ``size``, or the next number for
    which the equations hold that the graph is compiled for, such as that a size is even."""
    expression, env = value.node.expr, value.node.shape_env
    size = _allowed(size, tuple(guard.expr for guard in env.guards if guard.expr.is_Equality))
    return int(expression.subs(dict.fromkeys(expression.free_symbols, size)))


@lru_cache(maxsize=64)
def _allowed(size: int, equations: tuple[Any, ...]) -> int:
    for number in range(size, size + _MOST_TRIED):
        if all(_holds(equation, number) for equation in equations):
            return number
    return size  # they need sizes that differ


def _holds(equation: Any, number: int) -> bool:
    try:
        return bool(equation.subs(dict.fromkeys(equation.free_symbols, number)) == True)  # noqa: E712
    except ZeroDivisionError:  # it divides by a part of a size, which is too small
        return False


def _large(shape: list[int], dtype: torch.dtype, gen: torch.Generator) -> Tensor:
    """Draw a weight in parts: a whole embedding in float32, with its outliers, takes many GB."""
    made = torch.empty(shape, dtype=dtype, device=gen.device)
    for part in made.view(-1).split(MOST_AT_ONCE):
        data = torch.randn(part.shape, generator=gen, device=gen.device)
        few = torch.randint(0, len(part), (len(part) // 100,), generator=gen, device=gen.device)
        data[few] *= 50
        part.copy_(data)
    return made
