"""The table of chain kernels: which stages each computes at once, what it refuses, and its rows.

``cover`` lays the kernels over a chain: at each stage the first of the table whose pattern begins
there and that does not refuse; a stage that none takes runs by its own ops.  It depends on shapes
alone, so ``explain`` and a run agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..collective import peer_memory
from ..core import device_table
from ..core.desc import TensorDesc
from ..core.launch import Launches, run_launches
from ..core.target import Target, here
from ..launches.activation import gated_activation
from ..linear.csrc import streamable
from ..linear.desc import LinearDesc
from ..linear.kernels import STREAM as STREAMED_LINEAR, why_not_streamed
from . import overlap
from .row_stages import AddNorm, Scale
from .stages import Act, Call, Linear, Operands, Stage, State


class Part(NamedTuple):
    """Neighbouring stages of a chain, and what the first of them is given.  ``is_plain``: behind a
    kernel of the table, an x of FP8 layers is not quantized."""

    stages: tuple[Any, ...]
    operands: tuple[Operands, ...]
    state: State
    is_plain: bool = False

    @property
    def rows(self) -> int:
        return math.prod(self.state.total.shape[:-1])


def no_launches(part: Part) -> Launches[State] | None:
    """Kernels of csrc have no Triton launches; what they replace is compiled for other rows."""
    return None


@dataclass(frozen=True, eq=False)
class ChainKernel:
    """One row of the table.

    Attributes:
        patterns: stages that it computes, the longest first.
        why_never: why it takes stages of these kinds for no number of rows, by their constants.
        refuses: why it does not serve a part on a target; reads shapes and dtypes alone.
        run: computes a part; None if it cannot read the tensors.
        names: the kernels that it launches.
        launches: of Triton, with the state that they lead to.
        span: how many of a chain's first stages it computes, where ``patterns`` are examples.
        quantizes: whether x and its result are quantized as between stages in turn.
    """

    name: str
    patterns: tuple[tuple[type[Stage], ...], ...]
    why_never: Callable[[tuple[Any, ...]], str]
    refuses: Callable[[Part, Target], str]
    run: Callable[[Part], State | None]
    names: Callable[[Part], tuple[str, ...]]
    launches: Callable[[Part], Launches[State] | None] = no_launches
    span: Callable[[tuple[Stage, ...]], int] = lambda stages: 0
    quantizes: bool = False


class Step(NamedTuple):
    """Stages ``start`` to ``stop - 1``: by a kernel of the table, or one stage by its ops.
    ``plain``: the step behind takes an x that is not quantized.  ``refused``: why the kernels with
    the pattern that go before it do not serve."""

    kernel: ChainKernel | None
    start: int
    stop: int
    plain: bool = False
    refused: tuple[tuple[str, str], ...] = ()


def weight_format(layer: Linear, dtype: torch.dtype) -> str:
    """The format in which the streaming kernels read a layer's weight: activations stay as they
    are."""
    if layer.group_size is None:
        return str(dtype).removeprefix("torch.")
    return "fp8 block weight" if layer.group_size else "fp8 weight"


def streamed_layer(layer: Linear, operands: Operands, dtype: torch.dtype, **how: Any) -> LinearDesc:
    """Describe a layer as the streaming kernels run it."""
    rows, columns = operands["weight"].shape
    bias = operands.get("bias") is not None
    return LinearDesc(weight_format(layer, dtype), dtype, rows, columns, bias=bias, **how)


def why_no_plain_norm(norm: AddNorm) -> str:
    """Why a norm's scale cannot be applied to the sums of the layer behind it.  An offset of 0 says
    no more than that the product with the weight is rounded once, as it is there."""
    if norm.center:
        return "it is a layer norm"
    return "the norm's weight has an offset" if norm.offset else ""


def _factor(stages: tuple[Any, ...]) -> float:
    """What the first layer's result is multiplied with before the add."""
    return float(next((stage.factor for stage in stages if isinstance(stage, Scale)), 1.0))


def _without_scale(values: tuple[Any, ...], stages: tuple[Any, ...]) -> list[Any]:
    """The values, one a stage, of all stages but a product."""
    pairs = zip(values, stages, strict=True)
    return [value for value, stage in pairs if not isinstance(stage, Scale)]


def _never_streams(stages: tuple[Any, ...]) -> str:
    first, norm, second, *act = _without_scale(stages, stages)
    if stored := first.weight_format or second.weight_format:
        return f"reads no weights in {stored}"
    if first.activation is not None:
        return "the layer before the norm has an activation"
    if act and (second.activation is not None or second.group_size):
        return "activates no layer with scales of blocks"
    if norm.center and any(layer.group_size is not None for layer in (first, second)):
        return "joins no FP8 layers to a layer norm"
    if norm.reduce and len(stages) > 3 + len(act):
        return "a sum over ranks comes behind a product"
    return ""


