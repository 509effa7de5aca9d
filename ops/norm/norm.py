"""The norms: ``[all_reduce_][add_]rms_norm[_quant_SCHEME]`` and ``[add_]layer_norm``, by axes.

``Norm`` is a combination of the axes, and ``NORMS`` has the op of each.  An op computes, in this
order, the sum over ranks of x, the sum with the residual, RMSNorm (Zhang and Sennrich, 2019, eq. 4)
or layer normalization (Ba et al., 2016, eq. 4), and its quantization to FP8 or int8.
Every step rounds as the op of that step alone, so passes that attach a step to a norm change no
bit.  Models call ``rms_norm``; layer norms are raised by ``canonicalize_norm``.

Arguments: x, [residual,] weight, eps, weight_offset | bias | scale | group_size[, group_name].
Results: the norm, or its quantized values [and scales]; then the last sum, if the op makes one: the
next residual.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..collective import peer_memory as _peer_memory
from ..collective.all_reduce import (
    CASES_GROUP,
    check as check_sum,
    sum_flops,
    sum_over_ranks,
    wire_bytes,
)
from ..collective.peer_memory import LIBRARY
from ..core.choice import Choice, Kernel, launched
from ..core.desc import TOLERANCES, Case, Cost, OpDesc
from ..core.float8 import E4M3
from ..core.launch import Launch, run_launches
from ..core.op import Implementation, SemanticOp, on_gpu, parameter, signed, triton
from ..launches import norm as plans
from ..launches.quant import empty_results, norm_quantize
from .quantize import (
    ONE_STEP,
    SCHEMES,
    alone_or_all,
    check,
    finish,
    quantizing_cost,
    refuses_device,
    schemes,
    too_wide_for,
)

_MAX_HIDDEN = 16384


@dataclass(frozen=True)
class Norm:
    """What a norm does besides normalizing: sum over ranks, add a residual, quantize; and whether
    it subtracts the mean, as a layer norm does."""

    reduce: bool = False
    add: bool = False
    quant: str = ""
    center: bool = False

    @property
    def name(self) -> str:
        quant = f"_quant_{self.quant}" if self.quant else ""
        kind = "layer" if self.center else "rms"
        return f"{'all_reduce_' * self.reduce}{'add_' * self.add}{kind}_norm{quant}"

    @property
    def is_alone(self) -> bool:
        """Whether it does nothing besides."""
        return not (self.reduce or self.add or self.quant)

    @property
    def sums(self) -> bool:
        """Whether a sum is the last result."""
        return self.reduce or self.add


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float | None = None) -> Tensor:
    """Root-mean-square normalization over the last dimension (Zhang and Sennrich, 2019, eq. 4).

    Args:
        x: [..., hidden], floating point.
        weight: [hidden], same dtype as ``x``; with a ``weight_offset`` also float32.
        eps: added to the mean square.
        weight_offset: None rounds to x's dtype, then multiplies by the weight, as Llama does.  A
            number multiplies by weight + weight_offset in float32 and rounds once: 1 is Gemma's
            norm, 0 that of ``torch.nn.functional.rms_norm``.

    Returns:
        [..., hidden] in x's dtype, contiguous; statistics and scaling in float32.
    """
    return torch.ops.fw.rms_norm.default(  # type: ignore[no-any-return]
        x, weight, eps, weight_offset
    )


def rms_norm_native(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float | None = None
) -> Tensor:
    """The definition in plain ATen."""
    plans.check(x, None, weight)
    x_f32 = x.float()
    scale = torch.rsqrt(x_f32.pow(2).mean(-1, keepdim=True) + eps)
    if weight_offset is None:
        return ((x_f32 * scale).to(x.dtype) * weight).contiguous()
    return (x_f32 * scale * (weight.float() + weight_offset)).to(x.dtype).contiguous()


def layer_norm_native(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    """Layer normalization over the last dimension (Ba et al., 2016, eq. 4): what differs from its
    mean, over its standard deviation, times the weight, plus the bias; all in float32, and rounded
    once."""
    plans.check(x, None, weight, bias)
    x_f32 = x.float()
    centered = x_f32 - x_f32.mean(-1, keepdim=True)
    scale = torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + eps)
    y = centered * scale * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype).contiguous()


def definition(axes: Norm, *args: Any) -> Any:
    """The results of the op of ``axes``, step by step."""
    (x, *rest), total = args, None
    if axes.reduce:
        total = x = sum_over_ranks(x, rest.pop())
    if axes.add:
        residual, *rest = rest
        plans.check(x, residual, rest[0])
        total = x = (x + residual).contiguous()
    weight, eps, *how = rest
    if axes.quant:
        made = finish(rms_norm_native(x, weight, eps), how[0], SCHEMES[axes.quant].dtype)
    else:
        made = ((layer_norm_native if axes.center else rms_norm_native)(x, weight, eps, *how),)
    return alone_or_all(made if total is None else (*made, total))


def _fake(axes: Norm, *args: Any) -> Any:
    x, *rest = args
    if axes.reduce:
        check_sum(x, rest.pop())
    # A sum's sizes are spelled as those of its first operand, where they are expressions.
    like = rest[0] if axes.add else x
    total = torch.empty_like(like, memory_format=torch.contiguous_format)
    made: tuple[Tensor, ...] = (total,)
    if axes.quant:
        check(x, rest[-1])
        made = empty_results(x, x.shape[1], rest[-1], SCHEMES[axes.quant].dtype)
    elif axes.sums:
        made = (torch.empty_like(total),)
    return alone_or_all((*made, total) if axes.sums else made)


def _launches(axes: Norm, x: Tensor, *rest: Any) -> tuple[list[Launch], Any]:
    residual, rest = (rest[0], rest[1:]) if axes.add else (None, rest)
    if axes.quant:
        check(x, rest[-1])
        weight, eps, scheme = rest
        dtype = SCHEMES[axes.quant].dtype
        planned, results = norm_quantize(x, residual, weight, eps, scheme, dtype)
    else:
        planned, results = plans.norm(x, residual, *rest, center=axes.center)
    return planned, alone_or_all(results)


def _in_turn(axes: Norm, x: Tensor, *rest: Any) -> Any:
    """The sum of torch.distributed, then the norm's kernel."""
    *args, group_name = rest
    total = sum_over_ranks(x, group_name)
    made = _run_alone(replace(axes, reduce=False), total, *args)
    return made if axes.add else alone_or_all((*_each(made), total))


