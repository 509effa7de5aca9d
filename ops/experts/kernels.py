"""Chooses the kernel of the experts' linear layers: the grouped members of the linear family.

``describe_experts`` reads a call as the ``LinearDesc`` of one expert with ``groups`` set, and
``select`` chooses from ``EXPERT_KERNELS`` as it does for dense layers; rows are tokens.  With few
tokens each choice of a token reads its expert's weight by itself; with more, slots are sorted by
expert, and an expert's weight is read once for all of its rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...config.expert_tables import ExpertShape, ExpertTile
from ...config.weight_format import why_not_experts
from ..core.choice import Choice, launched
from ..core.desc import TensorDesc
from ..core.device_table import expert_table, expert_tiles
from ..core.gate import read_spelled
from ..core.launch import Launches, run_launches
from ..core.target import Target, here
from ..launches import experts as plans
from ..launches.experts import Sorted
from ..linear.desc import LinearDesc, describe
from ..linear.kernels import LinearKernel, select
from ..norm.gated_act import ACTIVATIONS

MOST_UNSORTED = 8
"""Most tokens whose slots are not sorted."""
_CALLS = 4096


class ExpertArgs(NamedTuple):
    """The arguments of a call of ``expert_linear``."""

    x: Any
    weight: Any
    topk_ids: Any
    x_scale: Any = None
    weight_scale: Any = None
    out_dtype: Any = None
    activation: str | None = None
    first_expert: Any = None
    bias: Any = None
    weight_zero: Any = None
    weight_format: str | None = None


def describe_experts(*args: Any) -> LinearDesc:
    """Describe a call of ``expert_linear`` from its arguments, of which shapes and dtypes are read.

    Raises:
        ValueError: they do not fit each other; names the argument and what was expected.
    """
    call = ExpertArgs(*args)
    x, weight, topk_ids, first_expert = call.x, call.weight, call.topk_ids, call.first_expert
    if len(weight.shape) != 3 or len(x.shape) != 2:
        raise ValueError(
            f"expert_linear of x {[*x.shape]} by {[*weight.shape]}, expected [rows, in_features] "
            "and [num_experts, out_features, in_features]"
        )
    num_experts = weight.shape[0]
    if len(topk_ids.shape) != 2 or topk_ids.dtype != torch.int32:
        raise ValueError(
            f"expert_linear: topk_ids are {topk_ids.dtype} {[*topk_ids.shape]}, expected "
            "torch.int32 [num_tokens, top_k]"
        )
    tokens, top_k = topk_ids.shape
    if x.shape[0] != tokens and x.shape[0] != tokens * top_k:
        raise ValueError(
            f"expert_linear: x has {x.shape[0]} rows, expected one for each of {tokens} tokens, or "
            f"for each of their {top_k} choices"
        )
    held = {name: getattr(call, name) for name in _OF_EXPERTS}
    for name, dims in _OF_EXPERTS.items():
        tensor = held[name]
        if tensor is None:
            continue
        if len(tensor.shape) != dims or tensor.shape[0] != num_experts:
            raise ValueError(
                f"expert_linear: {name} is {[*tensor.shape]}, expected {dims} dimensions, of which "
                f"the first is that of {num_experts} experts"
            )
        held[name] = TensorDesc(tensor.dtype, tuple(tensor.shape[1:]))
    if first_expert is not None and (
        tuple(first_expert.shape) != (1,) or first_expert.dtype != torch.int32
    ):
        raise ValueError(
            f"expert_linear: first_expert is {first_expert.dtype} {[*first_expert.shape]}, "
            "expected torch.int32 [1]"
        )
    one = TensorDesc(weight.dtype, tuple(weight.shape[1:]))
    scales, act = (call.x_scale, held["weight_scale"]), call.activation
    if act is not None:
        act, _ = read_spelled(act)
        if act not in ACTIVATIONS:
            expected = " or ".join(map(repr, ACTIVATIONS))
            raise ValueError(f"expert_linear: the activation is {act!r}, expected {expected}")
    stored = held["weight_zero"], call.weight_format
    desc = describe(x, one, held["bias"], *scales, call.out_dtype, act, None, *stored)
    return replace(desc, groups=num_experts, activation=call.activation or "")


_OF_EXPERTS = {"weight_scale": 3, "bias": 2, "weight_zero": 3}
"""The operands beside the weight that each expert has, and their dimensions."""


def share_chosen(num_tokens: Any, top_k: Any, experts: Any) -> Any:
    """The share of the experts that tokens choose on average if every expert is equally likely, as
    a fraction or an expression.  Which they choose is data; real routers prefer some experts, so
    that fewer are read."""
    import sympy

    missed = sympy.Max(0, 1 - sympy.sympify(top_k) / experts)
    return 1 - missed**num_tokens


def why_not_read(desc: LinearDesc) -> str:
    """Why Triton's kernel does not read weights of this format, or nothing."""
    form = desc.format.stored
    return "" if form is None else why_not_experts(form, desc.in_features)


def _slots_refuse(desc: LinearDesc, rows: int, target: Target) -> str:
    if reason := why_not_read(desc):
        return reason
    if rows > MOST_UNSORTED:
        return f"{rows} tokens: an expert's weight is read once a token, up to {MOST_UNSORTED}"
    return ""


