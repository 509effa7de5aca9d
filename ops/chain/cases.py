"""Draws calls of chains: the chains that models have, and what a stage can be besides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ...config.weight_format import STORED_FORMATS
from ..collective.all_reduce import CASES_GROUP
from ..core.desc import Case, Draw, Tolerance
from ..core.float8 import E4M3
from ..core.tiles import cdiv
from ..experts.fused_moe import CLAMPED, moe_args
from ..experts.moe import Call as ExpertsCall
from ..linear.desc import BLOCK
from ..linear.formats import quantize
from .row_stages import Add, AddNorm, Norm, Scale
from .stages import Act, AllReduce, Chain, Experts, Linear, Stage

_MOVED = Tolerance(0.25, 0.1)
"""Results are of size one.  Each FP8 layer moves them by 2 % where a kernel rounds an x to another
neighbour in FP8 than the reference does, or not to FP8 at all."""
_FP8 = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), _MOVED)
# On a CPU only bfloat16, whose sums another order moves by a bit, meets other neighbours.
_FP8_ON_CPU = {
    torch.float32: Tolerance(1e-2, 1e-2),
    torch.float16: Tolerance(2e-2, 2e-2),
    torch.bfloat16: _MOVED,
}


@dataclass
class Drawn:
    """A chain that grows stage by stage, each with random operands that fit what comes before.

    Attributes:
        draw: the source of random numbers.
        x, residual: what the chain is given.
        reduce: norms sum over ranks.
    """

    draw: Draw
    x: Tensor
    residual: Tensor
    reduce: bool = False
    stages: list[Stage] = field(default_factory=list)
    operands: list[Tensor] = field(default_factory=list)

    @property
    def hidden(self) -> int:
        return self.residual.shape[-1]

    def add(self, stage: Stage, *operands: Tensor) -> Drawn:
        self.stages.append(stage)
        self.operands += operands
        return self

    def linear(
        self,
        n: int,
        k: int,
        activation: str | None = None,
        bias: bool = False,
        fp8: int | None = None,
        size: float = 1.0,
        stored: str | None = None,
    ) -> Drawn:
        """A layer of [n, k]; an x of size one gives results of ``size``.  ``fp8`` is the number of
        columns that share a scale of x, ``stored`` the weight's format."""
        draw = self.draw
        tensors = {"weight": (draw.randn(n, k) * size * k**-0.5).to(draw.dtype)}
        if bias:
            tensors["bias"] = (size * draw.randn(n)).to(draw.dtype)
        if fp8 is not None:
            shape = (cdiv(n, BLOCK), cdiv(k, BLOCK)) if fp8 else (n, 1)
            tensors["weight"] = (draw.randn(n, k) * 100).clamp(-448, 448).to(E4M3)
            tensors["weight_scale"] = (0.75 + draw.rand(*shape) / 2) * size / (100 * k**0.5)
        if stored is not None:
            numbers = draw.randn(n, k) * size * k**-0.5
            tensors |= quantize(STORED_FORMATS[stored], numbers)
        how = {"activation": activation, "group_size": fp8, "weight_format": stored}
        names = [name for name in Linear.takes() if name in tensors]
        tensors = {name: tensors[name] for name in names}
        stage = Linear(tensors=tuple(names), **how)  # type: ignore[arg-type]
        return self.add(stage, *tensors.values())

    def norm(
        self,
        fp8: int | None = None,
        offset: float | None = None,
        spread: float = 0.25,
        bias: bool | None = None,
        size: float = 1.0,
    ) -> Drawn:
        """A norm of the sum, of results of ``size``: a layer norm if ``bias`` says whether it has
        one."""
        if bias is not None:
            weights = self.layer_norm(bias)
            stage = AddNorm(tensors=tuple(weights), eps=1e-5, center=True)
            return self.add(stage, *weights.values())
        weight = size * (1 + self.draw.randn(self.hidden) * spread) - (offset or 0)
        eps = 1e-5 if len(self.stages) < 3 else 1e-6
        stage = AddNorm(eps=eps, offset=offset, group_size=fp8, reduce=self.reduce)
        return self.add(stage, weight.to(self.draw.dtype))

    def layer_norm(self, bias: bool) -> dict[str, Tensor]:
        """The weights of a layer norm."""
        weight, shift = (self.draw.randn(self.hidden) / 4 for _ in range(2))
        weights = {"weight": (1 + weight).to(self.draw.dtype)}
        return {**weights, "bias": shift.to(self.draw.dtype)} if bias else weights

    def case(self, label: str, tolerances: Any = None) -> Case:
        args = (self.x, self.residual, self.operands, str(Chain(tuple(self.stages))))
        return Case(label, (*args, CASES_GROUP) if self.reduce else args, tolerances)


