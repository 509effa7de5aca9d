"""``gated_linear_fp8`` is ``gated_linear`` on FP8 operands, quantized again by a static scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ._float8 import E4M3
from ._launch import Launch
from ._op import TOLERANCES, Case, Cost, Implementation, OpDesc, SemanticOp, TensorDesc, Tolerance
from ._skinny import linear_fp8_supports, streams_fp8
from .gated_linear import activation_op
from .launches.quant import quantize
from .linear_fp8 import OP as LINEAR_FP8
from .linear_fp8 import scheme_of
from .quantize import check, quantize_static


def gated_linear_fp8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype,
    activation: str,
    out_scale: Tensor,
) -> Tensor:
    """``quant_fp8_static(act(gate) * up, out_scale)`` of gate and up by ``linear_fp8``.

    Args:
        x, x_scale, weight, weight_scale: as of ``linear_fp8``, with one scale for all or one a
            token and a channel; the weight's rows are I of gate, then I of up.
        dtype: float32, bfloat16 or float16: gate and up are rounded to it, and their product.
        activation: "silu" or "gelu_tanh".
        out_scale: [1, 1] float32.

    Returns:
        [num_tokens, I] float8_e4m3fn.

    Raises:
        ValueError: shapes, dtypes or the activation are none of these.
    """
    return torch.ops.fw.gated_linear_fp8.default(  # type: ignore[no-any-return]
        x, x_scale, weight, weight_scale, dtype, activation, out_scale
    )


def _check(
    x: Any, x_scale: Any, weight: Any, weight_scale: Any, dtype: torch.dtype, activation: str
) -> None:
    activation_op(activation)
    scheme = scheme_of(x, x_scale, weight, weight_scale, None, dtype)
    if scheme == "block" or weight.shape[0] % 2:
        raise ValueError(
            f"gated_linear_fp8 of weight {[*weight.shape]} with scales {[*weight_scale.shape]}: "
            "expected an even number of rows, and one scale for all or one a row"
        )


def _reference(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype,
    activation: str,
    out_scale: Tensor,
) -> Tensor:
    _check(x, x_scale, weight, weight_scale, dtype, activation)
    gate_up = LINEAR_FP8.reference(x, x_scale, weight, weight_scale, None, dtype)
    return quantize_static(activation_op(activation).reference(gate_up), out_scale)


def _fake(*args: Any) -> Tensor:
    x, _, weight, *_, out_scale = args
    _check(*args[:6])
    y: Tensor = x.new_empty((x.shape[0], weight.shape[0] // 2))
    check(y, out_scale)
    return y


def _in_turn(linear: str) -> Callable[..., Tensor]:
    """``linear_fp8`` by this implementation, then the kernel that activates and quantizes."""

    def run(*args: Any) -> Tensor:
        _check(*args[:6])
        *operands, dtype, activation, out_scale = args
        gate_up = LINEAR_FP8.implementation(linear).fn(*operands, None, dtype)
        launches, (y,) = quantize(gate_up, out_scale, activation)
        for launch in launches:
            launch.run()
        return y

    return run


def _skinny(*args: Any) -> Tensor:
    """The streaming kernel for few rows, else one after the other."""
    x, x_scale, weight, weight_scale, dtype, activation, out_scale = args
    if dtype != torch.bfloat16 or not streams_fp8(x, weight, weight_scale):
        return _IN_TURN(*args)
    return torch.ops.fw_cuda.skinny_gated_linear_fp8.default(  # type: ignore[no-any-return]
        x, x_scale, weight, weight_scale, activation, out_scale
    )


_IN_TURN = _in_turn("skinny")


def _native(*args: Any) -> Tensor:
    _check(*args[:6])
    *operands, dtype, activation, out_scale = args
    gate_up = LINEAR_FP8.implementation("native").fn(*operands, None, dtype)
    return quantize_static(activation_op(activation).reference(gate_up), out_scale)


def _native_supports(desc: OpDesc) -> str:
    try:
        _check(*(value for _, value in desc.args[:6]))
    except ValueError as error:
        return str(error)
    return LINEAR_FP8.implementation("native").supports(_product(desc))


def _product(desc: OpDesc) -> OpDesc:
    """The product in it."""
    args = (*desc.args[:4], ("bias", None), ("out_dtype", desc["dtype"]))
    return OpDesc(LINEAR_FP8.name, args, desc.device, desc.sm)


def _launches(*args: Any) -> tuple[list[Launch], Tensor]:
    """The launch that must be compiled: the one that activates and quantizes."""
    x, _, weight, _, dtype, activation, out_scale = args
    gate_up = x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)
    launches, (y,) = quantize(gate_up, out_scale, activation)
    return launches, y


def _skinny_launches(*args: Any) -> tuple[list[Launch], Tensor]:
    """And those of the product, where it is not streamed."""
    *operands, dtype, _, _ = args
    product = LINEAR_FP8.implementation("skinny").launches
    assert product is not None
    launches, y = _launches(*args)
    return [*product(*operands, None, dtype)[0], *launches], y


def _runs(*args: Any) -> tuple[str, ...]:
    x, _, weight, weight_scale, dtype, *_ = args
    if dtype == torch.bfloat16 and streams_fp8(x, weight, weight_scale):
        return ("skinny_gated_linear_fp8",)
    return ("linear_fp8 by rows", "_quant_kernel")


def _cases(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Iterator[Case]:
    def calls(label: str, m: int, n: int, k: int, activation: str = "silu") -> Iterator[Case]:
        def operand(rows: int) -> Tensor:
            values = 100 * torch.randn((rows, k), generator=gen, device=device)
            return values.clamp(-448, 448).to(E4M3)

        def scales(rows: int) -> Tensor:
            return (0.5 + torch.rand((rows, 1), generator=gen, device=device)) / 100

        x, weight, out_scale = operand(m), operand(2 * n), 0.05 + scales(1)
        for scheme, rows in (("tensor", (1, 1)), ("token", (m, 2 * n))):
            x_scale, weight_scale = scales(rows[0]), scales(rows[1]) * k**-0.5
            args = (x, x_scale, weight, weight_scale, dtype, activation, out_scale)
            yield Case(f"{label}, {scheme}", args)

    yield from calls("few rows", 3, 48, 512)
    yield from calls("one row, GELU", 1, 72, 128, "gelu_tanh")
    yield from calls("odd M, I, K", 19, 37, 77)
    yield from calls("no rows", 0, 16, 512)
    if device.type == "cuda":  # large enough for the streaming kernel
        yield from calls("1 row, 16 MiB", 1, 4096, 2048)
        yield from calls("7 rows, odd I, GELU", 7, 4104, 1152, "gelu_tanh")
        yield from calls("33 rows", 33, 4096, 2048)


def _cost(desc: OpDesc) -> Cost:
    rows, (width, in_features) = desc["x"].shape[0], desc["weight"].shape
    read = sum(value.nbytes for _, value in desc.args if isinstance(value, TensorDesc))
    written = rows * width // 2
    return Cost(bytes=read + written, flops=2 * rows * width * in_features + 6 * written)


OP = SemanticOp(
    name="gated_linear_fp8",
    reference=_reference,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        Implementation(
            "skinny",
            _skinny,
            linear_fp8_supports(_native_supports),
            devices=("cuda",),
            launches=_skinny_launches,
            runs=_runs,
        ),
        Implementation(
            "triton",
            _in_turn("native"),
            _native_supports,
            devices=("cuda",),
            launches=_launches,
            runs=lambda *_: ("cuBLASLt", "_quant_kernel"),
        ),
        Implementation("native", _native, _native_supports),
    ),
    # In units of out_scale: gate and up of a few units, each off by what tensor cores drop.
    tolerances={**TOLERANCES, E4M3: Tolerance(0.5, 2.0**-3)},
)
