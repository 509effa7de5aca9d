"""``linear_add_norm_linear`` is one projection into the residual stream and the next one out of it.

It is one op, and not a linear layer with a residual and a norm with a linear layer, because where
the sum is best made depends on the number of rows, which is known only when a program runs.  With
few rows the first linear layer's kernel adds, and the second's normalizes; with many rows, one
kernel between the two library GEMMs adds and normalizes.

Both layers are of the linear family: the first has the epilogue ``add``, the second the prologue
"norm", and the chain streams where the table's streaming kernel is selected for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.desc import Case, Cost, Draw, OpDesc, TensorDesc, Tolerance, drawn
from ..core.launch import Launches
from ..core.op import Implementation, SemanticOp, on_gpu, parameters_of, signed
from ..core.target import Target, here
from ..launches import norm
from ..norm.norm import ADD_RMS_NORM
from .csrc import streamable
from .desc import LinearArgs, LinearDesc, describe
from .kernels import STREAM, plan_epilogue, why_not_streamed
from .linear import GATED, OP as LINEAR

Results = tuple[Tensor, Tensor]


class LinearAddNorm(NamedTuple):
    """The arguments of a linear layer, the residual add and RMSNorm, with which fused ops begin.

    Attributes:
        x: [..., in_features], floating point.
        weight: [hidden, in_features], same dtype, as all that follow.
        bias: [hidden], or None.
        residual: [..., hidden].
        norm_weight: [hidden].
        eps: added to the mean square.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor
    norm_weight: Tensor
    eps: float

    @property
    def layer(self) -> LinearArgs:
        """The arguments of ``linear``."""
        return LinearArgs(self.x, self.weight, self.bias)

    def between(self, y: Any) -> tuple[Any, ...]:
        """The arguments of ``add_rms_norm`` on the result of the layer."""
        return y, self.residual, self.norm_weight, self.eps

    def check_matrix(self, op: str) -> None:
        """Raise ValueError, in the name of an op, unless x and the residual are matrices that fit
        the weight."""
        hidden = self.weight.shape[0]
        if len(self.x.shape) != 2 or tuple(self.residual.shape) != (self.x.shape[0], hidden):
            raise ValueError(
                f"{op}: x is {[*self.x.shape]} and the residual {[*self.residual.shape]}, expected "
                f"[num_tokens, in_features] and [num_tokens, {hidden}]"
            )

    @property
    def rows(self) -> int:
        return self.x.numel() // max(self.x.shape[-1], 1)


class Chain(NamedTuple):
    """The arguments of a call.

    Attributes:
        head: the first linear layer, the residual add and the norm.
        next_weight: [out_features, hidden]; with an activation gate rows, then as many up rows.
        next_bias: [out_features], or None.
        activation: None, or "silu" or "gelu_tanh", as of ``linear``.
    """

    head: LinearAddNorm
    next_weight: Tensor
    next_bias: Tensor | None
    activation: str | None

    @classmethod
    def of(cls, args: Iterable[Any]) -> Chain:
        """The call with these arguments, in the order of ``PARAMETERS``."""
        *head, weight, bias, activation = args
        return cls(LinearAddNorm(*head), weight, bias, activation)

    def second(self, normed: Any) -> LinearArgs:
        activation = self.activation
        return LinearArgs(normed, self.next_weight, self.next_bias, activation=activation)


PARAMETERS = (*parameters_of(LinearAddNorm), *parameters_of(Chain)[1:])


def _reference(*args: Any) -> Results:
    """A linear layer, the residual add, RMSNorm, and the linear layer that follows.

    Returns:
        (y, residual_out), contiguous.  ``residual_out`` is [..., hidden]: ``linear`` of x, rounded,
        plus ``residual``, rounded.  y is [..., out_features], with an activation half of that:
        ``linear`` of the norm of ``residual_out``.  The streaming kernels scale sums where the norm
        scales what is summed: y has a rounding less than by the ops in turn.

    Raises:
        ValueError: shapes that are not these (native: PyTorch's RuntimeError).
    """
    return in_turn(Chain.of(args), LINEAR.reference, ADD_RMS_NORM.reference)


