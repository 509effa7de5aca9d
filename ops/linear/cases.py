"""The calls with which kernels of ``linear`` are checked, and how far their results may be off."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...config.weight_format import STORED_FORMATS, W8A8, W8A8_STATIC
from ..core.desc import Case, Draw, Tolerance, drawn
from ..core.float8 import E4M3
from ..core.tiles import cdiv
from ..norm.gated_act import PLAIN_ACTS
from .formats import quantize


@drawn
def cases(draw: Draw) -> Iterator[Case]:
    dtype, randn = draw.dtype, draw.randn

    def call(
        label: str,
        rows: tuple[int, ...],
        n: int,
        k: int,
        bias: bool = False,
        activation: str | None = None,
        quantize: bool = False,
    ) -> Case:
        x = randn(*rows, k).to(dtype)
        weight = (randn(n, k) * k**-0.5).to(dtype)
        scale = 0.02 + draw.rand(1, 1) / 8 if quantize else None
        rest = (randn(n).to(dtype) if bias else None, None, None, None, activation, scale)
        return Case(label, (x, weight, *rest), _tolerances(activation, quantize))

    yield call("one row", (1,), 96, 64)
    yield call("bias", (5,), 128, 256, bias=True)
    yield call("odd M, N, K", (19,), 37, 77, bias=True)
    yield call("several row tiles", (150,), 160, 48)
    yield call("three dimensions", (2, 3), 40, 32)
    yield call("one feature", (3,), 1, 1, bias=True)
    yield call("deep", (2,), 33, 1031)
    yield call("no rows", (0,), 16, 32)
    x, weight, *_ = call("", (6,), 64, 160).args
    yield Case("slice of [6, 160]", (x[:, 32:96], weight[:, 32:96], None))
    yield call("SiLU, one row", (1,), 2 * 96, 64, activation="silu")
    yield call("GELU", (5,), 2 * 40, 256, activation="gelu_tanh")
    yield call("SiLU with bias, odd M, I, K", (19,), 2 * 37, 77, bias=True, activation="silu")
    yield call("SiLU, three dimensions", (2, 3), 2 * 40, 32, activation="silu")
    yield call("SiLU, no rows", (0,), 2 * 16, 32, activation="silu")
    yield from (call(f"{act}, odd M, N, K", (19,), 37, 77, True, act) for act in PLAIN_ACTS)
    yield call("quantized", (7,), 48, 64, quantize=True)
    yield call("GELU, quantized", (3,), 2 * 24, 64, activation="gelu_tanh", quantize=True)
    yield from _fp8_cases(draw)
    yield from _low_bit_cases(draw)
    if draw.device.type == "cuda":  # large enough for the streaming kernel, too large to interpret
        yield call("1 row, 8 MiB", (1,), 2048, 2048, bias=True)
        yield call("odd N, 7 rows", (7,), 4099, 1088)
        yield call("13 rows", (13,), 6144, 1024, bias=True)
        yield call("31 rows of three dimensions", (1, 31), 30001, 192)
        yield call("33 rows", (33,), 2048, 2048)
        x, weight, bias, *_ = call("", (9,), 2048, 2304, bias=True).args
        yield Case("slice of [9, 2304]", (x[:, 128:2176], weight[:, 128:2176], bias))
        yield call("SiLU, 1 row, 16 MiB", (1,), 2 * 2048, 2048, activation="silu")
        yield call("GELU, odd I, 7 rows", (7,), 2 * 2053, 1088, activation="gelu_tanh")
        yield call("SiLU, 13 rows", (1, 13), 2 * 3072, 1024, bias=True, activation="silu")
        yield call("SiLU, 32 rows", (32,), 2 * 15001, 192, activation="silu")
        yield call("SiLU, 33 rows", (33,), 2 * 2048, 2048, activation="silu")
        for activation in PLAIN_ACTS:
            yield call(f"{activation}, 7 rows", (7,), 4099, 1088, True, activation)
        yield call("quantized, 5 rows", (5,), 4096, 2048, bias=True, quantize=True)


def _fp8_cases(draw: Draw) -> Iterator[Case]:
    dtype = draw.dtype

    def scales(rows: int, columns: int) -> Tensor:
        return 0.5 + draw.rand(rows, columns)

    def values(rows: int, columns: int, size: float) -> Tensor:
        return (draw.randn(rows, columns) * size).clamp(-448, 448).to(E4M3)

    def calls(label: str, m: int, n: int, k: int, bias: bool = False) -> Iterator[Case]:
        x, weight = values(m, k, 1.0), values(n, k, 100.0)
        groups, unit = cdiv(k, 128), 100.0 * k**0.5
        added = draw.randn(n).to(dtype) if bias else None
        for scheme, x_scale, weight_scale in (
            ("tensor", scales(1, 1), scales(1, 1)),
            ("token", scales(m, 1), scales(n, 1)),
            ("block", scales(groups, m).t(), scales(cdiv(n, 128), groups)),
        ):
            args = (x, weight, added, x_scale, weight_scale / unit, dtype, None, None)
            yield Case(f"{label}, FP8 {scheme}", args, FP8)

    def gated(label: str, m: int, n: int, k: int, activation: str = "silu") -> Iterator[Case]:
        """Cases whose gates and ups are a few times the scale of the result."""
        x, weight = values(m, k, 100.0), values(2 * n, k, 100.0)
        out_scale = 0.05 + scales(1, 1) / 100
        for scheme, rows in (("tensor", (1, 1)), ("token", (m, 2 * n))):
            x_scale, weight_scale = (scales(count, 1) / 100 for count in rows)
            how = (x_scale, weight_scale * k**-0.5, dtype, activation, out_scale)
            yield Case(f"{label}, FP8 {scheme}", (x, weight, None, *how), FP8_GATED)

    yield from calls("few rows", 3, 96, 512)
    yield from calls("one row", 1, 144, 128)
    yield from calls("bias", 20, 256, 1024, bias=True)
    yield from calls("odd M, N, K", 19, 37, 77, bias=True)
    yield from calls("several tiles", 150, 272, 640)
    yield from calls("no rows", 0, 16, 512)
    if draw.device.type == "cuda":
        yield from calls("one row of Llama-3-8B", 1, 4096, 4096)
        yield from calls("deep", 70, 512, 14336, bias=True)
    yield from gated("SiLU, few rows", 3, 48, 512)
    yield from gated("GELU, one row", 1, 72, 128, "gelu_tanh")
    yield from gated("SiLU, odd M, I, K", 19, 37, 77)
    yield from gated("SiLU, no rows", 0, 16, 512)
    if draw.device.type == "cuda":  # large enough for the streaming kernel
        yield from gated("SiLU, 1 row, 16 MiB", 1, 4096, 2048)
        yield from gated("GELU, 7 rows, odd I", 7, 4104, 1152, "gelu_tanh")
        yield from gated("SiLU, 33 rows", 33, 4096, 2048)


def _low_bit_cases(draw: Draw) -> Iterator[Case]:
    def call(
        name: str,
        m: int,
        n: int,
        k: int,
        activation: str | None = None,
        bias: bool = False,
    ) -> Case:
        tensors = quantize(STORED_FORMATS[name], draw.randn(n, k) * k**-0.5)
        args = (
            *(draw.randn(m, k).to(draw.dtype), tensors["weight"]),
            *(draw.randn(n).to(draw.dtype) if bias else None, None, tensors["weight_scale"]),
            *(None, activation, None, tensors.get("weight_zero")),
            *(name, tensors.get("weight_row_scale")),
        )
        label = f"{name}, {m} rows of {k}" + (f", {activation}" if activation else "")
        return Case(label, args, _tolerances(activation, False))

    yield call("int4_g128", 1, 80, 512)
    yield call("int4_g128", 40, 144, 384, bias=True)
    yield call("int4_zero_g32", 19, 37, 160, bias=True)
    yield call("int4_zero_channel", 3, 64, 88)
    yield call("int4_g64", 5, 2 * 40, 192, "silu", bias=True)
    yield call("int4_g32", 65, 2 * 37, 96, "gelu_tanh")
    yield call("int8_channel", 2, 48, 100, "relu2")
    yield call("int8_zero_g64", 17, 96, 320)
    yield call("mxfp4", 7, 72, 288)
    yield call("nvfp4", 33, 64, 208, bias=True)
    yield call("mxfp4", 0, 16, 64, "silu")
    yield from _int8_cases(draw)
    if draw.device.type == "cuda":  # a model's sizes, which take splits
        for m in (1, 8, 24, 64, 128, 300):
            yield call("int4_g128", m, 2 * 1536, 4096, "silu")
            yield call("int4_zero_g32", m, 1024, 4096)
            yield call("mxfp4", m, 1024, 2880)
            yield call("int8_channel", m, 1024, 4096)


def _int8_cases(draw: Draw) -> Iterator[Case]:
    def call(
        name: str, m: int, n: int, k: int, activation: str | None = None, bias: bool = False
    ) -> Case:
        tensors = quantize(STORED_FORMATS[name], draw.randn(n, k) * k**-0.5)
        x = (draw.randn(m, k) * 40).round().clamp(-128, 127).to(torch.int8)
        x_scale = (0.5 + draw.rand(1 if STORED_FORMATS[name].static else m, 1)) / 40
        args = (
            *(x, tensors["weight"], draw.randn(n).to(draw.dtype) if bias else None),
            *(x_scale, tensors["weight_scale"], draw.dtype, activation, None, None, name),
        )
        label = f"{name}, {m} rows of {k}" + (f", {activation}" if activation else "")
        return Case(label, args, _tolerances(activation, False))

    yield call(W8A8, 1, 80, 512)
    yield call(W8A8, 40, 144, 384, bias=True)
    yield call(W8A8, 19, 2 * 37, 77, "silu")
    yield call(W8A8_STATIC, 33, 64, 208, bias=True)
    yield call(W8A8_STATIC, 1, 48, 100, "relu2")
    yield call(W8A8, 0, 16, 64)
    if draw.device.type == "cuda":  # a model's sizes, which take splits
        for m in (1, 8, 24, 64, 128, 300):
            yield call(W8A8, m, 1024, 4096)


PLAIN = {
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.bfloat16: Tolerance(1e-2, 1.6e-2),
    # cuBLAS may reduce split-K partial sums in float16.
    torch.float16: Tolerance(5e-3, 5e-3),
}
GATED = {
    # Products of two results, each off by a rounding.
    torch.float32: Tolerance(3e-5, 3e-5),
    torch.bfloat16: Tolerance(3e-2, 3.2e-2),
    torch.float16: Tolerance(1e-2, 1e-2),
}
FP8 = {
    # Results are sums of up to 5, from partial sums that tensor cores hold to 14 bits.
    torch.float32: Tolerance(4e-3, 1e-3),
    torch.bfloat16: Tolerance(1e-2, 1.6e-2),
    torch.float16: Tolerance(6e-3, 3e-3),
}
# In units of out_scale: gate and up of a few units, each off by what tensor cores drop.
FP8_GATED = {**FP8, E4M3: Tolerance(0.5, 2.0**-3)}


def _tolerances(activation: str | None, quantize: bool) -> dict[torch.dtype, Tolerance]:
    """Tolerances of the cases; a quantized result may be off by one FP8 value."""
    found = PLAIN if activation is None else GATED
    return {**found, E4M3: Tolerance(0.5, 2.0**-3)} if quantize else found
