"""``chain`` computes linear layers and what stands between them; ``chain_over_ranks`` sums inside.

It is one op because where sums, norms and scales are best computed depends on the number of rows,
which is known only when a program runs.  For few rows streaming kernels add where they sum, and
apply a norm's scale, an activation or none of the quantization where they read; for more, the
stages run in turn, each by the implementation that its op would be given alone.

The stages are data (``stages.py``), and so are the kernels that compute several of them at once
(``kernels.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ..core.choice import Choice, Kernel, KernelName
from ..core.desc import Cost, OpDesc, TensorDesc, Tolerance
from ..core.launch import Launch, Launches
from ..core.op import Implementation, SemanticOp, on_gpu
from ..core.target import Target, here
from ..experts.moe import kernel_names
from ..linear.kernels import LIBRARY as LIBRARY_LINEAR
from ..linear.linear import OP as LINEAR, describe_op
from .cases import cases
from .experts import STREAM_EXPERTS, SUM_OF_CSRC, SUM_OF_TRITON
from .gated import GATED
from .kernels import LONE, OVERLAP, STREAM, ChainKernel, Step, cover, lay, no_launches, part_at
from .lowbit import LOW_BIT, PACKED
from .rows import ROWS
from .stages import Call, Experts, Stage, State, Visit, by_fake, by_reference

Results = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Way:
    """How one implementation of the op computes: by which chain kernels, and for stages that run by
    their own ops, by which of the implementations, in order of preference."""

    kernels: tuple[ChainKernel, ...]
    parts: tuple[str, ...]


CUDA = Way(
    (STREAM_EXPERTS, STREAM, PACKED, LOW_BIT, OVERLAP, SUM_OF_CSRC, ROWS, GATED, LONE),
    ("cuda", "skinny", "triton"),
)
LIBRARY = Way((SUM_OF_TRITON, LOW_BIT, ROWS), ("library", "triton"))
KERNELS, OVER_RANKS = CUDA.kernels, (STREAM, OVERLAP)
"""The table of chain kernels, and those that sum over ranks.  What none of them takes runs by the
ops of its stages."""


def chain(x: Tensor, residual: Tensor, operands: list[Tensor], stages: str) -> Results:
    """Linear layers and what stands between them, stage by stage.

    Args:
        x: [..., in_features], floating point, which the first stage reads.
        residual: [..., hidden] of the dtype in which layers are summed; the first norm adds to it.
        operands: the tensors that the stages name, in order.
        stages: the text of the chain, as ``stages.py`` says.

    Returns:
        (y, residual_out), contiguous.  ``residual_out`` is the sum that the last norm of the chain
        reads, and y the result of the last stage; if that is the sum itself, ``residual_out`` is
        empty, [0].  Each stage rounds as its op; kernels that
        compute several round less often, and those for few rows do not quantize activations.

    Raises:
        ValueError: the text is no chain, or shapes and dtypes do not fit its stages.
    """
    return _results(checked((x, residual, operands, stages)).fold(by_reference))


def chain_over_ranks(
    x: Tensor, residual: Tensor, operands: list[Tensor], stages: str, group_name: str
) -> Results:
    """``chain`` with stages that sum over the ranks of a process group.

    Weights are this rank's; the residual and the norms' weights are the same on every rank, and so
    is ``residual_out``.

    Raises:
        ValueError: as of ``chain``; no such group, or a group of one rank.
    """
    return _results(checked((x, residual, operands, stages, group_name)).fold(by_reference))


def _results(state: State) -> Results:
    """The results of the op, which are no views of each other."""
    y, total = state.x, state.total
    return y.contiguous(), y.new_empty(0) if y is total else total


def checked(args: tuple[Any, ...]) -> Call:
    """The call with these arguments.

    Raises:
        ValueError: it sums over ranks and has no group, or the reverse; the residual has not the
            rows of x, or the text is no chain.
    """
    call = Call.of(args)
    if call.chain.sums_over_ranks is not (call.group_name is not None):
        needs = "a" if call.chain.sums_over_ranks else "no"
        raise ValueError(f"chain {call.text!r} takes {needs} group_name")
    if tuple(call.x.shape[:-1]) != tuple(call.residual.shape[:-1]):
        raise ValueError(
            f"chain {call.text!r}: x is {[*call.x.shape]} and the residual "
            f"{[*call.residual.shape]}, expected as many rows"
        )
    return call


def _fake(*args: Any) -> Results:
    return _results(checked(args).fold(by_fake))


def _names_of(op: SemanticOp, way: Way) -> list[str]:
    """The implementations of an op that a way may choose, in order of preference."""
    return [i.name for name in way.parts for i in op.implementations if i.name == name]


@lru_cache
def _is_fixed(op: SemanticOp, way: Way) -> bool:
    """Whether a way has one implementation of an op, whatever its arguments."""
    return op is not LINEAR and len(_names_of(op, way)) == 1


def _choice(op: SemanticOp, way: Way, desc: OpDesc) -> tuple[str, str]:
    """(implementation of an op in a chain, ""), or ("", the reason why there is none)."""
    names = _names_of(op, way)
    if op is LINEAR:
        # The library's GEMM serves what the table of linear layers leaves, but not every FP8 shape.
        layer = describe_op(desc)
        if layer.format.stored:
            return ("admitted" if op.implementation("low_bit").supports(desc) else "low_bit"), ""
        refused = layer.format.scaled and LIBRARY_LINEAR.refuses(layer, 1, Target.of(desc))
        return ("triton" if refused else names[0]), ""
    reasons = []
    for name in names:
        reason = op.implementation(name).supports(desc)
        if not reason:
            return name, ""
        reasons.append(f"{op.name}: {reason}")
    if op.collective and not reasons:
        return "native", ""
    return "", "; ".join(reasons) or f"{op.name} has no kernel"


@lru_cache(4096)
def _chosen(
    op: SemanticOp, way: Way, args: tuple[Any, ...], device: torch.device
) -> Implementation:
    target = here(device)
    described = op.describe([TensorDesc(*a) if isinstance(a, tuple) else a for a in args])
    kind = "cuda" if device.type == "meta" else device.type
    desc = replace(described, device=kind, sm=target.sm, csrc=target.csrc)
    name, reason = _choice(op, way, desc)
    if not name:
        raise ValueError(f"no implementation of {op.name} in a chain: {reason}")
    return op.implementation(name)


def _implementation(op: SemanticOp, args: tuple[Any, ...], way: Way) -> Implementation:
    """The implementation that computes an op of a stage, remembered by dtypes and shapes."""
    facts = tuple([(a.dtype, a.shape) if isinstance(a, Tensor) else a for a in args])
    return _chosen(op, way, facts, args[0].device)


def _run(*args: Any, way: Way) -> Results:
    call = Call.of(args)
    steps, chosen = cover(args, way.kernels)
    stages, state, at = call.chain.stages, call.state, 0

    def visit(op: SemanticOp, *args: Any) -> Any:
        # What can be chosen is so for each weight: a stage may visit an op for several.
        key = op if _is_fixed(op, way) else (at, op, args[1].dtype, args[1].shape)
        implementation = chosen.get(key)
        if implementation is None:
            implementation = chosen[key] = _implementation(op, args, way)
        return implementation.fn(*args)

    for kernel, start, stop, plain, _ in steps:
        if kernel is not None:
            made = kernel.run(part_at(call, start, stop, state))
            if made is not None:
                state = made
                continue
        for at in range(start, stop):
            stage = stages[at].plain if plain else stages[at]
            state = stage.run(state, call.operands[at], visit)
    return _results(state)


def _in_turn(call: Call, step: Step, state: Any, visit: Visit) -> Any:
    """Compute the stages of a step by their own ops."""
    stages = call.chain.stages
    for at in range(step.start, step.stop):
        stage = stages[at].plain if step.plain else stages[at]
        state = stage.run(state, call.operands[at], visit)
    return state


def _launches(*args: Any, way: Way) -> Launches[Results]:
    """The Triton launches that any number of rows like this one may need: those of the stages in
    turn, and those beside chain kernels."""
    call = checked(args)
    in_turn = tuple(
        k for k in way.kernels if k.launches is not no_launches and not k.quantizes
    )  # one that quantizes as stages in turn do leaves these to them where it cannot read
    planned: list[Launch] = []
    for kernels in dict.fromkeys((in_turn, way.kernels)):
        results = _plan(call, cover(args, kernels).steps, way, planned)
    return planned, results


def _plan(call: Call, steps: tuple[Step, ...], way: Way, planned: list[Launch]) -> Results:
    def visit(op: SemanticOp, *args: Any) -> Any:
        launches = _implementation(op, args, way).launches
        if launches is None:
            return op.fake(*args)
        more, results = launches(*args)
        planned.extend(more)
        return results

    state = call.state
    for step in steps:
        part = part_at(call, step.start, step.stop, state)
        made = step.kernel.launches(part) if step.kernel else None
        if made is not None:
            planned.extend(made[0])
        state = _in_turn(call, step, state, visit) if made is None else made[1]
    return _results(state)


def _names(*args: Any, way: Way) -> tuple[str, ...]:
    """Names of the kernels that a call launches."""
    call = checked(args)
    names: list[str] = []

    def visit(op: SemanticOp, *args: Any) -> Any:
        chosen = _implementation(op, args, way)
        if chosen.runs is not None:
            names.extend(chosen.runs(*args))
        else:
            assert chosen.launches is not None
            names.extend(kernel_names(chosen.launches(*args)[0]))
        return op.fake(*args)

    state = call.state
    for step in cover(args, way.kernels).steps:
        if step.kernel is None:
            state = _in_turn(call, step, state, visit)
        else:
            of = f"chain {' > '.join(s.kind for s in call.chain.stages[step.start : step.stop])}"
            launched = step.kernel.names(part_at(call, step.start, step.stop, state))
            names += [KernelName(Choice(of, Kernel(name), step.refused)) for name in launched]
            plain = not step.kernel.quantizes
            state = _in_turn(call, step._replace(plain=plain), state, by_fake)
    return tuple(names)


class _Refused(Exception):
    """Ends the walk over stages of which one has no implementation."""


def _choices(desc: OpDesc, way: Way) -> tuple[list[str], str]:
    """The implementations of the ops of all stages, and why there is none for one of them."""
    chosen: list[str] = []

    def visit(op: SemanticOp, *args: Any) -> Any:
        part = replace(op.describe(args), device=desc.device, sm=desc.sm, csrc=desc.csrc)
        name, reason = _choice(op, way, part)
        if not name:
            raise _Refused(reason)
        chosen.append(name)
        return op.fake(*args)

    try:
        _call_of(desc, rows=2, make=_on_meta).fold(visit)
    except (_Refused, ValueError) as error:
        return chosen, str(error)
    return chosen, ""


def _library_supports(desc: OpDesc) -> str:
    return _choices(desc, LIBRARY)[1]


def _on_meta(fact: TensorDesc) -> Tensor:
    return torch.empty(fact.shape, dtype=fact.dtype, device="meta")


def _call_of(desc: OpDesc, rows: int, make: Callable[[TensorDesc], Any]) -> Call:
    """The call that is described, with so many rows where their number is a symbol."""
    held = [value for _, value in desc.args]

    def fixed(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [fixed(each) for each in value]
        if not isinstance(value, TensorDesc):
            return value
        shape = tuple(d if isinstance(d, int) else rows for d in value.shape)
        return make(TensorDesc(value.dtype, tuple(map(int, shape))))

    return Call.of([fixed(value) for value in held])


def _cuda_supports(desc: OpDesc) -> str:
    """Why csrc serves neither some of a call's stages nor several of them at once."""
    chosen, reason = _choices(desc, CUDA)
    if reason:
        return reason
    one_row = _call_of(desc, 1, lambda fact: fact)
    one_row = one_row._replace(x=_one_row(one_row.x), residual=_one_row(one_row.residual))
    steps = lay(one_row, Target.of(desc), CUDA.kernels)
    joined = any(step.kernel not in (None, SUM_OF_CSRC, ROWS, GATED, LONE) for step in steps)
    # Around experts that csrc does not compute, its kernels still stream the layers.
    of_experts = any(isinstance(stage, Experts) for stage in one_row.chain.stages)
    if joined or "cuda" in chosen or (of_experts and "skinny" in chosen):
        return ""
    reasons = [f"{name}: {reason}" for step in steps for name, reason in step.refused]
    return reasons[0] if reasons else "no chain kernel has this pattern"