def _sorted_refuses(desc: LinearDesc, rows: int, target: Target) -> str:
    if reason := why_not_read(desc):
        return reason
    if desc.groups > plans.MOST_EXPERTS:
        return f"{desc.groups} experts > {plans.MOST_EXPERTS}: their offsets are one tile"
    return ""


def shape_of(desc: LinearDesc) -> ExpertShape:
    """The shape by which tables are found, of either layer of the experts."""
    inner = desc.out_features // 2 if desc.activation else desc.in_features
    kind = "fp8" if desc.format.scaled else "bfloat16"
    if desc.format.stored:
        kind = desc.weight_format
    return desc.groups, inner, "fp8 block" if desc.weight_format == "fp8 block" else kind


def _tile(desc: LinearDesc, tokens: int, top_k: int, is_sorted: bool) -> plans.Tile:
    """The tuned tile, or that of the rule.  Slots that are not sorted are a tile each, which has no
    use for more rows than the fewest."""
    gated = bool(desc.activation)
    shape, counted = shape_of(desc), plans.counted_tokens(tokens)
    itemsize = (desc.dtype if desc.format.stored else desc.format.dtype).itemsize
    if itemsize <= 2 and (table := expert_tiles(shape, counted)):
        tuned = table.find(counted)
        tuned = tuned if is_sorted else replace(tuned, rows=16)
        return plans.tuned_tile(tuned, gated=gated)
    experts, intermediate, _ = shape
    of_layer = plans.Shape(experts, top_k, intermediate, itemsize)
    return plans.tile_of(tokens if is_sorted else 1, of_layer, gated=gated)


def plan_gemm(
    by_expert: Sorted | None,
    *args: Any,
    invariant: bool = False,
    forced: ExpertTile | None = None,
) -> Launches[Tensor]:
    """The launch of the Triton GEMM for slots that are sorted already; None: for each by itself.

    Args:
        args: as of ``ExpertArgs``.
        invariant: a row has the same bits whatever the other rows are.
        forced: this tile.
    """
    desc, call = describe_experts(*args), ExpertArgs(*args)
    scheme = desc.weight_format.removeprefix("fp8 ") if desc.format.quantizes_x else "none"
    tokens, top_k = call.topk_ids.shape
    size = (call.x if desc.format.stored else call.weight).dtype.itemsize
    if forced is not None:
        tile = plans.tuned_tile(forced, gated=bool(desc.activation))
    elif invariant:
        tile = plans.invariant_tile(size)
    else:
        tile = _tile(desc, tokens, top_k, by_expert is not None)
    weight = plans.Weight(call.weight, *call[4:5], call.weight_zero, scheme, desc.format.stored)
    epilogue = plans.Epilogue(call.bias, desc.activation or None, desc.dtype)
    choice = plans.Chosen(call.topk_ids, call.first_expert, by_expert)
    return plans.expert_linear(call.x, call.x_scale, weight, choice, epilogue, tile)


def _plan_slots(*args: Any) -> Launches[Tensor]:
    return plan_gemm(None, *args)


def _plan_sorted(*args: Any, invariant: bool = False) -> Launches[Tensor]:
    launches, by_expert = plans.sort_by_expert(args[2], args[1].shape[0], args[7])
    more, y = plan_gemm(by_expert, *args, invariant=invariant)
    return [*launches, *more], y


def plan_invariant(*args: Any) -> Launches[Tensor]:
    """``plan`` with one tile for any number of tokens: a row's bits are always the same."""
    return _plan_sorted(*args, invariant=True)


SLOTS = LinearKernel("_expert_linear_kernel", _slots_refuse, run_launches(_plan_slots), _plan_slots)
SORTED = LinearKernel(
    "_sort_by_expert_kernel, _expert_linear_kernel",
    _sorted_refuses,
    run_launches(_plan_sorted),
    _plan_sorted,
)

EXPERT_KERNELS = (SLOTS, SORTED)
"""Every kernel of the experts' layers in order of preference."""


@lru_cache(_CALLS)
def _selected(desc: LinearDesc, rows: int, device: torch.device) -> Choice:
    of = f"expert_linear {desc.groups} x [{desc.out_features}, {desc.in_features}]"
    return select(desc, rows, here(device), EXPERT_KERNELS, f"{of} {desc.weight_format}")


def choices(*args: Any) -> tuple[Choice, ...]:
    """The kernel that the table selects for a call of ``expert_linear``, with its tile."""
    desc, (tokens, top_k) = describe_experts(*args), args[2].shape
    choice = _selected(desc, tokens, args[0].device)
    tile = _tile(desc, tokens, top_k, choice.kernel is SORTED)
    source = "tuned" if expert_table(shape_of(desc)) else "by the rule"
    how = f"tile {tile.rows} x {tile.columns} x {tile.depth}, {tile.warps} warps, {tile.stages}"
    *before, gemm = launched(plan(*args)[0], choice.of)
    return (*before, replace(choice, parameters=f"{how} stages, {source}", kernel=gemm.kernel))


def plan(*args: Any) -> Launches[Tensor]:
    """The launches of a call, and its result."""
    choice = _selected(describe_experts(*args), args[2].shape[0], args[0].device)
    return choice.kernel.launches(*args)  # type: ignore[no-any-return]