def _fake(*args: Any) -> Results:
    call = Chain.of(args)
    head, total = call.head, LINEAR.fake(*call.head.layer)
    if total.shape != head.residual.shape or head.norm_weight.shape != total.shape[-1:]:
        raise ValueError(
            f"linear_add_norm_linear: x {list(head.x.shape)} times weight "
            f"{list(head.weight.shape)} is {list(total.shape)}: expected a residual like it, found "
            f"{list(head.residual.shape)}, and a norm of {total.shape[-1]}, found "
            f"{list(head.norm_weight.shape)}"
        )
    return LINEAR.fake(*call.second(total)), total


def in_turn(call: Chain, layer: Callable[..., Tensor], add_norm: Callable[..., Any]) -> Results:
    """Run the two layers and the norm between them, each by its own function."""
    normed, total = add_norm(*call.head.between(layer(*call.head.layer)))
    return layer(*call.second(normed)), total


def _in_turn(name: str) -> Callable[..., Results]:
    """Make the function that runs one op after the other, by this implementation of ``linear``."""

    def run(*args: Any) -> Results:
        call, layer = Chain.of(args), LINEAR.implementation(name).fn
        add_norm = ADD_RMS_NORM.implementation("triton").fn
        return in_turn(call, layer, add_norm)

    return run


_SKINNY_IN_TURN = _in_turn("skinny")


def _skinny(*args: Any) -> Results:
    """Two streaming kernels for few rows, else the ops in turn."""
    found = stream(Chain.of(args))
    return _SKINNY_IN_TURN(*args) if found is None else found


def stream(call: Chain, group_name: str | None = None) -> Results | None:
    """Run a chain by its two streaming kernels.

    Args:
        group_name: the ranks over which the first layer's results are summed; connected in peer
            memory.

    Returns:
        None if the kernels are not selected for it, or cannot read its tensors.
    """
    head = call.head
    rows = streamable(head.x, head.weight, call.next_weight)
    if rows is None or not streams(call):
        return None
    shape = head.residual.shape
    head = head._replace(
        x=rows,
        residual=head.residual.reshape(rows.shape[0], -1).contiguous(),
        norm_weight=head.norm_weight.contiguous(),
    )
    run = torch.ops.fw_cuda.skinny_linear_add_norm_linear.default
    y, total = run(*head, *call[1:], group_name=group_name)
    return y.view(*shape[:-1], y.shape[1]), total.view(shape)


def _layers(call: Chain) -> tuple[LinearDesc, LinearDesc]:
    """The descriptions of both layers."""
    x, weight, *_ = call.head
    hidden = TensorDesc(x.dtype, (x.shape[0], weight.shape[0]))
    first, second = describe(*call.head.layer), describe(*call.second(hidden))
    return replace(first, add=True), replace(second, prologue="norm")


@lru_cache(4096)
def _are_streamed(
    shapes: tuple[Any, ...], activation: str | None, rows: int, device: torch.device
) -> bool:
    held = [None if s is None else TensorDesc(*s) for s in shapes]
    return not why_not_streamed(_layers(Chain.of([*held, activation])), rows, here(device))


def streams(call: Chain) -> bool:
    """Whether the streaming kernels are selected for both layers of a call."""
    *args, activation = *call.head, *call[1:]
    shapes = tuple([(t.dtype, t.shape) if isinstance(t, Tensor) else None for t in args])
    return _are_streamed(shapes, activation, call.head.rows, call.head.x.device)


def _supports(desc: OpDesc) -> str:
    return ADD_RMS_NORM.implementation("triton").supports(_part(desc, x=desc["residual"]))


def _skinny_supports(desc: OpDesc) -> str:
    if reason := _supports(desc):
        return reason
    layers = _layers(Chain.of(value for _, value in desc.args))
    return why_not_streamed(layers, 1, Target.of(desc))


def launches_in_turn(call: Chain, add_norm: Callable[..., Launches[Any]]) -> Launches[Results]:
    """The launches that must be compiled: those of the add and norm, and of the activation."""
    planned, (_, total) = add_norm(*call.head.between(LINEAR.fake(*call.head.layer)))
    more, y = plan_epilogue(LINEAR.fake(*call.second(total)[:3]), call.activation, None)
    return [*planned, *more], (y, total)