def _stream_layers(part: Part) -> list[LinearDesc]:
    """Both layers of a part, the first with a residual, the second with a norm before it."""
    first, _, second, *act = _without_scale(part.stages, part.stages)
    first_of, _, second_of, *_ = _without_scale(part.operands, part.stages)
    dtype, activation = part.state.total.dtype, act[0].activation if act else second.activation
    return [
        streamed_layer(first, first_of, dtype, add=True),
        streamed_layer(second, second_of, dtype, prologue="norm", activation=activation or ""),
    ]


def _stream_refuses(part: Part, target: Target) -> str:
    if reason := why_not_streamed(_stream_layers(part), part.rows, target):
        return reason
    at, norm = next((i, s) for i, s in enumerate(part.stages) if isinstance(s, AddNorm))
    for name, tensor in part.operands[at].items():
        if tensor.dtype != part.state.total.dtype:
            return f"the norm's {name} is {tensor.dtype}"
    if not norm.reduce:
        return ""
    world = peer_memory.world_of(part.state.group or "", target.device)
    hidden = part.state.total.shape[-1]
    most = device_table.most_rows(f"stream sum {world} ranks", hidden) if world else 0
    return "" if part.rows <= most else f"{part.rows} rows summed over ranks: fastest up to {most}"


def _stream(part: Part) -> State | None:
    _, norm, second, *act = _without_scale(part.stages, part.stages)
    first_of, norm_of, second_of, *_ = _without_scale(part.operands, part.stages)
    state = part.state
    rows = streamable(state.x, first_of["weight"], second_of["weight"])
    if rows is None or state.scale is not None:
        return None
    shape = state.total.shape
    run = torch.ops.fw_cuda.skinny_linear_add_norm_linear.default
    y, total = run(
        *(rows, first_of["weight"], first_of.get("bias")),
        state.total.reshape(rows.shape[0], -1).contiguous(),
        *(norm_of["weight"].contiguous(), norm.eps, second_of["weight"], second_of.get("bias")),
        act[0].activation if act else second.activation,
        *(first_of.get("weight_scale"), second_of.get("weight_scale")),
        *(state.group if norm.reduce else None, _factor(part.stages), norm.offset or 0.0),
        *(norm_of.get("bias"), norm.center),
    )
    y = y.view(*shape[:-1], y.shape[1])
    return state._replace(x=y, total=total.view(shape))


def _stream_names(part: Part) -> tuple[str, ...]:
    pushed = ", push" if any(getattr(s, "reduce", False) for s in part.stages) else ""
    return f"{STREAMED_LINEAR.name}{pushed}, add", f"norm, {STREAMED_LINEAR.name}"


STREAM = ChainKernel(
    "two streaming kernels",
    (
        *((Linear, AddNorm, Linear, Act), (Linear, AddNorm, Linear)),
        *((Linear, Scale, AddNorm, Linear, Act), (Linear, Scale, AddNorm, Linear)),
    ),
    _never_streams,
    _stream_refuses,
    _stream,
    _stream_names,
)


def _never_alone(stages: tuple[Any, ...]) -> str:
    (layer,) = stages
    if layer.group_size is None:
        return "the layer is not FP8: nothing is saved"
    return "" if layer.activation is None else "the layer has an activation"


def _lone_refuses(part: Part, target: Target) -> str:
    (layer,), (operands,) = part.stages, part.operands
    if not part.is_plain:
        return "its x is quantized"
    desc = streamed_layer(layer, operands, part.state.total.dtype)
    return why_not_streamed([desc], part.rows, target)


def _lone(part: Part) -> State | None:
    """An FP8 layer of an x that no kernel before it has quantized."""
    (operands,), state = part.operands, part.state
    rows = streamable(state.x, operands["weight"])
    if rows is None or state.scale is not None:
        return None
    weights = (operands["weight"], operands.get("bias"), None, operands["weight_scale"])
    y = torch.ops.fw_cuda.skinny_linear.default(rows, *weights, state.x.dtype)
    return state._replace(x=y.view(*state.total.shape[:-1], y.shape[1]))


LONE = ChainKernel(
    "a streaming kernel",
    ((Linear,),),
    _never_alone,
    _lone_refuses,
    _lone,
    lambda part: (STREAMED_LINEAR.name,),
)


_activate = run_launches(gated_activation)
OVERLAPPED = "GEMMs with hidden transfers"
"""``explain`` says that this runs where rows are many."""


def _never_overlaps(stages: tuple[Any, ...]) -> str:
    first, norm, second = stages
    if not norm.reduce:
        return "nothing is summed over ranks"
    if stored := first.weight_format or second.weight_format:
        return f"reads no weights in {stored}"
    if first.group_size is not None or second.group_size is not None:
        return "hides no transfers behind FP8 layers"
    if first.activation is not None:
        return "the layer before the norm has an activation"
    return why_no_plain_norm(norm)


def _overlap_refuses(part: Part, target: Target) -> str:
    world = peer_memory.world_of(part.state.group or "", target.device)
    next_features, hidden = part.operands[2]["weight"].shape
    gains = overlap.overlaps(part.rows, next_features, hidden, world)
    return "" if gains else f"{part.rows} rows: no gain is known from hiding their transfers"


