"""What ``silu_mul`` and ``gelu_tanh_mul`` share: everything but the activation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ._launch import Launch, run_launches
from ._op import Case, Cost, Implementation, OpDesc, SemanticOp
from .launches import activation as kernels


def _check(gate_up: Tensor, up: Tensor | None) -> None:
    width = gate_up.shape[-1]
    if up is not None:
        if gate_up.shape != up.shape or gate_up.dtype != up.dtype:
            raise ValueError(
                f"gate is {gate_up.dtype}{list(gate_up.shape)}, up {up.dtype}{list(up.shape)}: "
                "expected the same"
            )
    elif width % 2:
        raise ValueError(f"gate_up has last dimension {width}, expected an even one: gate then up")


def gate_and_up(gate_up: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both in float32.  Raises ValueError when the last dimension is odd, or gate and up differ."""
    _check(gate_up, up)
    if up is not None:
        return gate_up.float(), up.float()
    gate, up = gate_up.float().chunk(2, dim=-1)
    return gate, up


def _fake(gate_up: Tensor, up: Tensor | None = None) -> Tensor:
    _check(gate_up, up)
    width = gate_up.shape[-1] // (2 if up is None else 1)
    return gate_up.new_empty((*gate_up.shape[:-1], width))


def _cases(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Iterator[Case]:
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


def gated_op(name: str, reference: Callable[..., Tensor], activation: str) -> SemanticOp:
    """The op ``name``: [..., 2 * I] -> [..., I]; ``activation`` is the kernel's constant."""

    def launches(gate_up: Tensor, up: Tensor | None = None) -> tuple[list[Launch], Tensor]:
        _check(gate_up, up)
        return kernels.gated_activation(gate_up, up, activation)

    return SemanticOp(
        name=name,
        reference=reference,
        fake=_fake,
        cases=_cases,
        cost=_cost,
        implementations=(
            Implementation("triton", run_launches(launches), devices=("cuda",), launches=launches),
            Implementation("native", reference, inline=True),
        ),
    )
