"""``linear_all_reduce_add_norm_linear`` is ``linear_add_norm_linear`` with a sum over ranks inside.

It is one op, because where the sum is best made depends on the number of rows.  With few, the first
layer's kernel sends its results to the other ranks, sums and adds, and the second's normalizes.
With more, one kernel between the layers sums, adds and normalizes.  With many, the transfers are
hidden behind the GEMMs on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ..collective import peer_memory as _peer_memory
from ..collective.all_reduce import CASES_GROUP, sum_flops, wire_bytes
from ..core.desc import Case, Cost, Draw, OpDesc, drawn
from ..core.device_table import most_rows
from ..core.launch import Launches
from ..core.op import Implementation, SemanticOp, on_gpu, parameter, signed
from ..norm.norm import NORMS, Norm
from . import overlap as _overlap
from .kernels import STREAM
from .linear import OP as LINEAR
from .linear_add_norm_linear import (
    OP as ONE_RANK,
    PARAMETERS,
    Chain,
    Results,
    draw_chain,
    in_turn,
    launches_in_turn,
    stream,
    streams,
)

_NORM = NORMS[Norm(reduce=True, add=True)]
OVERLAPPED = "GEMMs with hidden transfers"
"""``explain`` says that this runs where rows are many."""


def _reference(*args: Any) -> Results:
    """A linear layer whose results are summed over ranks, the residual add, RMSNorm, and the linear
    layer that follows.

    The arguments are those of ``linear_add_norm_linear``, then ``group_name``, a process group of
    two ranks or more.  x, weights and biases are this rank's; the residual and the norm's weight
    are the same on every rank, and where rows are many each rank reads only its part of them.

    Returns:
        (y, residual_out), as of ``linear_add_norm_linear``, with the sum over ranks of the first
        layer in place of its result.  ``residual_out`` is the same on every rank.

    Raises:
        ValueError: no such group, a group of one rank, or shapes that do not fit.
    """
    call, group_name = _split(args)
    return in_turn(call, LINEAR.reference, _over(group_name, _NORM.reference))


def _over(group_name: str, norm: Callable[..., Any]) -> Callable[..., Any]:
    """Give a norm that sums over a group the arguments of ``add_rms_norm``."""

    def run(*args: Any) -> Any:
        return norm(*args, None, group_name)

    return run


def _split(args: tuple[Any, ...]) -> tuple[Chain, str]:
    return Chain.of(args[:-1]), args[-1]


def _fake(*args: Any) -> Results:
    *chain, group_name = args
    made: Results = ONE_RANK.fake(*chain)
    _NORM.fake(*Chain.of(chain).head.between(made[1]), None, group_name)
    return made


def _in_turn(layer: str, norm: str) -> Callable[..., Results]:
    """Make the function that runs one op after the other, by these implementations."""

    def run(*args: Any) -> Results:
        call, group_name = _split(args)
        add_norm = _over(group_name, _NORM.implementation(norm).fn)
        return in_turn(call, LINEAR.implementation(layer).fn, add_norm)

    return run


_PUSHED = _in_turn("skinny", "cuda")


def _sums_in_layer(call: Chain, group_name: str) -> bool:
    """Whether the first layer's kernel sums over the ranks: where that was measured to gain."""
    world, hidden = _world(call, group_name), call.head.weight.shape[0]
    most = most_rows(f"stream sum {world} ranks", hidden) if world else 0
    return call.head.rows <= most and streams(call)


def _world(call: Chain, group_name: str) -> int:
    return _peer_memory.world_of(group_name, call.head.x.device)


def _overlaps(call: Chain, group_name: str) -> bool:
    next_features, hidden = call.next_weight.shape
    return _overlap.overlaps(call.head.rows, next_features, hidden, _world(call, group_name))


def _cuda(*args: Any) -> Results:
    """Sums in the first layer where rows are few, and hides the transfers where they are many."""
    call, group_name = _split(args)
    if _sums_in_layer(call, group_name):
        found = stream(call, group_name)
        return _PUSHED(*args) if found is None else found
    if not _overlaps(call, group_name):
        return _PUSHED(*args)
    x, residual = call.head.x, call.head.residual
    shape = residual.shape
    head = call.head._replace(
        x=x.reshape(-1, x.shape[-1]), residual=residual.reshape(-1, shape[-1]).contiguous()
    )
    y, total = _overlap.linear_sum_norm_linear(call._replace(head=head), group_name)
    return y.view(*shape[:-1], y.shape[1]), total.view(shape)


def _supports(norm: str) -> Callable[[OpDesc], str]:
    def supports(desc: OpDesc) -> str:
        between = {"x": desc["residual"], "weight": desc["norm_weight"]}
        part = replace(desc, args=tuple(between.items()))
        return _NORM.implementation(norm).supports(part)

    return supports


def _launches(*args: Any) -> Launches[Results]:
    """The Triton launches that must be compiled: NCCL may have to sum, and they follow it."""
    call, group_name = _split(args)
    norm = _NORM.implementation("triton").launches
    assert norm is not None
    return launches_in_turn(call, _over(group_name, norm))


def _runs(layer: str, norm: str) -> Callable[..., tuple[str, ...]]:
    """Make the function that names the kernels of a call, given the implementations it uses."""
    first, between = LINEAR.implementation(layer).runs, _NORM.implementation(norm).runs
    assert first is not None and between is not None

    def runs(*args: Any) -> tuple[str, ...]:
        call, group_name = _split(args)
        if norm == "cuda":
            if _sums_in_layer(call, group_name):
                return f"{STREAM.name}, push, add", f"norm, {STREAM.name}"
            if _overlaps(call, group_name):
                return (OVERLAPPED,)
        made = LINEAR.fake(*call.head.layer)
        summed = between(*call.head.between(made), None, group_name)
        return *first(*call.head.layer), *summed, *first(*call.second(made))

    return runs


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    for label, rows, k, hidden, n, activation in (
        ("one row", (1,), 64, 96, 80, None),
        ("SiLU", (5,), 40, 64, 2 * 48, "silu"),
        ("three dimensions, GELU", (2, 3), 32, 40, 2 * 24, "gelu_tanh"),
        ("two biases", (19,), 37, 72, 31, None),
        ("no rows", (0,), 16, 32, 16, None),
    ):
        biases = (label == "two biases",) * 2
        case = draw_chain(draw, label, rows, k, hidden, n, activation, *biases)
        yield replace(case, args=(*case.args, CASES_GROUP))


def _cost(desc: OpDesc) -> Cost:
    alone = ONE_RANK.cost(replace(desc, args=desc.args[:-1]))
    x = desc["residual"]
    return Cost(alone.bytes + wire_bytes(x), alone.flops + sum_flops(x))


OP = SemanticOp(
    name="linear_all_reduce_add_norm_linear",
    reference=signed(_reference, (*PARAMETERS, parameter("group_name", str)), results=2),
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        on_gpu("cuda", _cuda, _supports("cuda"), launches=_launches, runs=_runs("skinny", "cuda")),
        on_gpu(
            "library",
            _in_turn("library", "triton"),
            _supports("triton"),
            launches=_launches,
            runs=_runs("library", "triton"),
        ),
        Implementation("native", _reference),
    ),
    tolerances=ONE_RANK.tolerances,
)