def _overlap(part: Part) -> State | None:
    (_, norm, second), (first_of, norm_of, second_of) = part.stages, part.operands
    state, shape = part.state, part.state.total.shape
    y, total = overlap.linear_sum_norm_linear(
        state.x.reshape(-1, state.x.shape[-1]),
        state.total.reshape(-1, shape[-1]).contiguous(),
        first_of,
        norm_of["weight"],
        norm.eps,
        second_of,
        str(state.group),
    )
    y = y.view(*shape[:-1], y.shape[1])
    y = y if second.activation is None else _activate(y, None, second.activation)
    return state._replace(x=y, total=total.view(shape))


OVERLAP = ChainKernel(
    OVERLAPPED,
    ((Linear, AddNorm, Linear),),
    _never_overlaps,
    _overlap_refuses,
    _overlap,
    lambda part: (OVERLAPPED,),
)


def part_at(call: Call, start: int, stop: int, state: State, is_plain: bool = False) -> Part:
    stages, operands = call.chain.stages[start:stop], call.operands[start:stop]
    return Part(stages, tuple(operands), state, is_plain)


Facts = tuple[tuple[torch.dtype, torch.Size], ...]
"""Dtype and shape of x, the residual, and the operands."""


class Cover(NamedTuple):
    """How a chain is computed: its steps, and what has been chosen for the ops of stages in turn,
    by op, and by stage and weight where the op has several implementations."""

    steps: tuple[Step, ...]
    chosen: dict[Any, Any]


def cover(args: tuple[Any, ...], kernels: tuple[ChainKernel, ...]) -> Cover:
    """How the chain of a call of the op is computed by these kernels on its own device."""
    x, residual, operands, text, *group_name = args
    group, device = group_name[0] if group_name else None, x.device
    world = 0 if group is None else peer_memory.world_of(group, device)
    facts = tuple([(t.dtype, t.shape) for t in (x, residual, *operands)])
    return _cover(text, group, world, facts, device, kernels)


@lru_cache(4096)
def _cover(
    text: str,
    group: str | None,
    world: int,  # a key: what ranks are connected may change
    facts: Facts,
    device: torch.device,
    kernels: tuple[ChainKernel, ...],
) -> Cover:
    return Cover(tuple(lay(described(text, group, facts), here(device), kernels)), {})


device_table.on_change(_cover.cache_clear)


def described(text: str, group: str | None, facts: Facts) -> Call:
    """A call of tensors that have shapes and dtypes alone."""
    x, residual, *rest = [TensorDesc(*fact) for fact in facts]
    return Call.of((x, residual, rest, text, group))


def lay(call: Call, target: Target, kernels: tuple[ChainKernel, ...]) -> list[Step]:
    """Lay kernels over a chain that is described."""
    steps: list[Step] = []
    stages, is_plain = call.chain.stages, False
    while (start := steps[-1].stop if steps else 0) < len(stages):
        chosen, refused = Step(None, start, start + 1), dict[str, str]()
        for kernel, length in candidates(stages[start:], kernels):
            part = part_at(call, start, start + length, call.state, is_plain)
            reason = kernel.why_never(part.stages) or kernel.refuses(part, target)
            if not reason:
                chosen = Step(kernel, start, start + length)
                break
            if length > 1:
                refused.setdefault(kernel.name, reason)
        joins = chosen.kernel is not None and not chosen.kernel.quantizes
        if joins and steps and steps[-1].kernel is None:
            steps[-1] = steps[-1]._replace(plain=True)
        is_plain = joins or (is_plain and isinstance(stages[start], Act))
        steps.append(chosen._replace(refused=tuple(refused.items())))
    return steps


def candidates(
    stages: tuple[Stage, ...], kernels: tuple[ChainKernel, ...]
) -> Iterator[tuple[ChainKernel, int]]:
    """The kernels with a pattern that the first of these stages have, and the pattern's length."""
    for kernel in kernels:
        if (length := kernel.span(stages)) > 1:
            yield kernel, length
            continue
        for pattern in kernel.patterns:
            head = stages[: len(pattern)]
            if len(head) == len(pattern) and all(map(isinstance, head, pattern)):
                yield kernel, len(pattern)


def covered(
    stages: tuple[Stage, ...], kernels: tuple[ChainKernel, ...]
) -> tuple[list[tuple[int, int]], str]:
    """The spans (first stage, last exclusive) that some kernel may compute, by kinds and constants;
    and the first reason why a kernel with a longer pattern does not compute more."""
    spans: list[tuple[int, int]] = []
    at, why, is_plain = 0, "", False
    while at < len(stages):
        tried = [
            (length, kernel.why_never(stages[at : at + length]))
            for kernel, length in candidates(stages[at:], kernels)
            # One stage alone is joined to nothing, unless a kernel is ahead of it.
            if length > 1 or is_plain
        ]
        longest = max((length for length, reason in tried if not reason), default=0)
        longer = (reason for length, reason in tried if reason and length > max(longest, 1))
        why = why or next(longer, "")
        is_plain = longest > 0 or (is_plain and isinstance(stages[at], Act))
        if longest:
            spans.append((at, at + longest))
        at += longest or 1
    return spans, why or ("" if spans else "no kernel has the pattern of its stages")