def cases(
    dtype: torch.dtype, device: torch.device, gen: torch.Generator, over_ranks: bool = False
) -> Iterator[Case]:
    """The cases of ``chain``, or of ``chain_over_ranks``."""
    draw = Draw(dtype, device, gen)
    on_gpu = device.type == "cuda"
    yield from _dense(draw, over_ranks)
    yield from _fp8(draw, over_ranks, _FP8 if on_gpu else _FP8_ON_CPU)
    if over_ranks:
        yield _post_normed(draw, "post-norm over ranks", over_ranks)
        if on_gpu:
            yield from _large_fp8(draw, (1, 2), over_ranks)
        return
    yield _post_normed(draw, "post-norm", over_ranks)
    yield from _of_rows(draw)
    yield from _experts(draw, on_gpu)
    if on_gpu:  # large enough for the streaming kernels, too large to interpret
        yield from _large(draw)


def _between(draw: Draw, rows: tuple[int, ...], k: int, hidden: int, reduce: bool) -> Drawn:
    """A chain of x [rows, k] without stages; the residual stream has outliers."""
    residual = draw.randn(*rows, hidden)
    residual[draw.randn(*rows, hidden) > 3] *= 20
    x = draw.randn(*rows, k).to(draw.dtype)
    return Drawn(draw, x, residual.to(draw.dtype), reduce)


def _pair(
    draw: Draw,
    label: str,
    rows: tuple[int, ...],
    k: int,
    hidden: int,
    n: int,
    activation: str | None = None,
    bias: bool = False,
    first_bias: bool = False,
    reduce: bool = False,
) -> Case:
    """Two layers with a norm between them."""
    made = _between(draw, rows, k, hidden, reduce)
    made.linear(hidden, k, bias=first_bias).norm()
    return made.linear(n, hidden, activation, bias=bias).case(label)


def _dense(draw: Draw, reduce: bool) -> Iterator[Case]:
    yield _pair(draw, "one row", (1,), 64, 96, 80, reduce=reduce)
    yield _pair(draw, "SiLU", (5,), 40, 64, 2 * 48, "silu", reduce=reduce)
    yield _pair(draw, "odd sizes", (19,), 37, 72 if reduce else 77, 31, bias=True, reduce=reduce)
    sizes = (2, 3), 32, 40, 2 * 24
    yield _pair(draw, "three dimensions, GELU", *sizes, "gelu_tanh", reduce=reduce)
    biases = (True, True, reduce)
    yield _pair(draw, "two biases, SiLU", (3,), 32, 48, 2 * 40, "silu", *biases)
    yield _pair(draw, "no rows", (0,), 16, 32, 16, reduce=reduce)
    made = _between(draw, (7,), 48, 64, reduce).linear(64, 48).norm().linear(2 * 96, 64, "silu")
    yield made.linear(64, 96).norm().linear(80, 64).case("whole layer")
    made = _between(draw, (3,), 32, 48, reduce).linear(48, 32).norm(offset=1.0)
    yield made.linear(40, 48).case("offset norm")
    if not reduce:
        yield from _few_bits(draw)


