"""The stages of a chain as data: what each is given, and by which ops it is computed.

A chain begins with activations and a residual, and each stage hands a ``State`` to the next.  It is
printed, and written into graphs, as the calls of its stages:

    linear(weight) > add_norm(weight, eps=1e-05) > linear(weight, bias, activation='silu')

The names without a value are tensors, the operands of the chain in this order.  ``register`` admits
a stage from outside; ``READERS`` in ``passes/chain_readers.py`` has what finds it in graphs.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

from ...config.weight_format import STORED_FORMATS
from ..collective.all_reduce import OP as ALL_REDUCE, sum_flops, wire_bytes
from ..core.desc import Cost, TensorDesc
from ..core.op import SemanticOp
from ..experts.fused_moe import OP as FUSED_MOE
from ..experts.moe import Call as ExpertsCall, cost_of_call
from ..linear.desc import columns_of
from ..linear.linear import OP as LINEAR
from ..norm.gated_act import GATED_ACTS
from ..norm.quantize import QUANTIZE

Visit: TypeAlias = Callable[..., Any]
"""``visit(op, *args)`` computes an op, in one way or another, and returns its results."""
Operands: TypeAlias = Mapping[str, Any]
"""The tensors of one stage by name."""


class State(NamedTuple):
    """The values that one stage hands to the next.

    Attributes:
        x: what the next stage reads: [..., features], or FP8 [num_tokens, features].
        total: the sum of the residual stream so far, of the dtype in which layers are summed.
        scale: of an x in FP8, as of ``linear``; None otherwise.
        group: the process group over which the chain sums, or None.
    """

    x: Any
    total: Any
    scale: Any = None
    group: str | None = None


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of a chain.  ``tensors`` names the operands that it is given, in order; the other
    fields are constants."""

    tensors: tuple[str, ...] = ("weight",)
    kind: ClassVar[str]
    optional: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if not {*type(self).tensors} <= {*self.tensors} <= {*self.takes()}:
            raise ValueError(f"operands {self.tensors}, expected {self.takes()}")

    def run(self, state: State, operands: Operands, visit: Visit) -> State:
        """Compute the stage by visits of ops."""
        raise NotImplementedError

    def measure(self, x: TensorDesc, operands: Operands) -> tuple[TensorDesc, Cost]:
        """The description of the result before any quantization, and the cost: operations, and the
        bytes that the stage must move besides x and the result."""
        return x, Cost(nbytes(operands), 0)

    @cached_property
    def plain(self) -> Stage:
        """The stage as it runs in front of a kernel that takes x as it is: without quantizing."""
        return self

    @classmethod
    def takes(cls) -> tuple[str, ...]:
        """Names of all operands that a stage can have."""
        return (*cls.tensors, *cls.optional)

    @classmethod
    def constants(cls) -> tuple[str, ...]:
        """Names of the fields that are no tensors."""
        return tuple(f.name for f in fields(cls) if f.name != "tensors")

    def __str__(self) -> str:
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "tensors"}
        defaults = {f.name: f.default for f in fields(self)}
        shown = [f"{name}={value!r}" for name, value in given.items() if value != defaults[name]]
        return f"{self.kind}({', '.join([*self.tensors, *shown])})"


_StageType = TypeVar("_StageType", bound=type[Stage])
STAGES: dict[str, type[Stage]] = {}
"""Every stage by the name with which it is printed."""


def register(stage: _StageType) -> _StageType:
    """Admit a stage, which chains may then have.

    Raises:
        ValueError: another stage has its name.
    """
    if STAGES.setdefault(stage.kind, stage) is not stage:
        raise ValueError(f"a stage is called {stage.kind!r} already")
    return stage


def nbytes(operands: Operands) -> Any:
    return sum(tensor.nbytes for tensor in operands.values())


def scheme(group_size: int | None) -> str:
    return "" if group_size is None else "dynamic"


