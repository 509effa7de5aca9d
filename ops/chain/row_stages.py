"""Stages of chains that are done to rows by themselves: norms, a product with a number, an add."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from ..collective.all_reduce import sum_flops, wire_bytes
from ..core.desc import Cost, TensorDesc
from ..core.op import SemanticOp
from ..norm.norm import NORMS, Norm as Axes
from .stages import Operands, Stage, State, Visit, nbytes, register, scheme


@dataclass(frozen=True, kw_only=True)
class _Normalizing(Stage):
    """A stage that is an op of ``NORMS``, which is looked up as soon as the stage is made."""

    eps: float
    offset: float | None = None
    center: bool = False
    optional: ClassVar[tuple[str, ...]] = ("bias",)

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self._op

    @property
    def _axes(self) -> Axes:
        return Axes(center=self.center)

    @cached_property
    def _op(self) -> SemanticOp:
        """The op of the norm.

        Raises:
            ValueError: there is none: a layer norm neither sums over ranks nor quantizes, its
                weight has no offset, and no other norm has a bias.
        """
        axes = self._axes
        if axes not in NORMS or (
            self.offset is not None if axes.center else "bias" in self.tensors
        ):
            raise ValueError(
                f"no {axes.name} of {', '.join(self.tensors)} with offset {self.offset}"
            )
        return NORMS[axes]


@register
@dataclass(frozen=True, kw_only=True)
class AddNorm(_Normalizing):
    """``add_rms_norm`` of x and the residual stream, or an op like it: ``reduce`` sums x over ranks
    first, ``offset`` is added to the weight, ``center`` makes it a layer norm, which may have a
    bias, and a ``group_size`` quantizes the result."""

    group_size: int | None = None
    reduce: bool = False
    kind: ClassVar[str] = "add_norm"

    @property
    def _axes(self) -> Axes:
        return Axes(self.reduce, True, scheme(self.group_size), self.center)

    def run(self, state: State, operands: Operands, visit: Visit) -> State:
        how = operands.get("bias") if self.center else self.offset
        how = how if self.group_size is None else self.group_size
        group = (state.group,) if self.reduce else ()
        *x, total = visit(self._op, state.x, state.total, operands["weight"], self.eps, how, *group)
        return State(x[0], total, x[1] if x[1:] else None, state.group)

    def measure(self, x: TensorDesc, operands: Operands) -> tuple[TensorDesc, Cost]:
        flops = (5 if self.group_size is None else 7) * x.numel
        moved = nbytes(operands)
        if self.reduce:
            moved, flops = moved + wire_bytes(x), flops + sum_flops(x)
        return x, Cost(moved, flops)

    @cached_property
    def plain(self) -> Stage:
        return replace(self, group_size=None)


@register
@dataclass(frozen=True, kw_only=True)
class Norm(_Normalizing):
    """``rms_norm``, or with ``center`` ``layer_norm``, of what a layer made, before it is added: a
    post-norm."""

    kind: ClassVar[str] = "norm"

    def run(self, state: State, operands: Operands, visit: Visit) -> State:
        how = operands.get("bias") if self.center else self.offset
        return state._replace(x=visit(self._op, state.x, operands["weight"], self.eps, how))

    def measure(self, x: TensorDesc, operands: Operands) -> tuple[TensorDesc, Cost]:
        return x, Cost(nbytes(operands), 4 * x.numel)


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