def _few_bits(draw: Draw) -> Iterator[Case]:
    sizes = {"int4_g128": 128, "int4_zero_g32": 96, "mxfp4": 64}
    for name, hidden in sizes.items():
        made = _between(draw, (3,), 2 * hidden, hidden, False)
        made.linear(hidden, 2 * hidden, stored=name, bias=name == "mxfp4").norm(offset=1.0)
        made.linear(2 * 128, hidden, "silu", stored=name).linear(hidden, 128, stored=name)
        made.norm().linear(80, hidden, bias=True, stored=name)
        yield made.case(f"whole layer, {name}")


def _post_normed(draw: Draw, label: str, reduce: bool) -> Case:
    made = _between(draw, (5,), 40, 64, reduce).linear(64, 40)
    if reduce:
        made.add(AllReduce())
    weight = (1 + draw.randn(64) / 4).to(draw.dtype)
    made.add(Norm(eps=1e-6, offset=1.0), weight)
    made.reduce = False  # what is added is the same on every rank already
    made.norm(offset=1.0).linear(2 * 32, 64, "gelu_tanh")
    made.reduce = reduce
    return made.case(label)


def _of_rows(draw: Draw) -> Iterator[Case]:
    """Chains without a layer."""

    def begun(rows: tuple[int, ...], hidden: int) -> Drawn:
        return _between(draw, rows, hidden, hidden, False)

    weights = [(1 + draw.randn(96) / 4).to(draw.dtype) for _ in range(2)]
    made = begun((1,), 96).add(Norm(eps=1e-6, offset=1.0), weights[0] - 1).norm(offset=1.0)
    yield made.case("rows, sandwich")
    wide = (1 + draw.randn(1001) / 4).to(draw.dtype)
    yield begun((2, 3), 1001).add(Norm(eps=1e-5), wide).add(Add()).case("rows, post-norm and add")
    yield begun((5,), 77).add(Scale(factor=0.22)).norm().case("rows, product")
    made = begun((7,), 96).add(Norm(eps=1e-6), weights[0]).add(Add()).add(Scale(factor=0.7))
    yield made.add(Norm(eps=1e-5, offset=0.0), weights[1].float()).case("rows, product of the sum")
    made = begun((4,), 96).add(Norm(eps=1e-6), weights[0]).add(Add()).add(Scale(factor=0.7))
    yield made.case("rows, ends in the product of the sum")
    yield begun((0,), 96).add(Norm(eps=1e-6), weights[0]).norm().case("rows, none")
    yield begun((5,), 77).add(Scale(factor=0.22)).norm(bias=True).case("rows, layer norm")
    made = begun((3,), 96)
    first = made.layer_norm(bias=True)
    made.add(Norm(tensors=tuple(first), eps=1e-5, center=True), *first.values())
    yield made.norm(bias=False).case("rows, two layer norms")
    made = begun((3,), 96).linear(96, 96).add(Scale(factor=0.22)).norm(offset=1.0)
    yield made.linear(64, 96, "silu").case("residual multiplier, offset norm")
    made = _between(draw, (3,), 32, 48, False).linear(48, 32, bias=True).norm(bias=True)
    yield made.linear(40, 48, "relu", bias=True).case("layer norm, ReLU")


def _mlp(
    draw: Draw,
    rows: int,
    sizes: tuple[int, int, int, int],
    fp8: int = 0,
    activation: str = "silu",
    bias: bool = False,
    reduce: bool = False,
    offset: float | None = None,
) -> Drawn:
    """The FP8 layers of a decoder between two attentions; without the last if its size is 0.  A
    first norm with an offset leaves it to the layer behind to quantize."""
    k, hidden, inner, n = sizes
    made = Drawn(
        draw, draw.randn(rows, k).to(draw.dtype), draw.randn(rows, hidden).to(draw.dtype), reduce
    )
    made.linear(hidden, k, bias=bias, fp8=fp8).norm(None if offset else fp8, offset)
    made.linear(2 * inner, hidden, fp8=fp8)
    made.add(Act(activation=activation, group_size=fp8)).linear(hidden, inner, fp8=fp8)
    return made.norm(fp8).linear(n, hidden, bias=bias, fp8=fp8) if n else made