@register
@dataclass(frozen=True, kw_only=True)
class Linear(Stage):
    """``linear``, of FP8 operands if it has a ``group_size``: then an x that is not quantized yet
    is, by a scale for each group of so many columns, 0 for whole rows."""

    activation: str | None = None
    group_size: int | None = None
    weight_format: str | None = None
    kind: ClassVar[str] = "linear"
    optional: ClassVar[tuple[str, ...]] = (
        *("bias", "weight_scale", "weight_zero", "weight_row_scale"),
    )

    def run(self, state: State, operands: Operands, visit: Visit) -> State:
        x, scale = state.x, state.scale
        dtype = None if self.group_size is None else state.total.dtype
        if self.group_size is not None and scale is None:
            x, scale = visit(QUANTIZE["dynamic"], x, self.group_size)
        weights = (operands["weight"], operands.get("bias"), scale, operands.get("weight_scale"))
        how: tuple[Any, ...] = (dtype, self.activation, None)
        if self.weight_format is not None:
            stored = (operands.get("weight_zero"), self.weight_format)
            how = (*how, *stored, operands.get("weight_row_scale"))
        y = visit(LINEAR, x, *weights, *how)
        # Made anew here and in the stages beside it: ``_replace`` takes four times as long.
        return State(y, state.total, None, state.group)

    def rows(self, weight: Any) -> Any:
        """The rows of the weight that the operand of this name stands for."""
        if self.weight_format is None:
            return weight.shape[0]
        stored = STORED_FORMATS[self.weight_format].weight
        return weight.shape[stored.dim(0)] * stored.steps[0]

    def measure(self, x: TensorDesc, operands: Operands) -> tuple[TensorDesc, Cost]:
        sums = TensorDesc(x.dtype, (*x.shape[:-1], self.rows(operands["weight"])))
        columns = columns_of(self.activation, sums.shape[-1])
        y = TensorDesc(x.dtype, (*x.shape[:-1], columns))
        flops = 2 * x.numel * sums.shape[-1] + (5 * y.numel if self.activation else 0)
        return y, Cost(nbytes(operands), flops)


@register
@dataclass(frozen=True, kw_only=True)
class AllReduce(Stage):
    """The sum over ranks of what a layer made, where a post-norm keeps the add from it."""

    tensors: tuple[str, ...] = ()
    kind: ClassVar[str] = "all_reduce"

    def run(self, state: State, operands: Operands, visit: Visit) -> State:
        return state._replace(x=visit(ALL_REDUCE, state.x, state.group))

    def measure(self, x: TensorDesc, operands: Operands) -> tuple[TensorDesc, Cost]:
        return x, Cost(wire_bytes(x), sum_flops(x))