def _launches(*args: Any) -> Launches[Results]:
    return launches_in_turn(Chain.of(args), norm.norm)


def _runs(*args: Any) -> tuple[str, ...]:
    if streams(Chain.of(args)):
        return f"{STREAM.name}, add", f"norm, {STREAM.name}"
    return _runs_in_turn(*args)


def _runs_in_turn(*args: Any) -> tuple[str, ...]:
    names = [launch.kernel.partition(":")[2] for launch in _launches(*args)[0]]
    return "cuBLAS", names[0], "cuBLAS", *names[1:]


def draw_chain(
    draw: Draw,
    label: str,
    rows: tuple[int, ...],
    k: int,
    hidden: int,
    n: int,
    activation: str | None = None,
    bias: bool = False,
    first_bias: bool = False,
) -> Case:
    """Draw the arguments of one call of these sizes."""
    dtype, randn = draw.dtype, draw.randn
    residual = randn(*rows, hidden)
    residual[randn(*rows, hidden) > 3] *= 20  # the residual stream has outliers
    weights = randn(hidden, k) * k**-0.5, randn(n, hidden) * hidden**-0.5
    x, first, then = (t.to(dtype) for t in (randn(*rows, k), *weights))
    biases = [
        randn(n).to(dtype) if there else None for n, there in ((hidden, first_bias), (n, bias))
    ]
    between = (residual.to(dtype), (1 + randn(hidden) / 4).to(dtype), 1e-5)
    return Case(label, (x, first, biases[0], *between, then, biases[1], activation))


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    call = partial(draw_chain, draw)
    yield call("one row", (1,), 64, 96, 80)
    yield call("SiLU", (5,), 40, 64, 2 * 48, "silu")
    yield call("bias, odd sizes", (19,), 37, 77, 31, bias=True)
    yield call("three dimensions, GELU", (2, 3), 32, 40, 2 * 24, "gelu_tanh")
    yield call("two biases, SiLU", (3,), 32, 48, 2 * 40, "silu", bias=True, first_bias=True)
    yield call("no rows", (0,), 16, 32, 16)
    if draw.device.type == "cuda":  # large enough for the streaming kernels
        yield call("1 row, 8 MiB", (1,), 2048, 2048, 4096)
        yield call("7 rows, bias", (7,), 4096, 2048, 2049, bias=True)
        yield call("13 rows of three dimensions, SiLU", (1, 13), 2048, 3072, 2 * 1501, "silu")
        yield call("16 rows, GELU", (16,), 8192, 1024, 2 * 4096, "gelu_tanh")
        yield call("8 rows, two biases", (8,), 4096, 2048, 2048, bias=True, first_bias=True)
        yield call("17 rows", (17,), 2048, 2048, 2048)


def _cost(desc: OpDesc) -> Cost:
    call, residual = Chain.of(value for _, value in desc.args), desc["residual"]
    first, second = (
        LINEAR.cost(_part(desc, **args._asdict()))
        for args in (call.head.layer, call.second(residual))
    )
    return Cost(
        bytes=first.bytes + residual.nbytes + desc["norm_weight"].nbytes + second.bytes,
        flops=first.flops + 5 * residual.numel + second.flops,
    )


def _part(desc: OpDesc, **args: Any) -> OpDesc:
    """Describe a part of the call by some of its arguments, to ask that part's op about it."""
    return OpDesc(desc.op, tuple(args.items()), desc.device, desc.sm)


OP = SemanticOp(
    name="linear_add_norm_linear",
    reference=signed(_reference, PARAMETERS, results=2),
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        on_gpu("skinny", _skinny, _skinny_supports, launches=_launches, runs=_runs),
        on_gpu("library", _in_turn("library"), _supports, launches=_launches, runs=_runs_in_turn),
        Implementation("native", _reference, inline=True),
    ),
    # As for gated layers, but wider in bfloat16: the streaming kernels round once less.
    tolerances={**GATED, torch.bfloat16: Tolerance(5e-2, 5e-2)},
)