def _each(made: Any) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


_run_alone = run_launches(_launches)


def _in_turn_launches(axes: Norm, x: Tensor, *rest: Any) -> tuple[list[Launch], Any]:
    planned, made = _launches(replace(axes, reduce=False), x, *rest[:-1])
    return planned, made if axes.add else alone_or_all((*_each(made), torch.empty_like(x)))


def _in_turn_runs(axes: Norm, x: Tensor, *rest: Any) -> tuple[str, ...]:
    planned, _ = _in_turn_launches(axes, x, *rest)
    return LIBRARY, *(launch.kernel.partition(":")[2] for launch in planned)


def _push(axes: Norm, x: Tensor, *rest: Any) -> Any:
    """One kernel of csrc over peer memory, or both in turn for what is too large for it."""
    *args, group_name = rest
    check_sum(x, group_name)
    shots = _peer_memory.shots(x, group_name)
    if not shots:
        return _in_turn(axes, x, *rest)
    residual, (weight, eps, how) = (args[0], args[1:]) if axes.add else (None, args)
    plans.check(x, residual, weight)
    shape = x.shape
    if residual is not None:
        residual = residual.reshape(-1, shape[-1]).contiguous()
    static = isinstance(how, Tensor)
    y, scales, total = torch.ops.fw_cuda.peer_all_reduce_norm.default(
        _peer_memory.aligned_rows(x),
        residual,
        weight,
        eps,
        None if axes.quant else how,
        how if static else None,
        how if axes.quant and not static else -1,
        group_name,
        shots == 2,
    )
    values = (y.view(shape), scales.t()) if axes.quant == "dynamic" else (y.view(shape),)
    return alone_or_all((*values, total.view(shape)))


def _push_choices(axes: Norm, x: Tensor, *rest: Any) -> tuple[Choice, ...]:
    choice = replace(_peer_memory.choose_sum(x, rest[-1]), of=axes.name)
    if choice.name == LIBRARY:
        return choice, *launched(_in_turn_launches(axes, x, *rest)[0], axes.name)
    return (replace(choice, kernel=Kernel(f"{choice.name} + {replace(axes, reduce=False).name}")),)


def _push_supports(axes: Norm, desc: OpDesc) -> str:
    if reason := _supports(axes, desc) or _peer_memory.refuses(desc):
        return reason
    if desc["weight"].dtype != desc["x"].dtype:
        return f"x is {desc['x'].dtype} and the weight {desc['weight'].dtype}"
    return _peer_memory.refuses_rows(desc)


def _cases(
    axes: Norm, dtype: torch.dtype, device: torch.device, gen: torch.Generator
) -> Iterator[Case]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, device=device)

    def calls(
        label: str, x: Tensor, eps: float = 1e-5, offset: float | None = None, weight: Any = None
    ) -> Iterator[Case]:
        x = x.to(dtype) if x.dtype == torch.float32 else x
        weight = randn(x.shape[-1]).to(dtype) if weight is None else weight
        residual = (randn(*x.shape).to(dtype),) if axes.add else ()
        group = (CASES_GROUP,) if axes.reduce else ()
        if not axes.quant:
            offsets: tuple[Any, ...] = (offset,) if axes.reduce or offset is not None else ()
            if axes.center:  # a layer norm has a bias where an RMSNorm's weight has an offset
                x.add_(1)
                offsets = (randn(x.shape[-1]).to(weight.dtype),) if len(x) != 7 else ()
            yield Case(label, (x, *residual, weight, eps, *offsets, *group))
        elif x.dim() == 2 and offset is None:
            for name, scheme in schemes(axes.quant, device, gen, x.shape[1]):
                yield Case(f"{label}, {name}", (x, *residual, weight, eps, scheme, *group))

    for shape in [(1, 64), (7, 256), (1, 128), (33, 96), (5, 4, 128), (2, 1001), (3, 4096)]:
        yield from calls(f"{list(shape)}", randn(*shape))
    outliers = randn(9, 384)
    outliers[randn(9, 384) > 2] *= 300
    outliers[4] = 0
    yield from calls("outliers, zeros", outliers)
    yield from calls("slice of [6, 640]", randn(6, 640).to(dtype)[:, 128:512], 1e-6)
    heads = randn(9, 8 * 64).to(dtype).view(9, 8, 64)[:, 5:7]
    yield from calls("heads of a packed qkv", heads, 1e-6)
    yield from calls("Gemma's 1 + weight", randn(7, 1001), 1e-6, 1.0)
    yield from calls("float32 weight", randn(7, 1001), 1e-6, 0.0, randn(1001))
    yield from calls("columns as rows", randn(128, 6).to(dtype).t(), 1e-6)
    yield from calls("no rows", randn(0, 128))