@register
@dataclass(frozen=True, kw_only=True)
class Act(Stage):
    """A gated activation of gate | up that a layer made; a ``group_size`` quantizes the result."""

    tensors: tuple[str, ...] = ()
    activation: str
    group_size: int | None = None
    kind: ClassVar[str] = "act"

    def run(self, state: State, operands: Operands, visit: Visit) -> State:
        op = GATED_ACTS[self.activation, scheme(self.group_size)]
        if self.group_size is None:
            return state._replace(x=visit(op, state.x, None))
        x, scale = visit(op, state.x, self.group_size)
        return State(x, state.total, scale, state.group)

    def measure(self, x: TensorDesc, operands: Operands) -> tuple[TensorDesc, Cost]:
        y = TensorDesc(x.dtype, (*x.shape[:-1], x.shape[-1] // 2))
        return y, Cost(0, (5 if self.group_size is None else 7) * y.numel)

    @cached_property
    def plain(self) -> Stage:
        return replace(self, group_size=None)


_ABSENT = ("gate_up_input_scale", "down_input_scale", "shared", "shared_gate")
"""Arguments of ``fused_moe`` that experts in a chain do not have."""


@register
@dataclass(frozen=True, kw_only=True)
class Experts(Stage):
    """``fused_moe`` without static scales, a shared expert, or experts of other ranks."""

    tensors: tuple[str, ...] = ("router_weight", "gate_up", "down")
    top_k: int
    scoring: str
    renormalize: bool
    num_groups: int
    topk_groups: int
    scaling: float
    activation: str
    group_size: int = 0
    float32_logits: bool = False
    weight_format: str | None = None
    kind: ClassVar[str] = "experts"
    optional: ClassVar[tuple[str, ...]] = (
        *("correction_bias", "gate_up_scale", "down_scale", "router_bias", "gate_up_bias"),
        *("down_bias", "gate_up_zero", "down_zero"),
    )

    def call(self, x: Any, operands: Operands) -> ExpertsCall:
        """The arguments of ``fused_moe`` on x."""
        constants = {name: getattr(self, name) for name in self.constants()}
        tensors = {name: operands.get(name) for name in self.takes()}
        return ExpertsCall(x=x, **dict.fromkeys(_ABSENT), **tensors, **constants)  # type: ignore[arg-type]

    def run(self, state: State, operands: Operands, visit: Visit) -> State:
        return state._replace(x=visit(FUSED_MOE, *self.call(state.x, operands)))

    def measure(self, x: TensorDesc, operands: Operands) -> tuple[TensorDesc, Cost]:
        cost = cost_of_call(self.call(x, operands))
        return x, Cost(cost.bytes - 2 * x.nbytes, cost.flops)


@dataclass(frozen=True)
class Chain:
    """Stages in their order.  ``str`` gives the text that ``parse`` reads."""

    stages: tuple[Stage, ...]

    def __str__(self) -> str:
        return " > ".join(map(str, self.stages))

    @cached_property
    def sums_over_ranks(self) -> bool:
        return any(isinstance(s, AllReduce) or getattr(s, "reduce", False) for s in self.stages)

    @cached_property
    def adds(self) -> bool:
        """Whether anything is added to the residual stream, as a chain must."""
        return any(stage.kind in ("add", "add_norm") for stage in self.stages)

    @cached_property
    def ends_in_sum(self) -> bool:
        """Whether the result is the sum of the residual stream."""
        return next(s for s in reversed(self.stages) if s.kind != "scale").kind == "add"

    def deal(self, tensors: Sequence[Any]) -> list[dict[str, Any]]:
        """Each stage's operands by name, of those of the whole chain in order.

        Raises:
            ValueError: there are more or fewer than the stages name.
        """
        if len(tensors) != (expected := sum(len(stage.tensors) for stage in self.stages)):
            raise ValueError(f"chain {self}: {len(tensors)} operands, expected {expected}")
        rest = iter(tensors)
        return [{name: next(rest) for name in stage.tensors} for stage in self.stages]


@cache
def parse(text: str) -> Chain:
    """The chain with this text.

    Raises:
        ValueError: it is no chain of known stages, or one that adds nothing; names the part.
    """
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(
            f"chain {text!r}: {error.msg}, expected stage(...) > stage(...)"
        ) from error
    calls = [tree]
    if isinstance(tree, ast.Compare) and all(isinstance(sign, ast.Gt) for sign in tree.ops):
        calls = [tree.left, *tree.comparators]
    chain = Chain(tuple(_stage(call, text) for call in calls))
    if not chain.adds:
        raise ValueError(f"chain {text!r} adds nothing to the residual, expected an add_norm")
    return chain


def _stage(node: ast.expr, text: str) -> Stage:
    name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
    if name not in STAGES:
        raise ValueError(
            f"chain {text!r}: {ast.unparse(node)!r} is no stage, expected one of "
            f"{', '.join(STAGES)}"
        )
    assert isinstance(node, ast.Call)
    tensors = tuple(a.id if isinstance(a, ast.Name) else "" for a in node.args)
    if "" in tensors:
        wrong = ast.unparse(node.args[tensors.index("")])
        raise ValueError(f"chain {text!r}: {wrong} is no name of a tensor")
    try:
        constants = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
        return STAGES[name](tensors=tensors, **constants)
    except (TypeError, ValueError) as error:
        raise ValueError(f"chain {text!r}: {ast.unparse(node)!r}: {error}") from error


class Call(NamedTuple):
    """The arguments of a call of the op, with the chain read and the operands dealt."""

    text: str
    x: Any
    residual: Any
    operands: Sequence[Operands]
    group_name: str | None = None

    @classmethod
    def of(cls, args: Iterable[Any]) -> Call:
        """The call with the op's arguments in order."""
        x, residual, operands, text, *group = args
        return cls(text, x, residual, parse(text).deal(operands), *group)

    @property
    def chain(self) -> Chain:
        return parse(self.text)

    @property
    def state(self) -> State:
        """The state that the first stage is given."""
        return State(self.x, self.residual, group=self.group_name)

    def fold(self, visit: Visit) -> State:
        """Compute the stages in turn."""
        state = self.state
        for stage, operands in zip(self.chain.stages, self.operands, strict=True):
            state = stage.run(state, operands, visit)
        return state


def by_reference(op: SemanticOp, *args: Any) -> Any:
    return op.reference(*args)


def by_fake(op: SemanticOp, *args: Any) -> Any:
    return op.fake(*args)