def _fp8(draw: Draw, reduce: bool, tolerances: Any) -> Iterator[Case]:
    made = _mlp(draw, 1, (48, 64, 96, 80), reduce=reduce)
    yield made.case("FP8 token, one token", tolerances)
    made = _mlp(draw, 5, (64, 32, 48, 0), activation="gelu_tanh", reduce=reduce)
    yield made.case("FP8 token, last layer, GELU", tolerances)
    made = _mlp(draw, 19, (32, 96, 64, 48), bias=True, reduce=reduce)
    yield made.case("FP8 token, biases", tolerances)
    yield _mlp(draw, 0, (32, 64, 48, 16), reduce=reduce).case("FP8 token, no tokens", tolerances)
    made = _mlp(draw, 3, (128, 128, 128, 128), fp8=BLOCK, reduce=reduce)
    yield made.case("FP8 block", tolerances)


_LAYER_NORMED = (
    (1, 768, 768, 3072, "relu", True),
    (6, 768, 768, 3072, "gelu_new", True),
    (7, 2048, 4096, 8192, "gelu", False),
    (13, 4096, 4096, 2 * 2048, "silu", True),
    (16, 2048, 2048, 4096, "relu2", True),
)
"""Layers between layer norms: rows, hidden size, in_features, inner size, activation, and whether
the norms have a bias."""