def _one_row(x: TensorDesc) -> TensorDesc:
    return TensorDesc(x.dtype, (*(1 for _ in x.shape[:-1]), x.shape[-1]))


def _inline_supports(desc: OpDesc) -> str:
    has_experts = any(isinstance(s, Experts) for s in _call_of(desc, 2, _on_meta).chain.stages)
    return "experts are chosen by values that Inductor does not see" if has_experts else ""


def stage_costs(desc: OpDesc) -> list[tuple[Stage | None, Cost]]:
    """What each stage costs; with None, the bytes of activations and residual that a call moves."""
    call = Call.of([value for _, value in desc.args])
    x, costs = call.x, list[tuple[Stage | None, Cost]]()
    for stage, operands in zip(call.chain.stages, call.operands, strict=True):
        x, cost = stage.measure(TensorDesc(call.residual.dtype, x.shape), operands)
        costs.append((stage, cost))
    moved = call.x.nbytes + 2 * call.residual.nbytes
    return [*costs, (None, Cost(moved + (0 if call.chain.ends_in_sum else x.nbytes), 0))]


def _cost(desc: OpDesc) -> Cost:
    costs = [cost for _, cost in stage_costs(desc)]
    return Cost(sum(cost.bytes for cost in costs), sum(cost.flops for cost in costs))


def _op(reference: Callable[..., Results], over_ranks: bool) -> SemanticOp:
    def implementation(name: str, way: Way, supports: Callable[[OpDesc], str]) -> Implementation:
        launches, names = partial(_launches, way=way), partial(_names, way=way)
        return on_gpu(name, partial(_run, way=way), supports, launches=launches, runs=names)

    return SemanticOp(
        reference=reference,
        fake=_fake,
        cases=partial(cases, over_ranks=over_ranks),
        cost=_cost,
        implementations=(
            implementation("cuda", CUDA, _cuda_supports),
            implementation("library", LIBRARY, _library_supports),
            Implementation("native", reference, _inline_supports, inline=not over_ranks),
            Implementation("eager", reference, on_host=True),
        ),
        # The streaming kernels round once less, and each layer behind another moves results more.
        tolerances={
            torch.float32: Tolerance(1e-4, 1e-4),
            torch.bfloat16: Tolerance(6e-2, 6e-2),
            torch.float16: Tolerance(1e-2, 1e-2),
        },
    )


CHAIN, CHAIN_OVER_RANKS = _op(chain, False), _op(chain_over_ranks, True)
