"""Stages of chains that are done to rows by themselves: a product with a number, and an add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..core.desc import Cost, TensorDesc
from .stages import Operands, Stage, State, Visit, register


@register
@dataclass(frozen=True, kw_only=True)
class Scale(Stage):
    """x times a number, such as Granite's residual multiplier.  Behind an ``Add`` it is the sum
    that is multiplied."""

    tensors: tuple[str, ...] = ()
    factor: float
    kind: ClassVar[str] = "scale"

    def run(self, state: State, operands: Operands, visit: Visit) -> State:
        x = state.x * self.factor
        return state._replace(x=x, total=x if state.x is state.total else state.total)

    def measure(self, x: TensorDesc, operands: Operands) -> tuple[TensorDesc, Cost]:
        return x, Cost(0, x.numel)


@register
@dataclass(frozen=True, kw_only=True)
class Add(Stage):
    """The add of x and the residual stream, whose sum the next stage reads as it is."""

    tensors: tuple[str, ...] = ()
    kind: ClassVar[str] = "add"

    def run(self, state: State, operands: Operands, visit: Visit) -> State:
        total = state.x + state.total
        return state._replace(x=total, total=total)

    def measure(self, x: TensorDesc, operands: Operands) -> tuple[TensorDesc, Cost]:
        return x, Cost(0, x.numel)
