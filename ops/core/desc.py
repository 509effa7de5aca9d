"""Descriptions of ops and their calls, which nothing runs: arguments, costs, tolerances, cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorDesc:
    """Shape and dtype of one tensor argument; a dynamic dimension is a sympy expression."""

    dtype: torch.dtype
    shape: tuple[Any, ...]

    @property
    def numel(self) -> Any:
        n: Any = 1
        for dim in self.shape:
            n = n * dim
        return n

    @property
    def nbytes(self) -> Any:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class OpDesc:
    """One call as kernel choice and cost see it: descriptions of its arguments, without data.

    ``csrc`` says whether the machine that runs it has the kernels of csrc; None: as this process.
    """

    op: str
    args: tuple[tuple[str, Any], ...]
    device: str
    sm: int = 0
    csrc: bool | None = None

    def __getitem__(self, name: str) -> Any:
        return dict(self.args)[name]


@dataclass(frozen=True)
class Cost:
    """Device-memory bytes moved and floating-point operations, ints or sympy expressions."""

    bytes: Any
    flops: Any


@dataclass(frozen=True)
class Tolerance:
    atol: float
    rtol: float


@dataclass(frozen=True)
class Case:
    """One call for conformance tests and benchmarks: positional arguments with a readable label,
    and tolerances where they are not the op's."""

    label: str
    args: tuple[Any, ...]
    tolerances: Mapping[torch.dtype, Tolerance] | None = None


Cases: TypeAlias = Callable[[torch.dtype, torch.device, torch.Generator], Iterator[Case]]
"""The cases of an op whose floating-point arguments have a dtype, drawn on a device."""


@dataclass(frozen=True)
class Draw:
    """Draws the tensors of an op's cases; ``dtype`` is what they are then rounded to."""

    dtype: torch.dtype
    device: torch.device
    gen: torch.Generator

    def randn(self, *shape: int) -> Tensor:
        """Float32, normal."""
        return torch.randn(shape, generator=self.gen, device=self.device)

    def rand(self, *shape: int) -> Tensor:
        """Float32, from 0 to 1."""
        return torch.rand(shape, generator=self.gen, device=self.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Int64, from ``low`` to ``high - 1``."""
        return torch.randint(low, high, shape, generator=self.gen, device=self.device)

    def permutation(self, count: int) -> Tensor:
        """Int64, the numbers below ``count`` in some order."""
        return torch.randperm(count, generator=self.gen, device=self.device)


def drawn(cases: Callable[[Draw], Iterator[Case]]) -> Cases:
    """Turn a function of a ``Draw`` into the cases of an op."""
    return lambda dtype, device, gen: cases(Draw(dtype, device, gen))


TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.bfloat16: Tolerance(1e-2, 1.6e-2),
    torch.float16: Tolerance(2e-3, 2e-3),
}
EXACT: Mapping[torch.dtype, Tolerance] = dict.fromkeys(TOLERANCES, Tolerance(0.0, 0.0))
"""Tolerances of ops whose definition fixes every bit."""
