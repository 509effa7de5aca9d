"""Builds random graphs of semantic ops out of steps, for ``test_random_graphs``.

Each step takes what earlier ones left, by position, so that Hypothesis can shrink a list of them.
Graphs are built with fake values and without Dynamo, which makes them cheap.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fusewright import ops
from fusewright.passes.subgraph import compute_fake

NUMBERS = range(4)
"""The two numbers that a step is given are each one of these."""
TOKENS, SIZE, HEADS, KV_HEADS, DIM, BLOCK = 3, 256, 8, 2, 32, 4
E4M3 = torch.float8_e4m3fn


@cache
def inputs() -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(11)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen)

    def weight(rows: int, columns: int) -> Tensor:
        return randn(rows, columns) * columns**-0.5

    kv = randn(4, 2, BLOCK, KV_HEADS, DIM)
    return {
        "x0": randn(TOKENS, SIZE).bfloat16(),
        "x1": randn(TOKENS, SIZE).bfloat16(),
        "w0": randn(SIZE).bfloat16(),
        "w1": randn(SIZE).bfloat16(),
        "scale0": torch.tensor([[0.02]]),
        "scale1": torch.tensor([[0.05]]),
        "square": weight(SIZE, SIZE).bfloat16(),
        "gate_up": weight(2 * SIZE, SIZE).bfloat16(),
        "bias": randn(2 * SIZE).bfloat16(),
        "qkv": weight((HEADS + 2 * KV_HEADS) * DIM, SIZE).bfloat16(),
        # All of them are chosen: of fewer, a rounding could choose others.
        "router": weight(2, SIZE).bfloat16(),
        "experts_gate_up": weight(2 * 128, SIZE).view(2, 128, SIZE).bfloat16(),
        "experts_down": weight(2 * SIZE, 64).view(2, SIZE, 64).bfloat16(),
        "gate_up_fp8": (weight(2 * SIZE, SIZE) * 100).to(E4M3),
        "w_fp8": (weight(SIZE, SIZE) * 100).to(E4M3),
        "w_tensor": torch.tensor([[0.01]]),
        "w_rows": torch.rand(SIZE, 1, generator=gen) * 0.02,
        "gate_up_rows": torch.rand(2 * SIZE, 1, generator=gen) * 0.02,
        "w_blocks": torch.rand(SIZE // 128, SIZE // 128, generator=gen) * 0.02,
        "wq": randn(DIM).bfloat16(),
        "wk": randn(DIM).bfloat16(),
        "positions": torch.tensor([4, 0, 9], dtype=torch.int32),
        "cos_sin": randn(16, DIM),
        "kv": kv.bfloat16(),
        "kv_fp8": kv.to(E4M3),
        "kv_scale": torch.rand(2, KV_HEADS, generator=gen) + 0.1,
        "slots": torch.tensor([5, -1, 12], dtype=torch.int32),
        "blocks": torch.tensor([[1, 0], [2, 3], [3, 1]], dtype=torch.int32),
        "lens": torch.tensor([2, 7, 5], dtype=torch.int32),
        "starts": torch.arange(TOKENS + 1, dtype=torch.int32),
    }


WRITTEN = ("x0", "x1", "kv", "kv_fp8")
"""Inputs that a graph may write to."""


@cache
def fakes() -> dict[str, Tensor]:
    mode = FakeTensorMode()
    return {name: mode.from_tensor(value) for name, value in inputs().items()}


class Builder:
    """A graph in the making: ``hidden`` are its [tokens, size] tensors, ``quantized`` its triples
    of FP8 matrix, scale and which of the schemes that is."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.inputs: dict[str, fx.Node] = {}
        for name, fake in fakes().items():
            self.inputs[name] = self.graph.placeholder(name)
            self.inputs[name].meta["example_value"] = fake
        self.hidden = [self.inputs["x0"], self.inputs["x1"]]
        self.tokens: list[fx.Node] = []
        self.quantized: list[tuple[fx.Node, fx.Node, int]] = []

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        make = self.graph.call_method if isinstance(target, str) else self.graph.call_function
        node = make(target, args, kwargs)
        node.meta["example_value"] = compute_fake(node)
        return node

    def op(self, name: str, *args: Any) -> fx.Node:
        nodes = (self.inputs[a] if isinstance(a, str) and a in self.inputs else a for a in args)
        return self.call(ops.BY_NAME[name].overload(), *nodes)

    def item(self, node: fx.Node, index: int) -> fx.Node:
        return self.call(operator.getitem, node, index)

    def pick(self, back: int) -> fx.Node:
        return self.hidden[-1 - back % len(self.hidden)]

    def finish(self, head: bool) -> fx.Graph:
        """What nobody has read is returned; with a head, only logits of what came last."""
        made = [*self.tokens, *self.hidden, *(node for q in self.quantized for node in q[:2])]
        unread = tuple(n for n in dict.fromkeys(made) if not n.users)
        if head:
            last = self.op("gather_last_token", self.hidden[-1], "starts")
            unread = (self.op("linear", last, "square", None),)
        self.graph.output(unread)
        return self.graph


