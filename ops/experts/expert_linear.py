"""``expert_linear`` is a linear layer of many weights, of which each row is multiplied by the one
that its router chose: the grouped member of the linear family.

Formats and epilogue are those of ``linear`` (``desc.py``); which kernel runs follows from
the description and the number of tokens (``kernels.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config.weight_format import STORED_FORMATS
from ..core import rowwise as _rowwise
from ..core.desc import Case, Cost, Draw, OpDesc, TensorDesc, drawn
from ..core.float8 import E4M3
from ..core.gate import Gate, spelled
from ..core.op import Implementation, SemanticOp, dispatched, on_cpu, triton, with_defaults
from ..core.target import Target
from ..core.tiles import cdiv
from ..linear.cases import FP8, GATED, PLAIN
from ..linear.desc import LinearArgs, LinearDesc
from ..linear.formats import quantize
from ..linear.kernels import multiply
from ..norm.gated_act import activate
from ..norm.quantize import refuses_device
from . import kernels as kernels
from .kernels import ExpertArgs, describe_experts

Gemm = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dispatched
def expert_linear(
    x: Tensor,
    weight: Tensor,
    topk_ids: Tensor,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    first_expert: Tensor | None = None,
    bias: Tensor | None = None,
    weight_zero: Tensor | None = None,
    weight_format: str | None = None,
) -> Tensor:
    """``linear`` of each row by the weight of its expert (Shazeer et al., 2017, eq. 1).

    Args:
        x: [num_tokens, in_features], of which each row is read by all experts of its token; or
            [num_tokens * top_k, in_features], a row for each choice.  Floating point; or
            float8_e4m3fn, which stands for ``x * x_scale``.
        weight: [num_experts, out_features, in_features], same dtype; or as ``weight_format`` stores
            it, with the experts ahead.
        topk_ids: [num_tokens, top_k] int32, from 0 to num_experts - 1; any with ``first_expert``.
        x_scale: of FP8: as of ``linear``.
        weight_scale: of FP8: that of ``linear`` for each expert, [num_experts, ...].
        out_dtype: as of ``linear``.
        activation: a gated one, with its options as ``spelled`` writes them, such as "silu" or
            "silu(alpha=1.702, limit=7.0, up_offset=1.0, interleaved=True)".
        first_expert: [1] int32, the id of expert 0 of a ``weight`` that has one rank's experts.
            The rows of choices whose expert is another rank's are zeros.
        bias: [num_experts, out_features] of the result's dtype: each expert adds its own.
        weight_zero, weight_format: as of ``linear``, for each expert; x is not quantized then.

    Returns:
        [num_tokens * top_k, out_features], or with an activation half of that, contiguous: row
        ``token * top_k + place`` is that of the token's choice in that place.  Sums are float32.

    Raises:
        ValueError: shapes, dtypes or the activation are none of these.
    """
    scales, stored = (x_scale, weight_scale), (weight_zero, weight_format)
    how = (out_dtype, activation, first_expert, bias, *stored)
    return _by_expert(F.linear, x, weight, topk_ids, *scales, *how)


def _by_expert(gemm: Gemm, *args: Any) -> Tensor:
    """The definition, one expert after the other, by some GEMM."""
    desc = describe_experts(*args)
    call = ExpertArgs(*args)
    x, weight, topk_ids, first_expert = call.x, call.weight, call.topk_ids, call.first_expert
    slots_a_row = topk_ids.numel() // max(x.shape[0], 1)
    of_slot = topk_ids.flatten()
    if first_expert is not None:
        of_slot = of_slot - first_expert
    y: Tensor = x.new_zeros((of_slot.numel(), desc.out_features), dtype=desc.dtype)
    for expert in of_slot.unique().tolist():
        if first_expert is not None and not 0 <= expert < len(weight):
            continue
        slots = (of_slot == expert).nonzero().squeeze(1)
        rows = slots // slots_a_row
        of_rows = call.x_scale
        if desc.format.quantizes_x and desc.weight_format != "fp8 tensor":
            of_rows = of_rows[rows]
        of_expert = (None if t is None else t[expert] for t in (call.bias, call.weight_scale))
        bias, scale = of_expert
        zero = None if call.weight_zero is None else call.weight_zero[expert]
        operands = (x[rows], weight[expert], bias, of_rows, scale, desc.dtype, None, None)
        y[slots] = multiply(gemm, LinearArgs(*operands, zero, call.weight_format))
    return y if call.activation is None else activate(y, call.activation)


def _fake(x: Tensor, weight: Tensor, topk_ids: Tensor, *rest: Any) -> Tensor:
    desc = describe_experts(x, weight, topk_ids, *rest)
    return x.new_empty((topk_ids.shape[0] * topk_ids.shape[1], desc.columns), dtype=desc.dtype)


_with_defaults = with_defaults(ExpertArgs)


def _supports(why_not: Callable[[LinearDesc], str]) -> Callable[[OpDesc], str]:
    def supports(call: OpDesc) -> str:
        try:
            desc = describe_experts(*(value for _, value in call.args))
        except ValueError as error:
            return str(error)
        if desc.format.quantizes_x and (reason := refuses_device(call)):
            return reason
        return why_not(desc)

    return supports


def _triton_refuses(desc: LinearDesc) -> str:
    if desc.dtype == torch.float64:
        return "sums are float32: float64 would lose bits"
    return kernels.SORTED.refuses(desc, 1, Target(torch.device("meta")))


def _invariant_refuses(desc: LinearDesc) -> str:
    if reason := kernels.why_not_read(desc):
        return reason
    return "an activation's kernel follows the number of rows" if desc.activation else ""


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    device, randn = draw.device, draw.randn

    def ids(tokens: int, top_k: int, experts: int) -> Tensor:
        order = draw.rand(tokens, experts).argsort(-1)
        return order[:, :top_k].to(torch.int32)

    def call(
        label: str,
        tokens: int,
        top_k: int,
        experts: int,
        n: int,
        k: int,
        activation: str | None = None,
        *,
        a_row_a_choice: bool = False,
        chosen: Tensor | None = None,
        rank: int | None = None,
        biased: bool = False,
    ) -> Case:
        """A case of one of two ranks, each with ``experts`` experts, or of one rank (None)."""
        all_experts = experts if rank is None else 2 * experts
        topk_ids = ids(tokens, top_k, all_experts) if chosen is None else chosen
        x = randn(tokens * (top_k if a_row_a_choice else 1), k).to(draw.dtype)
        weight = (randn(experts, n, k) * k**-0.5).to(draw.dtype)
        first = None if rank is None else _first_expert(rank * experts, device)
        tolerances = PLAIN if activation is None else GATED
        args = (x, weight, topk_ids, None, None, None, activation, first)
        if not biased:
            return Case(label, args, tolerances)
        return Case(label, (*args, randn(experts, n).to(draw.dtype)), tolerances)

    yield call("one token", 1, 2, 4, 48, 64)
    yield call("SiLU, few tokens", 3, 2, 8, 2 * 40, 64, "silu")
    yield call("a row for each choice", 5, 3, 6, 40, 96, a_row_a_choice=True)
    yield call("sorted, SiLU", 11, 4, 16, 2 * 48, 64, "silu")
    yield call("sorted, a row for each choice", 13, 2, 5, 72, 32, a_row_a_choice=True)
    yield call("odd N, K, GELU", 9, 2, 3, 2 * 19, 37, "gelu_tanh")
    everyone = torch.full((40, 1), 2, dtype=torch.int32, device=device)
    yield call("all tokens to one expert", 40, 1, 4, 24, 32, chosen=everyone + randn(1).int() * 0)
    yield call("few of many experts", 10, 1, 64, 24, 32)
    yield call("counted, then sorted", 1030, 1, 4, 16, 32)
    yield call("few tokens, another rank has half", 4, 3, 3, 24, 32, rank=1)
    yield call("sorted, SiLU, another rank has half", 13, 3, 5, 2 * 24, 32, "silu", rank=0)
    yield call("sorted, another rank has half", 12, 2, 4, 24, 32, a_row_a_choice=True, rank=1)
    elsewhere = torch.zeros((9, 1), dtype=torch.int32, device=device)
    yield call("all experts are another rank's", 9, 1, 2, 16, 32, chosen=elsewhere, rank=1)
    yield call("no tokens", 0, 2, 4, 16, 32)
    x, weight, topk_ids, *_ = call("", 6, 2, 4, 32, 160).args
    yield Case("slices", (x[:, 32:96], weight[:, 8:, 32:96], topk_ids), PLAIN)
    clamped = spelled("silu", Gate(1.702, 1.5, 1.0, interleaved=True))
    yield call("biases, few tokens", 3, 2, 5, 40, 64, biased=True)
    yield call("biases, sorted, one rank", 12, 2, 4, 24, 32, biased=True, rank=1)
    yield call("clamped pairs, biases, few tokens", 2, 3, 4, 2 * 40, 48, clamped, biased=True)
    yield call("clamped pairs, biases, sorted", 11, 2, 4, 2 * 35, 64, clamped, biased=True)
    yield call("clamped halves", 10, 2, 3, 2 * 24, 64, spelled("silu", Gate(1.702, 1.5)))
    yield from _fp8_cases(draw, ids)
    yield from _stored_cases(draw, ids, clamped)
    if device.type == "cuda":  # too large to interpret
        yield call("64 tokens of 128 experts, SiLU", 64, 8, 128, 2 * 192, 512, "silu")
        yield call("700 tokens", 700, 4, 32, 256, 512, a_row_a_choice=True)
        yield call("3000 tokens, SiLU", 3000, 2, 8, 2 * 320, 256, "silu")
        yield call("8 tokens of Qwen3-30B-A3B", 8, 8, 128, 2 * 768, 2048, "silu")


def _first_expert(number: int, device: torch.device) -> Tensor:
    return torch.tensor([number], dtype=torch.int32, device=device)


def _fp8_cases(draw: Draw, ids: Callable[..., Tensor]) -> Iterator[Case]:
    def scales(*shape: int) -> Tensor:
        return 0.5 + draw.rand(*shape)

    def values(size: float, *shape: int) -> Tensor:
        return (draw.randn(*shape) * size).clamp(-448, 448).to(E4M3)

    def calls(
        label: str, tokens: int, top_k: int, experts: int, n: int, k: int, rows: int
    ) -> Iterator[Case]:
        """``rows`` of x; with an activation where each token has one."""
        x, weight, topk_ids = (
            values(1.0, rows, k),
            values(100.0, experts, n, k),
            ids(tokens, top_k, experts),
        )
        groups, unit = cdiv(k, 128), 100.0 * k**0.5
        activation = "silu" if rows == tokens and top_k > 1 else None
        tolerances = FP8 if activation is None else _FP8_GATED
        for scheme, x_scale, weight_scale in (
            ("tensor", scales(1, 1), scales(experts, 1, 1)),
            ("token", scales(rows, 1), scales(experts, n, 1)),
            ("block", scales(groups, rows).t(), scales(experts, cdiv(n, 128), groups)),
        ):
            args = (x, weight, topk_ids, x_scale, weight_scale / unit, draw.dtype, activation)
            yield Case(f"{label}, FP8 {scheme}", args, tolerances)
        first = _first_expert(experts // 2, draw.device)
        yield Case(f"{label}, FP8 {scheme}, another rank has half", (*args, first), tolerances)

    yield from calls("few tokens", 2, 2, 4, 2 * 40, 256, rows=2)
    yield from calls("sorted", 10, 2, 4, 48, 200, rows=20)
    yield from calls("odd I, sorted", 9, 2, 3, 2 * 83, 128, rows=9)
    if draw.device.type == "cuda":
        yield from calls("64 tokens", 64, 8, 64, 2 * 384, 1024, rows=64)
        yield from calls("1000 tokens", 1000, 2, 8, 512, 768, rows=2000)


def _stored_cases(draw: Draw, ids: Callable[..., Tensor], clamped: str) -> Iterator[Case]:
    """Weights in formats of few bits, of which a group may be longer than a tile is deep."""
    names = ("mxfp4", "int4_zero_g32", "int4_zero_g128", "int8_channel")
    for form in map(STORED_FORMATS.__getitem__, names):
        k = 96 if form.scale.unit[1] in (0, 32) else 3 * form.scale.unit[1]
        for tokens, activation in ((3, None), (10, clamped)):
            experts, top_k, n = 3, 2, 2 * 20
            parts = [quantize(form, draw.randn(n, k) * k**-0.5) for _ in range(experts)]
            held = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
            x = draw.randn(tokens, k).to(draw.dtype)
            args = (x, held["weight"], ids(tokens, top_k, experts), None, held["weight_scale"])
            bias = draw.randn(experts, n).to(draw.dtype) if activation else None
            how = (None, activation, None, bias, held.get("weight_zero"), form.name)
            tolerances = PLAIN if activation is None else GATED
            yield Case(f"{form.name}, {tokens} tokens", (*args, *how), tolerances)


# Gates and ups of a few units, each off by what tensor cores drop.
_FP8_GATED = {d: type(t)(4 * t.atol, 4 * t.rtol) for d, t in FP8.items()}


def _cost(call: OpDesc) -> Cost:
    x, weight, topk_ids = call["x"], call["weight"], call["topk_ids"]
    (experts, out_features, _), in_features = weight.shape, x.shape[1]
    slots = topk_ids.numel
    gated = call["activation"] is not None
    columns = out_features // 2 if gated else out_features
    tensors = {name: value for name, value in call.args if isinstance(value, TensorDesc)}
    held = ("weight", "weight_scale", "weight_zero", "bias")
    weights = sum(tensors.pop(name).nbytes for name in held if name in tensors)
    read = sum(value.nbytes for value in tensors.values())
    num_tokens, top_k = topk_ids.shape
    read += kernels.share_chosen(num_tokens, top_k, experts) * weights
    written = slots * columns * (call["out_dtype"] or x.dtype).itemsize
    return Cost(
        bytes=read + written,
        flops=2 * slots * out_features * in_features + 5 * gated * slots * columns,
    )


OP = SemanticOp(
    reference=expert_linear,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        triton(
            _with_defaults(kernels.plan),
            _supports(_triton_refuses),
            selects=_with_defaults(kernels.choices),
        ),
        Implementation("native", expert_linear, on_host=True),
        triton(
            _with_defaults(kernels.plan_invariant),
            _supports(_invariant_refuses),
            name="invariant",
            opt_in=True,
        ),
        on_cpu(
            "rowwise",
            _with_defaults(partial(_by_expert, _rowwise.linear)),
            _supports(_invariant_refuses),
            opt_in=True,
        ),
    ),
    tolerances=PLAIN,
)
