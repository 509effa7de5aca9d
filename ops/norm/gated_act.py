"""The gated activations: ``silu_mul | gelu_tanh_mul``, alone or with ``_quant_`` and a scheme.

``GATED_ACTS`` has the op of each activation and kind of quantization.  All compute
``act(gate) * up`` in float32 and round it once; those that quantize take one packed tensor without
options, and round to its dtype before they do.  Models call ``silu_mul`` or ``gelu_tanh_mul``, or
spell the activation out, which ``fuse_act`` raises.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.desc import Case, Cases, Cost, Draw, OpDesc, drawn
from ..core.gate import PLAIN, Gate, read_spelled
from ..core.launch import Launches
from ..core.op import Implementation, SemanticOp, parameter, signed, triton
from ..launches import activation as kernels
from .quantize import ONE_STEP, SCHEMES, quantizing_op, schemes


def _check(gate_up: Tensor, up: Tensor | None, interleaved: bool = False) -> None:
    width = gate_up.shape[-1]
    if up is not None and interleaved:
        raise ValueError("gate and up are two tensors, and interleaved is True: expected one")
    if up is not None:
        if gate_up.shape != up.shape or gate_up.dtype != up.dtype:
            raise ValueError(
                f"gate is {gate_up.dtype}{list(gate_up.shape)}, up {up.dtype}{list(up.shape)}: "
                "expected the same"
            )
    elif width % 2:
        raise ValueError(f"gate_up has last dimension {width}, expected an even one: gate then up")


def gate_and_up(gate_up: Tensor, up: Tensor | None, how: Gate = PLAIN) -> tuple[Tensor, Tensor]:
    """Both in float32, clamped, and ``up`` with its offset.  Raises ValueError when the last
    dimension is odd, or gate and up differ."""
    _check(gate_up, up, how.interleaved)
    if up is not None:
        gate, up = gate_up.float(), up.float()
    elif how.interleaved:
        gate, up = gate_up[..., ::2].float(), gate_up[..., 1::2].float()
    else:
        gate, up = gate_up.float().chunk(2, dim=-1)
    if how.limit is not None:
        gate, up = gate.clamp(max=how.limit), up.clamp(-how.limit, how.limit)
    return gate, up + how.up_offset if how.up_offset else up


def silu_mul(
    gate_up: Tensor,
    up: Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    interleaved: bool = False,
) -> Tensor:
    """``silu(gate) * up`` (Shazeer, 2020, GLU Variants, eq. 6); with attributes
    ``gate * sigmoid(alpha * gate) * (up + up_offset)``, both clamped first.

    gpt-oss has alpha 1.702, limit 7, up_offset 1 and interleaved columns.

    Args:
        gate_up: [..., 2 * I], floating point: I gate columns, then I up columns; or, with ``up``,
            the gate columns alone, [..., I].
        up: [..., I], like the gate; None where it is part of ``gate_up``.
        alpha, limit, up_offset, interleaved: as of ``Gate``.

    Returns:
        [..., I] in the same dtype, contiguous; computed in float32 and rounded once.

    Raises:
        ValueError: the last dimension is odd, gate and up differ, or are interleaved and two.
    """
    attributes = (alpha, limit, up_offset, interleaved)
    return torch.ops.fw.silu_mul.default(  # type: ignore[no-any-return]
        gate_up, up, *(() if Gate(*attributes) == Gate() else attributes)
    )


def gelu_tanh_mul(gate_up: Tensor, up: Tensor | None = None) -> Tensor:
    """``gelu(gate) * up`` as ``silu_mul``, with tanh (Hendrycks and Gimpel, 2016, section 2)."""
    return torch.ops.fw.gelu_tanh_mul.default(gate_up, up)  # type: ignore[no-any-return]


def _silu(gate: Tensor, alpha: float) -> Tensor:
    return F.silu(gate) if alpha == 1 else gate * torch.sigmoid(alpha * gate)


def _gelu_tanh(gate: Tensor, alpha: float) -> Tensor:
    return F.gelu(gate, approximate="tanh")


@dataclass(frozen=True)
class Activation:
    """One row of the table of activations.

    Attributes:
        title: the function's name in what people read.
        fn: the activation of a gate in float32, with the ``alpha`` of a ``Gate``.
        options: the op's parameters after ``up``: the fields of ``Gate`` that it takes.
        gates: options that its cases try beside ``PLAIN``.
    """

    title: str
    fn: Callable[[Tensor, float], Tensor]
    options: list[inspect.Parameter] = field(default_factory=list)
    gates: Sequence[Gate] = ()


ACTIVATIONS = {
    "silu": Activation(
        "SiLU",
        _silu,
        [
            parameter("alpha", float, 1.0),
            parameter("limit", float | None, None),
            parameter("up_offset", float, 0.0),
            parameter("interleaved", bool, False),
        ],
        [Gate(1.702, 7.0, 1.0, interleaved=True), Gate(1.702, limit=2.5), Gate(interleaved=True)],
    ),
    "gelu_tanh": Activation("GELU", _gelu_tanh),
}
"""The axis "activation", by the name that kernels and fused ops know."""

PLAIN_ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
}
"""The activations that gate nothing, of a linear layer's sums."""


def activate(y: Tensor, activation: str) -> Tensor:
    """The activation of y, gated or not, with the options of its text, in plain ATen."""
    if (plain := PLAIN_ACTS.get(activation)) is not None:
        return plain(y.float()).to(y.dtype)
    name, how = read_spelled(activation)
    return _gated(name, y, None, *astuple(how))