def _large(draw: Draw) -> Iterator[Case]:
    yield _pair(draw, "1 row, 8 MiB", (1,), 2048, 2048, 4096)
    yield _pair(draw, "7 rows, bias", (7,), 4096, 2048, 2049, bias=True)
    sizes = (1, 13), 2048, 3072, 2 * 1501
    yield _pair(draw, "13 rows of three dimensions, SiLU", *sizes, "silu")
    yield _pair(draw, "16 rows, GELU", (16,), 8192, 1024, 2 * 4096, "gelu_tanh")
    yield _pair(draw, "8 rows, two biases", (8,), 4096, 2048, 2048, bias=True, first_bias=True)
    yield _pair(draw, "17 rows", (17,), 2048, 2048, 2048)
    for rows, hidden, k, inner, act, bias in _LAYER_NORMED:
        made = _between(draw, (rows,), k, hidden, False).linear(hidden, k, bias=True)
        made.norm(bias=bias).linear(inner, hidden, act, bias=True)
        made.linear(hidden, inner // 2 if act == "silu" else inner)
        made.norm(bias=bias).linear(3 * hidden, hidden)
        yield made.case(f"{rows} rows, layer norms of {hidden}, {act}")
    made = _between(draw, (7,), 4096, 2048, False).linear(2048, 4096).add(Scale(factor=0.22))
    yield made.norm(offset=1.0).linear(2 * 2048, 2048, "silu").case("7 rows, product, offset norm")
    for rows in (1, 40):
        made = _between(draw, (rows,), 4096, 2048, False).linear(2048, 4096).norm()
        made.linear(2 * 4096, 2048, "silu").linear(2048, 4096).norm().linear(4096, 2048)
        yield made.case(f"{rows} rows, whole layer")
    yield from _large_fp8(draw, (1, 2, 3, 8, 40), False)
    made = _mlp(draw, 40, (4096, 2048, 4096, 4096), offset=1.0)
    yield made.case("40 tokens, FP8 token, offset norm", _FP8)
    made = _mlp(draw, 2, (4096, 2048, 4096, 4112), 0, "gelu_tanh", bias=True)
    yield made.case("2 tokens, FP8 token, GELU", _FP8)
    for fp8 in (0, BLOCK):
        made = _mlp(draw, 1, (4096, 2048, 4096, 0), fp8)
        yield made.case(f"1 token, FP8 {'block' if fp8 else 'token'}, last layer", _FP8)


def _large_fp8(draw: Draw, counts: tuple[int, ...], reduce: bool) -> Iterator[Case]:
    for rows, fp8 in product(counts, (0, BLOCK)):
        scheme = "block" if fp8 else "token"
        made = _mlp(draw, rows, (4096, 2048, 4096, 4096), fp8, reduce=reduce)
        yield made.case(f"{rows} tokens, FP8 {scheme}", _FP8)


def _moe(
    draw: Draw,
    label: str,
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    k: int,
    n: int,
    bias: bool = False,
    fp8: str = "",
    offset: float | None = None,
    **given: Any,
) -> Case:
    """Experts between two layers, or behind one if the second's size is 0.  The norm reads the
    tokens of ``moe_args`` and leaves them their size: no rounding changes their choice of experts,
    and one of a logit changes an expert's share by 1/64 at most."""
    call = ExpertsCall(*moe_args(draw, tokens, experts, top_k, hidden, inner, fp8=fp8, **given))
    first = draw.randn(tokens, hidden) * 1e-3
    size = {"": None, "token": 0, "block": BLOCK}[fp8]
    x = draw.randn(tokens, k).to(draw.dtype)
    made = Drawn(draw, x, (call.x.float() + first).to(draw.dtype))
    made.linear(hidden, k, bias=bias, fp8=size, size=1e-3)
    made.norm(spread=1e-3, size=call.x.float().square().mean().sqrt().item() if tokens else 1.0)
    held = {name: t for name in Experts.takes() if (t := getattr(call, name)) is not None}
    constants = {name: getattr(call, name) for name in Experts.constants()}
    made.add(Experts(tensors=tuple(held), **constants), *held.values())
    if n:
        made.norm(size, offset=offset).linear(n, hidden, bias=bias, fp8=size)
    return made.case(label, _FP8 if fp8 else None)


def _experts(draw: Draw, on_gpu: bool) -> Iterator[Case]:
    yield _moe(draw, "experts, one token", 1, 4, 2, 64, 32, 48, 40)
    yield _moe(draw, "experts, last layer, sorted", 11, 6, 3, 64, 48, 32, 0)
    grouped: dict[str, Any] = {"biased": True, "routing": ("sigmoid", True, 4, 2, 2.5)}
    yield _moe(draw, "experts, biases, groups", 3, 16, 3, 64, 32, 40, 24, bias=True, **grouped)
    yield _moe(draw, "experts, sorted", 10, 4, 2, 96, 32, 64, 48)
    clamped: dict[str, Any] = {"biases": True, "activation": CLAMPED}
    label = "experts, biases, a clamped gate, an offset"
    yield _moe(draw, label, 3, 4, 2, 64, 32, 40, 24, offset=0.5, **clamped)
    stored: dict[str, Any] = {**clamped, "weight_format": "mxfp4"}
    yield _moe(draw, "experts, MXFP4, sorted", 10, 4, 2, 64, 32, 40, 24, **stored)
    yield _moe(draw, "experts, no tokens", 0, 4, 2, 32, 16, 32, 16)
    for fp8 in ("token", "block"):
        sizes = (4, 2, 128, 128)
        yield _moe(draw, f"experts, FP8 {fp8}", 3, *sizes, 128, 128, fp8=fp8)
        label = f"experts, FP8 {fp8}, sorted, last"
        yield _moe(draw, label, 10, *sizes, 256, 0, bias=True, fp8=fp8)
    if not on_gpu:  # too large to interpret
        return
    large = (64, 8, 2048, 384, 4096)
    for tokens in (1, 7, 64, 600, 2048):
        yield _moe(draw, f"{tokens} tokens of 64 experts", tokens, *large, 2560)
    for tokens in (3, 600):
        yield _moe(draw, f"{tokens} tokens of experts, last", tokens, *large, 0)
    for tokens, fp8 in product((1, 2, 8, 40), ("token", "block")):
        label = f"{tokens} tokens of experts, FP8 {fp8}"
        yield _moe(draw, label, tokens, *large, 4096, bias=tokens == 2, fp8=fp8)
    yield _moe(draw, "1 token of experts, FP8 block, last", 1, *large, 0, fp8="block")
    for tokens, n in ((1, 1024), (7, 1024), (8, 0), (64, 1024)):
        few = (16, 4, 1024, 768, 1024)
        yield _moe(draw, f"{tokens} tokens of experts, MXFP4", tokens, *few, n, **stored)
