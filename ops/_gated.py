"""What ``silu_mul`` and ``gelu_tanh_mul`` share: everything but the activation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ._launch import Launch, run_launches
from ._op import Case, Cost, Implementation, OpDesc, SemanticOp
from .launches import activation as kernels


def _check_even(gate_up: Tensor) -> None:
    width = gate_up.shape[-1]
    if width % 2:
        raise ValueError(f"gate_up has last dimension {width}, expected an even one: gate then up")


def split_halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """The gate and up halves in float32.  Raises ValueError when the last dimension is odd."""
    _check_even(gate_up)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return gate, up


def _fake(gate_up: Tensor) -> Tensor:
    _check_even(gate_up)
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def _cases(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Iterator[Case]:
    for shape in [(1, 2), (1, 2 * 1408), (7, 2 * 96), (33, 2 * 129), (3, 5, 2 * 64), (40, 4608)]:
        x = 2 * torch.randn(shape, generator=gen, device=device)
        yield Case(f"{list(shape)}", (x.to(dtype),))
    wide = torch.randn((5, 700), generator=gen, device=device).to(dtype)
    yield Case("slice of [5, 700]", (wide[:, 100:356],))
    extreme = torch.tensor([-3e4, -200.0, -0.0, 0.0, 200.0, 240.0], device=device).repeat(3, 2)
    yield Case("saturated gates", (extreme.to(dtype),))
    yield Case("no tokens", (extreme[:0].to(dtype),))


def _cost(desc: OpDesc) -> Cost:
    gate_up = desc["gate_up"]
    return Cost(bytes=gate_up.nbytes * 3 // 2, flops=5 * gate_up.numel // 2)


def gated_op(name: str, reference: Callable[[Tensor], Tensor], activation: str) -> SemanticOp:
    """The op ``name``: [..., 2 * I] -> [..., I]; ``activation`` is the kernel's constant."""

    def launches(gate_up: Tensor) -> tuple[list[Launch], Tensor]:
        _check_even(gate_up)
        return kernels.gated_activation(gate_up, activation)

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