def _gated(activation: str, gate_up: Tensor, up: Tensor | None, *attributes: Any) -> Tensor:
    how = Gate(*attributes)
    gate, up = gate_and_up(gate_up, up, how)
    activated = ACTIVATIONS[activation].fn(gate, how.alpha)
    return (activated * up).to(gate_up.dtype).contiguous()


def _plain_cases(draw: Draw) -> Iterator[Case]:
    dtype = draw.dtype
    for shape in [(1, 2), (1, 2 * 1408), (7, 2 * 96), (33, 2 * 129), (3, 5, 2 * 64), (40, 4608)]:
        x = 2 * draw.randn(*shape)
        yield Case(f"{list(shape)}", (x.to(dtype),))
    wide = draw.randn(5, 700).to(dtype)
    yield Case("slice of [5, 700]", (wide[:, 100:356],))
    yield Case("gate and up of their own", (wide[:, :129].contiguous(), wide[:, 300:429]))
    yield Case("three dimensions of each", (wide.view(5, 7, 100), wide.view(5, 7, 100) + 1))
    yield Case("columns as rows", (wide[:, :5].t(), wide[:, 300:305]))
    extreme = torch.tensor([-3e4, -200.0, -0.0, 0.0, 200.0, 240.0], device=draw.device).repeat(3, 2)
    yield Case("saturated gates", (extreme.to(dtype),))
    yield Case("no tokens", (extreme[:0].to(dtype),))


def _cost(desc: OpDesc) -> Cost:
    gate_up, up = desc["gate_up"], desc["up"]
    out = gate_up.numel // 2 if up is None else gate_up.numel
    return Cost(bytes=3 * out * gate_up.dtype.itemsize, flops=5 * out)


def _op(activation: str) -> SemanticOp:
    """The op of an activation alone."""
    row = ACTIVATIONS[activation]

    def reference(gate_up: Tensor, up: Tensor | None = None, *attributes: Any) -> Tensor:
        return _gated(activation, gate_up, up, *attributes)

    def fake(gate_up: Tensor, up: Tensor | None = None, *attributes: Any) -> Tensor:
        _check(gate_up, up, Gate(*attributes).interleaved)
        width = gate_up.shape[-1] // (2 if up is None else 1)
        return gate_up.new_empty((*gate_up.shape[:-1], width))

    def launches(gate_up: Tensor, up: Tensor | None = None, *attributes: Any) -> Launches[Tensor]:
        how = Gate(*attributes)
        _check(gate_up, up, how.interleaved)
        return kernels.gated_activation(gate_up, up, activation, **asdict(how))

    @drawn
    def cases(draw: Draw) -> Iterator[Case]:
        yield from _plain_cases(draw)
        for how in row.gates:
            x = (6 * draw.randn(35, 2 * 129)).to(draw.dtype)
            yield Case(f"packed, {how}", (x, None, *astuple(how)))
            if not how.interleaved:
                yield Case(f"apart, {how}", (*x.chunk(2, dim=-1), *astuple(how)))

    parameters = [parameter("gate_up", Tensor), parameter("up", Tensor | None, None)]
    return SemanticOp(
        name=f"{activation}_mul",
        reference=signed(reference, [*parameters, *row.options], 1),
        fake=fake,
        cases=cases,
        cost=_cost,
        implementations=(
            triton(launches),
            Implementation("native", reference, inline=True),
        ),
    )


def _quantized_cases(quant: str) -> Cases:
    @drawn
    def cases(draw: Draw) -> Iterator[Case]:
        def calls(label: str, x: Tensor) -> Iterator[Case]:
            for name, scheme in schemes(quant, draw.device, draw.gen, x.shape[1] // 2):
                yield Case(f"{label}, {name}", (x.to(draw.dtype), scheme))

        def randn(*shape: int) -> Tensor:
            return 2 * draw.randn(*shape)

        for shape in [(7, 512), (1, 256), (33, 2 * 129), (3, 2 * 4224), (40, 4608)]:
            yield from calls(f"{list(shape)}", randn(*shape))
        # The only value of its scale becomes 448 however small it is.  Below -4, PyTorch's
        # 1 + tanh(u) in float32 is nothing but rounding, so gates stay above.
        yield from calls("[2, 2]", randn(2, 2).clamp(min=-3))
        outliers = randn(9, 768)
        outliers[randn(9, 768) > 4] *= 30
        outliers[4] = 0
        outliers[5, :384] = -200.0  # a gate that is shut
        yield from calls("outliers, zeros", outliers)
        yield from calls("slice of [6, 1000]", randn(6, 1000)[:, 100:868])
        yield from calls("no rows", randn(0, 256))

    return cases


def _quantizing_op(activation: str, quant: str) -> SemanticOp:
    """The op of an activation whose result is quantized: x is gate | up."""
    return quantizing_op(
        f"{activation}_mul_quant_{quant}",
        quant,
        _quantized_cases(quant),
        activation=activation,
        before=lambda x: _gated(activation, x, None),
        flops=5,
        tolerances=ONE_STEP,
    )


GATED_ACTS = {
    (activation, quant): _quantizing_op(activation, quant) if quant else _op(activation)
    for activation in ACTIVATIONS
    for quant in ("", *SCHEMES)
}
"""The op of each activation and kind of quantization, "" for none."""
_PLAIN_OPS = {op.overload(): name for (name, quant), op in GATED_ACTS.items() if not quant}


def activation_of(target: Any) -> str | None:
    """The activation of a dispatcher op ``fw::name`` that does not quantize; None for any other."""
    return _PLAIN_OPS.get(target)