def _cost(axes: Norm, desc: OpDesc) -> Cost:
    x, flops = desc["x"], 4 + axes.add + 3 * axes.center
    if axes.quant:
        alone = quantizing_cost(desc, x.shape[1], flops + SCHEMES[axes.quant].flops)
    else:
        bias = desc["bias"].nbytes if axes.center and desc["bias"] is not None else 0
        moved = (2 + axes.add) * x.nbytes + desc["weight"].nbytes + bias
        alone = Cost(moved, flops * x.numel)
    summed = alone.bytes + (x.nbytes if axes.sums else 0)
    if not axes.reduce:
        return Cost(summed, alone.flops)
    return Cost(summed + wire_bytes(x), alone.flops + sum_flops(x))


def _supports(axes: Norm, desc: OpDesc) -> str:
    width = desc["x"].shape[-1]
    if axes.quant:
        how = SCHEMES[axes.quant]
        return too_wide_for(how, width, _MAX_HIDDEN) or refuses_device(desc, how.dtype)
    return plans.too_wide(width)


def _op(axes: Norm) -> SemanticOp:
    """The op of one point.  The arguments of one that sums over ranks have no defaults, since the
    group comes last."""
    offset = parameter("weight_offset", float | None, None)
    if axes.center:
        offset = parameter("bias", Tensor | None, None)
    if axes.reduce:
        offset = offset.replace(default=offset.empty)
    parameters = [
        parameter("x", Tensor),
        *([parameter("residual", Tensor)] if axes.add else []),
        parameter("weight", Tensor),
        parameter("eps", float),
        SCHEMES[axes.quant].parameter if axes.quant else offset,
        *([parameter("group_name", str)] if axes.reduce else []),
    ]
    results = (SCHEMES[axes.quant].results if axes.quant else 1) + axes.sums

    supports, in_turn = partial(_supports, axes), partial(_in_turn_launches, axes)

    def reference(*args: Any) -> Any:
        return definition(axes, *args)

    def native_supports(desc: OpDesc) -> str:
        return refuses_device(desc, SCHEMES[axes.quant].dtype) if axes.quant else ""

    native = Implementation("native", reference, native_supports, inline=not axes.reduce)
    summed = (
        on_gpu(
            "cuda",
            partial(_push, axes),
            partial(_push_supports, axes),
            launches=in_turn,
            selects=partial(_push_choices, axes),
        ),
        on_gpu(
            "triton",
            partial(_in_turn, axes),
            supports,
            launches=in_turn,
            runs=partial(_in_turn_runs, axes),
        ),
    )
    return SemanticOp(
        name=axes.name,
        reference=signed(reference, parameters, results),
        fake=partial(_fake, axes),
        cases=partial(_cases, axes),
        cost=partial(_cost, axes),
        implementations=(
            *(summed if axes.reduce else (triton(partial(_launches, axes), supports),)),
            native,
        ),
        tolerances=ONE_STEP if axes.quant else TOLERANCES,
    )


_FP8 = tuple(quant for quant, how in SCHEMES.items() if how.dtype == E4M3)
_AXES = (
    *(Norm(False, add, quant) for add, quant in product((False, True), ("", *SCHEMES))),
    # The kernel that sums over ranks writes FP8 alone.
    *(Norm(True, add, quant) for add, quant in product((False, True), ("", *_FP8))),
    *(Norm(add=add, center=True) for add in (False, True)),
)
NORMS = {axes: _op(axes) for axes in _AXES}
RMS_NORM, ADD_RMS_NORM = NORMS[Norm()], NORMS[Norm(add=True)]
_POINTS = {op.overload(): axes for axes, op in NORMS.items()}


def norm_axes(target: Any) -> Norm | None:
    """The axes of a norm by its dispatcher op ``fw::name``; None for anything else."""
    return _POINTS.get(target)


def has_axes(target: Any, **changes: Any) -> bool:
    """Whether there is an op that does what the norm ``target`` does, with these axes changed."""
    return replace(_POINTS[target], **changes) in NORMS


def with_axes(target: Any, **changes: Any) -> Any:
    """The dispatcher op that does what the norm ``target`` does, with these axes changed."""
    return NORMS[replace(_POINTS[target], **changes)].overload()