def add(b: Builder, i: int, j: int) -> None:
    b.hidden.append(b.call((operator.add, torch.add)[j % 2], b.pick(i), b.pick(j)))


def norm(b: Builder, i: int, j: int) -> None:
    b.hidden.append(b.op("rms_norm", b.pick(i), f"w{j % 2}", (1e-5, 1e-6)[j // 2 % 2]))


def add_norm(b: Builder, i: int, j: int) -> None:
    add(b, i, j)
    norm(b, 0, j)


def activation(b: Builder, i: int, j: int) -> None:
    y = b.op("linear", b.pick(i), "gate_up", None if i % 3 else "bias")
    halves = b.call("chunk", y, 2, -1)
    gate, up = b.item(halves, 0), b.item(halves, 1)
    act = b.call(F.gelu, gate, approximate="tanh") if j % 2 else b.call(F.silu, gate)
    b.hidden.append(b.call(operator.mul, *((act, up) if j < 2 else (up, act))))


def raised_activation(b: Builder, i: int, j: int) -> None:
    y = b.op("linear", b.pick(i), "gate_up", None if i % 3 else "bias")
    b.hidden.append(b.op("gelu_tanh_mul" if j % 2 else "silu_mul", y))


def quantize(b: Builder, i: int, j: int) -> None:
    kind = j % 3
    if kind == 0:
        scale = b.inputs[f"scale{i % 2}"]
        b.quantized.append((b.op("quant_fp8_static", b.pick(i), scale), scale, kind))
    else:
        pair = b.op("quant_fp8_dynamic", b.pick(i), (0, 128)[kind - 1])
        b.quantized.append((b.item(pair, 0), b.item(pair, 1), kind))


def norm_quantize(b: Builder, i: int, j: int) -> None:
    norm(b, i, j)
    quantize(b, 0, i + j)


def add_norm_quantize(b: Builder, i: int, j: int) -> None:
    add_norm(b, i, j)
    quantize(b, 0, i + j)


def activation_quantize(b: Builder, i: int, j: int) -> None:
    (activation if i < 2 else raised_activation)(b, i, j)
    quantize(b, 0, i + j)


def read_activation_quantize(b: Builder, i: int, j: int) -> None:
    """Another reads the product, which no pass may join to its activation."""
    y = b.op("linear", b.pick(i), "gate_up", None)
    b.hidden.append(b.call(operator.mul, b.item(b.call("chunk", y, 2, -1), 0), 0.5))
    b.hidden.append(b.op("gelu_tanh_mul" if j % 2 else "silu_mul", y))
    quantize(b, 0, i)


def linear(b: Builder, i: int, j: int) -> None:
    b.hidden.append(b.op("linear", b.pick(i), "square", "w1" if j == 3 else None))


def fp8_linear(b: Builder, i: int, j: int) -> None:
    if not b.quantized:
        quantize(b, i, j)
    x, scale, kind = b.quantized[-1 - i % len(b.quantized)]
    w_scale = ("w_tensor", "w_rows", "w_blocks")[kind]
    b.hidden.append(b.op("linear", x, "w_fp8", None, scale, w_scale, torch.bfloat16))


def gated_fp8(b: Builder, i: int, j: int) -> None:
    quantize(b, i, 3 * (j // 2))
    x, scale, _ = b.quantized.pop()
    y = b.op("linear", x, "gate_up_fp8", None, scale, "w_tensor", torch.bfloat16)
    b.hidden.append(b.op("gelu_tanh_mul" if j % 2 else "silu_mul", y))
    quantize(b, 0, i)


def fp8_layers(b: Builder, i: int, j: int) -> None:
    """The layers between two attentions, with a scale a token; or some that are like them."""
    quantize(b, i, 1)
    fp8_linear(b, 0, 0)
    add_norm(b, 0, 1 + i)
    quantize(b, 0, 1)
    x, scale, _ = b.quantized[-1]
    y = b.op("linear", x, "gate_up_fp8", None, scale, "gate_up_rows", torch.bfloat16)
    b.hidden.append(b.op("gelu_tanh_mul" if j % 2 else "silu_mul", y))
    quantize(b, 0, 1)
    fp8_linear(b, 0, 0)
    if i < 3:
        total = b.call(operator.add, b.hidden[-4], b.pick(0))
        b.hidden += [total, b.op("rms_norm", total, "w0", 1e-6)]
        quantize(b, 0, j)
        fp8_linear(b, 0, 0)


def linears_and_norm(b: Builder, i: int, j: int) -> None:
    linear(b, i, 0)
    add_norm(b, 0, 1 + j)
    (linear if i < 2 else raised_activation)(b, 0, j)


def experts(b: Builder, i: int, j: int) -> None:
    x = b.pick(i)
    routed = b.op("route", b.op("linear", x, "router", None), None, 2)
    weights, ids = b.item(routed, 0), b.item(routed, 1)
    h = b.op("expert_linear", x, "experts_gate_up", ids)
    h = b.op("gelu_tanh_mul" if j % 2 else "silu_mul", h)
    y = b.op("expert_linear", h, "experts_down", ids)
    b.hidden.append(b.op("combine_experts", y, weights, *([b.pick(i)] if j == 3 else [])))


def experts_between_linears(b: Builder, i: int, j: int) -> None:
    linear(b, i, 0)
    add_norm(b, 0, 1 + i)
    experts(b, 0, j)
    if i < 2:
        total = b.call(operator.add, b.hidden[-3], b.pick(0))
        b.hidden.append(b.op("rms_norm", total, "w0", 1e-6))
        linear(b, 0, j)


def attention(b: Builder, i: int, j: int) -> None:
    packed = b.op("linear", b.pick(i), "qkv", None)
    parts = b.call("split", packed, [n * DIM for n in (HEADS, KV_HEADS, KV_HEADS)], -1)
    q, k, v = (b.call("view", b.item(parts, n), -1, h, DIM) for n, h in enumerate((8, 2, 2)))
    if j % 2:
        q = b.op("rms_norm", q, "wq", 1e-6)
        k = b.op("rms_norm", k, "wk", 1e-5 if i == 3 else 1e-6)
    pair = b.op("rotary_embedding", "positions", q, k, "cos_sin")
    q, k = b.item(pair, 0), b.item(pair, 1)
    cache, scales = ("kv_fp8", ["kv_scale"]) if j > 1 else ("kv", [])
    b.op("kv_store", k, v, cache, "slots", *scales)
    out = b.call(torch.empty_like, q)
    b.op(
        "paged_attention", q, cache, "blocks", "lens", "starts", out, DIM**-0.5, 0, 0.0, *scales
    )  # fmt: skip
    b.hidden.append(b.call("view", out, -1, SIZE))


def attention_quantize(b: Builder, i: int, j: int) -> None:
    attention(b, i, j)
    quantize(b, 0, 3 * i)


def views(b: Builder, i: int, j: int) -> None:
    shape = [(TOKENS, SIZE), (-1, SIZE), (-1, 2, SIZE // 2), (SIZE, TOKENS)][j]
    b.hidden.append(b.call("reshape", b.call("view", b.pick(i), *shape), TOKENS, SIZE))


def read(b: Builder, i: int, j: int) -> None:
    b.hidden.append(b.call(operator.mul, b.pick(i), 0.5 + j))


def copies(b: Builder, i: int, j: int) -> None:
    x = b.pick(i)
    if j == 0:
        b.hidden.append(b.call("clone", x))
    elif j == 1:
        b.hidden.append(b.call("to", b.call("float", x), torch.bfloat16))
    elif j == 2:
        b.hidden.append(b.call("to", x, torch.bfloat16, copy=True))
    else:  # rounds
        b.hidden.append(b.call("to", b.call("half", x), torch.bfloat16))


def twice(b: Builder, i: int, j: int) -> None:
    """The same again, from the same."""
    x, y = b.pick(i), b.pick(i + 1)
    weight = f"w{j % 2}"
    made = [b.op("rms_norm", b.call(operator.add, x, y), weight, 1e-5) for _ in range(2)]
    b.hidden += [b.call(operator.sub, *made)] if j < 2 else made


def write(b: Builder, i: int, j: int) -> None:
    """In place, where others may have read, or read later."""
    x = b.pick(i)
    if j == 0:
        b.hidden.append(b.call("mul_", x, 0.5))
    elif j == 1:
        b.hidden.append(b.call(operator.iadd, x, b.pick(i + 1)))
    elif j == 2:
        b.call("add_", x, 0.25)
    else:
        b.hidden.append(b.call(F.silu, b.call("view", x, -1, SIZE), inplace=True))


def tokens(b: Builder, i: int, j: int) -> None:
    b.tokens.append(b.op("argmax", b.pick(i)))
    b.hidden.append(b.op("embedding", "slots" if j else "positions", "square"))


def reduce(b: Builder, i: int, j: int) -> None:
    b.hidden.append(b.op("all_reduce", b.pick(i), GROUPS[i % 2]))


def linears_and_reduced_norm(b: Builder, i: int, j: int) -> None:
    linear(b, i, 0)
    reduce(b, 0, j)
    add_norm(b, 0, 1 + j)
    linear(b, 0, j)


def gather(b: Builder, i: int, j: int) -> None:
    """The columns of two ranks, halved again by an activation."""
    y = b.op("all_gather", b.pick(i), 2, GROUPS[i % 2])
    b.hidden.append(b.op("gelu_tanh_mul" if j % 2 else "silu_mul", y))


def reduce_norm(b: Builder, i: int, j: int) -> None:
    reduce(b, i, j)
    (add_norm if j % 2 else norm)(b, 0, j // 2)


def reduce_norm_quantize(b: Builder, i: int, j: int) -> None:
    reduce(b, i, j)
    (add_norm if i > 1 else norm)(b, 0, 1)
    quantize(b, 0, j)


STEPS: tuple[Callable[[Builder, int, int], None], ...] = (
    add_norm,
    norm_quantize,
    add_norm_quantize,
    attention,
    attention_quantize,
    activation,
    raised_activation,
    activation_quantize,
    read_activation_quantize,
    quantize,
    fp8_linear,
    gated_fp8,
    fp8_layers,
    linears_and_norm,
    experts,
    experts_between_linears,
    linear,
    add,
    norm,
    views,
    read,
    copies,
    twice,
    write,
    tokens,
)
RANK_STEPS = (
    *(reduce, gather, reduce_norm, reduce_norm_quantize, reduce_norm_quantize),
    *(reduce_norm_quantize, norm_quantize, add, write, linears_and_reduced_norm),
)
GROUPS = ("tp", "dp")


def step_lists(steps: Any, most: int) -> Any:
    numbers = st.sampled_from(NUMBERS)
    return st.lists(st.tuples(st.sampled_from(steps), numbers, numbers), min_size=1, max_size=most)
