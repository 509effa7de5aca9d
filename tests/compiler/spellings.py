"""Draws spellings of what the Dynamo backend raises: gated activations, norms, sums before norms
and rotations, with casts, dtypes, strides, sizes and random ops wherever PyTorch takes them.

A spelling is a function and its inputs.  What eager refuses, such as SiLU of integers, is drawn
again: all that is left must run, and give what eager gives.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
INTS = (torch.int8, torch.int32, torch.int64, torch.bool)
DTYPES = (F32, F32, BF16, BF16, F16, F16, F64, torch.complex64)
SHAPES = ((3, 8), (5, 8), (2, 3, 8), (1, 8), (8,), (5, 1), (1, 1), (0, 8), (4, 0), ())
LARGE = {F16: 2.0**6, F64: 2.0**100}
Step = Callable[[Any], Any]


@dataclass(frozen=True)
class Spelling:
    """``fn(*inputs)`` is one tensor or several; ``sites`` are the expected sites of ``rule``.

    ``words`` says what was drawn, ``dtype`` is what a site computes for; ``rows``: terms of a row
    cancel, so that errors are relative to its largest value.
    """

    words: str
    rule: str
    sites: int
    dtype: torch.dtype
    fn: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    rows: bool = False


@dataclass
class Draw:
    """Random choices, with the names of those that were made; ``risk`` is how often one departs
    from what the ops compute."""

    random: random.Random
    risk: float
    words: list[str] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)

    def pick(self, **choices: Any) -> Any:
        name = self.random.choice([*choices])
        self.words.append(name.strip("_"))
        return choices[name]

    def risks(self) -> bool:
        return self.random.random() < self.risk

    def dtype(self) -> torch.dtype:
        dtype = self.random.choice(DTYPES[: 6 if not self.risks() else None])
        self.words.append(str(dtype).removeprefix("torch."))
        return dtype

    def cast(self, *usual: torch.dtype | None) -> Step:
        """To one of the usual dtypes, None for no cast; at a risk, to any."""
        dtype = self.random.choice(usual)
        if self.risks():
            dtype = self.random.choice([*DTYPES, *INTS])
        if dtype is None:
            return lambda x: x
        self.words.append(f"to {str(dtype).removeprefix('torch.')}")
        return lambda x: x.to(dtype)

    def chance(self, usual: Step) -> Step:
        """``usual``, or a random op around it."""
        if not self.risks():
            return usual
        step: Step = self.pick(
            rand_like=lambda x: x * torch.rand_like(x),
            dropout=lambda x: F.dropout(x.contiguous(), 0.5),  # in the order of memory
            bernoulli=lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
            rand=lambda x: x * torch.rand(x.shape, dtype=F32),
        )
        return lambda x: step(usual(x))

    def input(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, Step]:
        """(the number of a new input, what views it in the graph), in any strides."""
        layout, view = "dense", lambda x: x
        if self.risks() and len(shape) > 1:
            layout = self.random.choice(["transposed", "every other", "offset", "expanded"])
            self.words.append(layout)
        gen = torch.Generator().manual_seed(self.random.randrange(2**31))
        if layout == "transposed":
            made = values((*shape[:-2], shape[-1], shape[-2]), dtype, gen)
            view = lambda x: x.transpose(-1, -2)  # noqa: E731
        elif layout == "every other":
            made = values((*shape[:-1], 2 * shape[-1]), dtype, gen)
            view = lambda x: x[..., ::2]  # noqa: E731
        elif layout == "offset":
            made = values((shape[0] + 1, *shape[1:]), dtype, gen)
            view = lambda x: x[1:]  # noqa: E731
        elif layout == "expanded":
            made = values((1, *shape[1:]), dtype, gen)
            view = lambda x: x.expand(shape)  # noqa: E731
        else:
            made = values(shape, dtype, gen)
        if self.random.random() < 0.5:
            made, view = view(made), lambda x: x
        self.inputs.append(made)
        return len(self.inputs) - 1, view


def values(shape: tuple[int, ...], dtype: torch.dtype, gen: torch.Generator) -> Tensor:
    """Normals; of each four rows one is small, one large, one so large that it overflows narrower
    dtypes."""
    if dtype in INTS:
        return torch.randint(-4, 5, shape, generator=gen).to(dtype)
    if dtype.is_complex:
        return torch.complex(values(shape, F32, gen), values(shape, F32, gen)).to(dtype)
    made = torch.randn(shape, generator=gen, dtype=F64)
    scales = torch.tensor([1.0, 2.0**-10, 2.0**4, LARGE.get(dtype, 2.0**17)], dtype=F64)
    if len(shape) > 1:
        rows = shape[:-1]
        made = made * scales[torch.arange(math.prod(rows)) % 4].view(*rows, 1)
    return made.to(dtype)


def halves(d: Draw, shape: tuple[int, ...], dtype: torch.dtype) -> Step:
    """Gate and up as parts of one input."""
    width = shape[-1]
    number, view = d.input((*shape[:-1], 2 * width), dtype)
    cut = d.pick(
        chunk=lambda x: x.chunk(2, dim=-1),
        split=lambda x: x.split(width, dim=-1),
        split_sizes=lambda x: torch.split(x, [width, width], -1),
        slices=lambda x: (x[..., :width], x[..., width:]),
        narrow=lambda x: (x.narrow(-1, 0, width), x.narrow(-1, width, width)),
        negative=lambda x: (x[..., : -max(width, 1)], x[..., -max(width, 1) :]),
        swapped=lambda x: x.chunk(2, dim=-1)[::-1],
        unflatten=lambda x: x.unflatten(-1, (2, width)).unbind(-2),
        every_other=lambda x: (x[..., 0::2], x[..., 1::2]),
        overlapping=lambda x: (x[..., :width], x[..., width // 2 : width // 2 + width]),
    )
    return lambda inputs: cut(view(inputs[number]))


def apart(d: Draw, shape: tuple[int, ...], dtype: torch.dtype) -> Step:
    """Gate and up as inputs of their own, or one that is both."""
    first, view = d.input(shape, dtype)
    if d.risks():
        d.words.append("shared")
        return lambda inputs: (view(inputs[first]), view(inputs[first]))
    other = d.dtype() if d.risks() else dtype
    second, other_view = d.input(shape if not d.risks() else (), other)
    return lambda inputs: (view(inputs[first]), other_view(inputs[second]))


def activation(d: Draw) -> Spelling:
    dtype, shape = d.dtype(), d.random.choice(SHAPES)
    both = d.random.choice([halves, apart])(d, shape, dtype) if shape else apart(d, shape, dtype)
    act = d.pick(
        silu=F.silu,
        silu_=torch.nn.SiLU(),
        gelu=lambda g: F.gelu(g, approximate="tanh"),
        gelu_=torch.nn.GELU("tanh"),
        sigmoid=lambda g: g * torch.sigmoid(g),
        sigmoid_first=lambda g: g.sigmoid() * g,
        two_casts=lambda g: (g.float() * torch.sigmoid(g.float())).to(g.dtype),
    )
    of_gate, of_act = d.cast(None, F32), d.cast(None, None, dtype)
    of_up, of_result = d.chance(d.cast(None, F32, dtype)), d.chance(d.cast(dtype, dtype, None))
    scale = d.pick(**{"": 1.0, "_": 1.0, "times 7e4": 7e4}) if d.risks() and dtype != F16 else 1.0
    product = d.pick(
        act_up=lambda a, u: a * u,
        up_act=lambda a, u: u * a,
        mul=torch.mul,
        method=lambda a, u: a.mul(u),
        **({"squared": lambda a, u: a * a, "plus": lambda a, u: a * u + a} if d.risks() else {}),
    )

    def fn(*inputs: Tensor) -> Tensor:
        gate, up = both(inputs)
        up = up if scale == 1.0 else up * scale
        result: Tensor = of_result(product(of_act(act(of_gate(gate))), of_up(up)))
        return result

    words = " ".join(["activation", *d.words])
    return Spelling(words, "fuse_act", 1, dtype, fn, tuple(d.inputs))


def norm_of(d: Draw, hidden: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    """RMSNorm of (x, weight) in words of its own."""
    eps = d.random.choice([1e-6, 1e-5, 1e-2])
    if not d.risks() and dtype == F32 and d.random.random() < 0.2:
        d.words.append("F.rms_norm")
        return lambda x, w: F.rms_norm(x, (hidden,), w, eps)
    widen, back = d.cast(F32), d.cast(dtype)
    squares = d.pick(
        pow=lambda x: x.pow(2), mul=lambda x: x * x, square=torch.square, power=lambda x: x**2.0
    )
    mean = d.pick(
        mean=lambda s: s.mean(-1, keepdim=True),
        dim=lambda s: torch.mean(s, dim=s.dim() - 1, keepdim=True),
        sum=lambda s: s.sum(dim=(-1,), keepdim=True) / hidden,
    )
    inverse = d.pick(
        rsqrt=lambda x, m: x * torch.rsqrt(m + eps),
        first=lambda x, m: (eps + m).rsqrt() * x,
        sqrt=lambda x, m: x / torch.sqrt(m + eps),
        power=lambda x, m: x * (m + eps) ** -0.5,
        reciprocal=lambda x, m: (m + eps).sqrt().reciprocal() * x,
    )
    weigh = d.pick(
        after=lambda n, w: back(n) * w,
        before=lambda n, w: back(n * w.float()),
        gemma=lambda n, w: back(n * (1 + w.float())),
        promoted=lambda n, w: back(w * n),
    )
    again = d.pick(once=False, again=True)

    def norm(x: Tensor, w: Tensor) -> Tensor:
        if again:  # a cast a use
            return weigh(inverse(widen(x), mean(squares(widen(x)))), w)
        wide = widen(x)
        return weigh(inverse(wide, mean(squares(wide))), w)

    return norm


def weight_of(d: Draw, hidden: int, dtype: torch.dtype) -> int:
    gen = torch.Generator().manual_seed(d.random.randrange(2**31))
    shape = d.pick(number=(), one=(1,), column=(1, hidden)) if d.risks() else (hidden,)
    d.inputs.append(values(shape, d.dtype() if d.risks() else dtype, gen))
    return len(d.inputs) - 1


def norm(d: Draw) -> Spelling:
    dtype, shape = d.dtype(), d.random.choice(SHAPES if d.risks() else SHAPES[:8])
    hidden = shape[-1] if shape else 1
    number, view = d.input(shape, dtype)
    called, weight = norm_of(d, hidden, dtype), weight_of(d, hidden, dtype)
    before, after = d.chance(lambda x: x), d.chance(lambda x: x)

    def fn(*inputs: Tensor) -> Tensor:
        result: Tensor = after(called(before(view(inputs[number])), inputs[weight]))
        return result

    return Spelling(
        " ".join(["norm", *d.words]), "canonicalize_norm", 1, dtype, fn, tuple(d.inputs)
    )


def add_norm(d: Draw) -> Spelling:
    dtype, shape = d.dtype(), d.random.choice(SHAPES[:8])
    first, view = d.input(shape, dtype)
    other_shape = (1, *shape[1:]) if d.risks() else shape
    second, other_view = d.input(other_shape, d.dtype() if d.risks() else dtype)
    called, weight = norm_of(d, shape[-1], dtype), weight_of(d, shape[-1], dtype)
    keep = d.pick(residual=True, alone=False)
    add = d.pick(
        plus=lambda x, y: x + y, add=torch.add, swapped=lambda x, y: y + x, same=lambda x, y: x + x
    )

    def fn(*inputs: Tensor) -> Any:
        total = add(view(inputs[first]), other_view(inputs[second]))
        normed = called(total, inputs[weight])
        return (normed, total) if keep else normed

    return Spelling(" ".join(["add", *d.words]), "canonicalize_norm", 1, dtype, fn, tuple(d.inputs))


def rotation(d: Draw) -> Spelling:
    dtype, heads_dim = d.dtype(), d.pick(by_head=1, by_token=2)
    tokens, width = d.random.choice([(3, 8), (1, 4), (5, 2)])
    kv_heads = d.random.choice([1, 2])
    shapes = [(2, heads, tokens, width) for heads in (2, kv_heads)]
    if heads_dim == 2:
        shapes = [(2, tokens, heads, width) for heads in (2, kv_heads)]
    q, k = (d.input(shape, dtype) for shape in shapes)
    gen = torch.Generator().manual_seed(d.random.randrange(2**31))
    wide = F64 if d.risks() else F32
    d.inputs.append(
        torch.randn((d.random.choice([1, 2]), tokens, width // 2), generator=gen).to(wide)
    )
    of_table, of_result = d.cast(dtype), d.cast(None)
    cut = d.pick(
        chunk=lambda x: x.chunk(2, dim=-1),
        slices=lambda x: (x[..., : width // 2], x[..., width // 2 :]),
    )

    def fn(*inputs: Tensor) -> Any:
        both = torch.cat((inputs[-1], inputs[-1]), dim=-1)
        cos, sin = (of_table(t).unsqueeze(heads_dim) for t in (both.cos(), both.sin()))

        def rotate(x: Tensor) -> Any:
            first, second = cut(x)
            return of_result(x * cos + torch.cat((-second, first), dim=-1) * sin)

        return rotate(q[1](inputs[q[0]])), rotate(k[1](inputs[k[0]]))

    words = " ".join(["rotation", *d.words])
    return Spelling(words, "canonicalize_rope", 2, dtype, fn, tuple(d.inputs), rows=True)


FAMILIES = (*[activation] * 5, *[norm] * 3, add_norm, rotation)


def draw(count: int, seed: int) -> list[Spelling]:
    """So many that eager runs, every second one in plain words."""
    source, found = random.Random(seed), []
    while len(found) < count:
        family = source.choice(FAMILIES)
        spelling = family(Draw(source, risk=0.0 if len(found) % 2 else 0.25))
        try:
            with torch.inference_mode():
                spelling.fn(*spelling.inputs)
        except (RuntimeError, NotImplementedError, IndexError, ValueError):
            continue
        found.append(spelling)
    return found
