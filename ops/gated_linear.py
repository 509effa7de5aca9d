"""``gated_linear`` computes an MLP's gate and up projections and their gated activation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._launch import Launch
from ._op import Case, Cost, Implementation, OpDesc, SemanticOp, Tolerance
from ._skinny import refuses_bf16, rows_to_stream
from .gated_act import ACTIVATIONS, GATED_ACTS
from .launches import activation as kernels
from .linear import OP as LINEAR

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def gated_linear(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    """``act(x @ gate.T) * (x @ up.T)`` (Shazeer, 2020, GLU Variants, eq. 6).

    Args:
        x: [..., in_features], floating point.
        weight: [2 * I, in_features], same dtype: I rows of gate, then I rows of up.
        activation: "silu" or "gelu_tanh".

    Returns:
        [..., I] in x's dtype, contiguous; rounded as ``linear`` and then ``silu_mul`` or
        ``gelu_tanh_mul`` round.

    Raises:
        ValueError: another activation, an odd number of rows, or x and weight disagree on
            in_features (native: PyTorch's RuntimeError).
    """
    return torch.ops.fw.gated_linear.default(  # type: ignore[no-any-return]
        x, weight, activation
    )


def activation_op(name: str) -> SemanticOp:
    """``silu_mul`` or ``gelu_tanh_mul``.  Raises ValueError for another activation."""
    if name not in ACTIVATIONS:
        expected = " or ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"a gated linear layer's activation is {name!r}, expected {expected}")
    return GATED_ACTS[name, ""]


def _reference(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    y: Tensor = activation_op(activation).reference(F.linear(x, weight))
    return y


def _fake(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    activation_op(activation)
    if x.shape[-1] != weight.shape[1] or weight.shape[0] % 2:
        raise ValueError(
            f"gated_linear: x has {x.shape[-1]} features and weight is {list(weight.shape)}, "
            f"expected [2 * I, {x.shape[-1]}]"
        )
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2))


def _in_turn(product: Product, x: Tensor, weight: Tensor, activation: str) -> Tensor:
    """The product, then the activation's kernel."""
    activation_op(activation)
    launches, y = kernels.gated_activation(product(x, weight, None), None, activation)
    for launch in launches:
        launch.run()
    return y


def _triton(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    return _in_turn(F.linear, x, weight, activation)


def _skinny(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    """The streaming kernel for few rows, else one after the other."""
    rows = rows_to_stream(x, weight)
    if rows is None:
        return _in_turn(LINEAR.implementation("skinny").fn, x, weight, activation)
    y: Tensor = torch.ops.fw_cuda.skinny_gated_linear.default(rows, weight, activation)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0] // 2)


def _runs(*args: Any) -> tuple[str, ...]:
    few = rows_to_stream(*args[:2]) is not None
    return ("skinny_gated_linear",) if few else runs_in_turn(*args)


def runs_in_turn(*_: Any) -> tuple[str, ...]:
    """The kernels of a product and its gated activation, one by one."""
    return "cuBLAS", "_gated_activation_kernel"


def _launches(x: Tensor, weight: Tensor, activation: str) -> tuple[list[Launch], Tensor]:
    """The launch that must be compiled: the activation's."""
    gate_up = x.new_empty((*x.shape[:-1], weight.shape[0]))
    return kernels.gated_activation(gate_up, None, activation)


def _cases(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Iterator[Case]:
    def call(label: str, rows: tuple[int, ...], n: int, k: int, activation: str = "silu") -> Case:
        x = torch.randn((*rows, k), generator=gen, device=device)
        weight = torch.randn((2 * n, k), generator=gen, device=device) * k**-0.5
        return Case(label, (x.to(dtype), weight.to(dtype), activation))

    yield call("one row", (1,), 96, 64)
    yield call("gelu", (5,), 40, 256, "gelu_tanh")
    yield call("odd M, I, K", (19,), 37, 77)
    yield call("three dimensions", (2, 3), 40, 32)
    yield call("no rows", (0,), 16, 32)
    if device.type == "cuda":  # large enough for the streaming kernel
        yield call("1 row, 16 MiB", (1,), 2048, 2048)
        yield call("odd I, 7 rows", (7,), 2053, 1088, "gelu_tanh")
        yield call("13 rows of three dimensions", (1, 13), 3072, 1024)
        yield call("32 rows", (32,), 15001, 192)
        yield call("33 rows", (33,), 2048, 2048)


def _cost(desc: OpDesc) -> Cost:
    x, weight = desc["x"], desc["weight"]
    rows, (width, in_features) = x.numel // x.shape[-1], weight.shape
    written = rows * width // 2
    return Cost(
        bytes=x.nbytes + weight.nbytes + written * x.dtype.itemsize,
        flops=2 * rows * width * in_features + 5 * written,
    )


OP = SemanticOp(
    name="gated_linear",
    reference=_reference,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        Implementation(
            "skinny",
            _skinny,
            refuses_bf16,
            devices=("cuda",),
            launches=_launches,
            runs=_runs,
        ),
        Implementation("triton", _triton, devices=("cuda",), launches=_launches, runs=runs_in_turn),
        Implementation("native", _reference, inline=True),
    ),
    # Products of two results of linear, each off by a rounding.
    tolerances={
        torch.float32: Tolerance(3e-5, 3e-5),
        torch.bfloat16: Tolerance(3e-2, 3.2e-2),
        torch.float16: Tolerance(1e-2, 1e-2),
    },
)
