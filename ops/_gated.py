"""Defines what ``silu_mul`` and ``gelu_tanh_mul`` share: everything but the activation itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from ._launch import Launch, run_launches
from ._op import Case, Cost, Implementation, OpDesc, SemanticOp
from .launches import activation as kernels


@dataclass(frozen=True)
class Gate:
    """Options of a gated activation beside ``act(gate) * up``, applied in this order.

    Attributes:
        alpha: the gate is multiplied by it inside of the logistic function.
        limit: the gate is clamped from above and ``up`` on both sides, before all else; None: not.
        up_offset: is added to ``up``.
        interleaved: columns of a packed tensor are pairs of a gate and its ``up``, not two halves.
    """

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    interleaved: bool = False


PLAIN = Gate()


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


def _fake(gate_up: Tensor, up: Tensor | None = None, *attributes: Any) -> Tensor:
    _check(gate_up, up, Gate(*attributes).interleaved)
    width = gate_up.shape[-1] // (2 if up is None else 1)
    return gate_up.new_empty((*gate_up.shape[:-1], width))


def _plain_cases(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Iterator[Case]:
    for shape in [(1, 2), (1, 2 * 1408), (7, 2 * 96), (33, 2 * 129), (3, 5, 2 * 64), (40, 4608)]:
        x = 2 * torch.randn(shape, generator=gen, device=device)
        yield Case(f"{list(shape)}", (x.to(dtype),))
    wide = torch.randn((5, 700), generator=gen, device=device).to(dtype)
    yield Case("slice of [5, 700]", (wide[:, 100:356],))
    yield Case("gate and up of their own", (wide[:, :129].contiguous(), wide[:, 300:429]))
    yield Case("three dimensions of each", (wide.view(5, 7, 100), wide.view(5, 7, 100) + 1))
    yield Case("columns as rows", (wide[:, :5].t(), wide[:, 300:305]))
    extreme = torch.tensor([-3e4, -200.0, -0.0, 0.0, 200.0, 240.0], device=device).repeat(3, 2)
    yield Case("saturated gates", (extreme.to(dtype),))
    yield Case("no tokens", (extreme[:0].to(dtype),))


def _cost(desc: OpDesc) -> Cost:
    gate_up, up = desc["gate_up"], desc["up"]
    out = gate_up.numel // 2 if up is None else gate_up.numel
    return Cost(bytes=3 * out * gate_up.dtype.itemsize, flops=5 * out)


def gated_op(
    name: str, reference: Callable[..., Tensor], activation: str, gates: Sequence[Gate] = ()
) -> SemanticOp:
    """The op ``name``: [..., 2 * I] -> [..., I]; ``activation`` is the kernel's constant.
    ``gates`` are tried beside ``PLAIN``, if ``reference`` has the attributes of a ``Gate``."""

    def launches(
        gate_up: Tensor, up: Tensor | None = None, *attributes: Any
    ) -> tuple[list[Launch], Tensor]:
        how = Gate(*attributes)
        _check(gate_up, up, how.interleaved)
        return kernels.gated_activation(gate_up, up, activation, **asdict(how))

    def cases(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Iterator[Case]:
        yield from _plain_cases(dtype, device, gen)
        for how in gates:
            x = (6 * torch.randn((35, 2 * 129), generator=gen, device=device)).to(dtype)
            yield Case(f"packed, {how}", (x, None, *astuple(how)))
            if not how.interleaved:
                yield Case(f"apart, {how}", (*x.chunk(2, dim=-1), *astuple(how)))

    return SemanticOp(
        name=name,
        reference=reference,
        fake=_fake,
        cases=cases,
        cost=_cost,
        implementations=(
            Implementation("triton", run_launches(launches), devices=("cuda",), launches=launches),
            Implementation("native", reference, inline=True),
        ),
    )
