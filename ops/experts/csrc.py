"""Chooses and calls csrc's kernels for mixtures of experts.

For few tokens there are three kernels: the router, gate and up, and down.  They read only the
weights of the chosen experts, in bfloat16 or FP8.  FP8 weights meet bfloat16 activations: to round
these too would save no bytes.  The first two kernels apply the scale of a norm to their sums; the
third adds a residual and prepares the input of the next norm's reader.  For some more tokens the
same router chooses, and all else is Triton's.  For many tokens Triton chooses experts and sorts
slots, a grouped GEMM of bfloat16 or FP8 computes both layers, and Triton adds the results and
quantizes before a layer of FP8.  For numbers of tokens in between, all kernels are Triton's.

Weights of four bits have kernels of their own (``packed.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core.cuda import why_not_built
from ..core.desc import TensorDesc
from ..core.launch import run_all
from ..core.target import Target, here
from ..launches import experts as plans
from ..launches.experts import MOST_EXPERTS, rows_an_expert
from ..norm.gated_act import ACTIVATIONS
from . import packed
from .moe import Call, Planned, Routed, plan_experts, plan_quantized, plan_routing, plan_sort

MOST_TOKENS = 8
MOST_ROUTED_TOKENS = 64
"""Most tokens for which csrc's router runs.  With 128 experts and 2048 features it takes 4.2, 6.6
and 13.1 us at 16, 64 and 128 tokens, where a GEMM and Triton's choice take 7.3, 7.7 and 7.7."""
MOST_TILED_ROWS = {2: 24, 1: 8}
"""Most rows an expert, as the rule of tiles counts them, for which Triton's GEMMs run instead of
csrc's, by the weight's bytes an element (docs/decisions/many-tokens-use-a-grouped-gemm.md)."""
MANY_TOKENS = 1 << 20
"""A number of tokens that the grouped GEMM surely serves, if it serves the layer at all."""
_MOST_TOP_K, _MOST_EXPERTS, _MOST_GROUPS = 16, 256, 32
# Bfloat16 elements in a 128-byte line, the unit of copies; and the fewest rows of a tile.
_LINE, _ROWS = 64, 8
_SCALE_BLOCK = 128


def _why_not_csrc(call: Call, target: Target) -> str:
    """Why no kernel of csrc can serve a call, or an empty string."""
    if target.why_no_hopper:
        return target.why_no_hopper
    if call.x.dtype != torch.bfloat16:
        return f"x is {call.x.dtype}, not bfloat16"
    return "" if call.first_expert is None else "the experts are spread over ranks"


def _why_not_weights(call: Call) -> str:
    """Why csrc's kernels do not read these weights, or an empty string."""
    if call.weight_format is not None:
        return f"weights of {call.weight_format}"
    if call.gate_up_bias is not None or call.down_bias is not None:
        return "the experts have biases"
    if call.activation not in ACTIVATIONS:
        return f"the activation is {call.activation}"
    if call.gate_up_scale is None or call.down_scale is None:
        served = call.gate_up.dtype == torch.bfloat16
        return "" if served else f"weights of {call.gate_up.dtype}, not bfloat16"
    if call.gate_up_input_scale is not None or call.down_input_scale is not None:
        return "activations have a static scale"
    layers = ((call.gate_up, call.gate_up_scale, 2), (call.down, call.down_scale, 1))
    for weight, scale, halves in layers:
        experts, rows, columns = weight.shape
        if columns % _SCALE_BLOCK:
            return f"{columns} features of FP8: not a multiple of {_SCALE_BLOCK}"
        of_blocks = (experts, rows // _SCALE_BLOCK, columns // _SCALE_BLOCK)
        is_blocks = tuple(scale.shape) == of_blocks and rows % (halves * _SCALE_BLOCK) == 0
        if not is_blocks and tuple(scale.shape) != (experts, rows, 1):
            return f"weights of {rows} rows with scales {[*scale.shape]}"
    return ""


def _why_not_routed(call: Call) -> str:
    """Why the router's kernel does not choose for a call of any size, or an empty string."""
    experts, hidden = call.router_weight.shape
    if call.router_weight.dtype != torch.bfloat16 or hidden % _ROWS:
        return f"a router of {call.router_weight.dtype} and {hidden} features"
    if call.router_bias is not None and call.router_bias.dtype != torch.bfloat16:
        return f"a router's bias of {call.router_bias.dtype}"
    if experts > _MOST_EXPERTS or call.top_k > _MOST_TOP_K or call.num_groups > _MOST_GROUPS:
        return (
            f"top {call.top_k} of {experts} experts in {call.num_groups} groups: at most "
            f"{_MOST_TOP_K} of {_MOST_EXPERTS} in {_MOST_GROUPS}"
        )
    return ""


def why_not_routed(call: Call, rows: int, target: Target) -> str:
    """Why csrc's router does not choose the experts of this many tokens for Triton's layers, or an
    empty string; reads no data."""
    if reason := _why_not_csrc(call, target) or _why_not_routed(call):
        return reason
    if not 0 < rows <= MOST_ROUTED_TOKENS:
        return f"{rows} tokens: fastest from 1 to {MOST_ROUTED_TOKENS}"
    return why_not_built(target.csrc, "moe_route")


def why_not_streamed(call: Call, rows: int, target: Target) -> str:
    """Why the kernels for few tokens do not serve this many, or an empty string; reads no data."""
    why_not_read = packed.why_not_weights if call.weight_format else _why_not_weights
    if reason := _why_not_csrc(call, target) or why_not_read(call) or _why_not_routed(call):
        return reason
    if call.shared_gate is not None:
        return "a shared expert has a gate"
    if call.weight_format:
        return _why_not_few(rows) or packed.why_not_few(call, rows, target)
    experts, both, hidden = call.gate_up.shape
    inner = both // 2
    if hidden % _LINE or inner % _LINE or max(hidden, inner) > packed.MOST_FEATURES:
        most = packed.MOST_FEATURES
        return f"{hidden} and {inner} features: not multiples of {_LINE} up to {most}"
    if inner % _ROWS or experts * max(both, hidden) >= 1 << 30:
        return f"weights of {experts} x {both} rows"
    return _why_not_few(rows) or why_not_built(target.csrc, "moe_route")


def _why_not_few(rows: int) -> str:
    served = 0 < rows <= MOST_TOKENS
    return "" if served else f"{rows} tokens: fastest from 1 to {MOST_TOKENS}"


def why_not_packed(call: Call, rows: int, target: Target) -> str:
    """Why the kernels of weights of four bits do not serve this many tokens, or an empty string;
    reads no data."""
    if reason := _why_not_csrc(call, target) or packed.why_not_weights(call):
        return reason
    if rows <= MOST_TOKENS:
        return packed.why_not_few(call, rows, target)
    return packed.why_not_sorted(call, rows, target)


def why_not_grouped(call: Call, rows: int, target: Target) -> str:
    """Why the grouped GEMM does not serve this many tokens, or an empty string; reads no data."""
    if reason := _why_not_csrc(call, target) or _why_not_weights(call):
        return reason
    experts, both, hidden = call.gate_up.shape
    if hidden % _LINE or both % (2 * _LINE):
        return f"{hidden} and {both // 2} features: not multiples of {_LINE}"
    if experts > MOST_EXPERTS:
        return f"{experts} experts: at most {MOST_EXPERTS}"
    each = rows_an_expert(rows, call.top_k, experts)
    most = MOST_TILED_ROWS[call.gate_up.dtype.itemsize]
    if each <= most:
        return f"{rows} tokens, {each:g} an expert: faster above {most}"
    return why_not_built(target.csrc, GROUPED)


def _is_read_in_lines(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


@lru_cache(4096)
def _refusal(
    why_not: Callable[[Call, int, Target], str],
    described: tuple[Any, ...],
    rows: int,
    device: torch.device,
) -> str:
    held: list[Any] = [TensorDesc(*one) if type(one) is tuple else one for one in described]
    return why_not(Call(*held), rows, here(device))


def _serves(
    why_not: Callable[[Call, int, Target], str], call: Call, weights: tuple[Tensor, ...]
) -> bool:
    """Whether kernels that read ``weights`` serve a call, whose tensors are real or on "meta"."""
    if call.first_expert is not None:
        return False
    described = tuple([(v.dtype, v.shape) if isinstance(v, Tensor) else v for v in call])
    if _refusal(why_not, described, call.x.shape[0], call.x.device):
        return False
    return call.x.device.type == "meta" or all(map(_is_read_in_lines, weights))


def streams(call: Call) -> bool:
    """Whether the kernels for few tokens serve a call."""
    return _serves(why_not_streamed, call, (call.router_weight, *_experts_of(call)))


def routes(call: Call) -> bool:
    """Whether the router's kernel serves a call, whose x is contiguous."""
    return _serves(why_not_routed, call, (call.router_weight,))


def groups(call: Call) -> bool:
    """Whether the grouped GEMM serves a call."""
    return _serves(why_not_grouped, call, _experts_of(call))


def packs(call: Call) -> bool:
    """Whether the kernels of weights of four bits serve a call."""
    return _serves(why_not_packed, call, _experts_of(call))


def _experts_of(call: Call) -> tuple[Tensor, ...]:
    """The weights of the experts' layers, with their scales and biases if there are some."""
    held = (call.gate_up, call.down, call.gate_up_scale, call.down_scale)
    biases = (call.gate_up_bias, call.down_bias)
    return tuple([tensor for tensor in (*held, *biases) if tensor is not None])


def grouped_layers(call: Call, routed: Routed) -> Planned:
    """Run at once what ``plan_experts`` plans: the result has no launches left.  x is
    contiguous."""
    launches, topk_weights, _, by_expert = routed
    assert by_expert is not None
    run_all(launches)

    def multiply(x: Tensor, weight: Tensor, scale: Tensor | None, *how: Any) -> Tensor:
        more, (x, *scales) = plan_quantized(x, call.scheme(None))
        run_all(more)
        run = torch.ops.fw_cuda.moe_grouped_linear.default
        y: Tensor = run(x, weight, *by_expert, *how, *scales, *([] if scale is None else [scale]))
        return y

    # Rows of h are in the order of the sort: only the first layer gathers, the second scatters.
    of_first, of_second = (call.top_k, call.activation, False, True), (1, "", True, False)
    h = multiply(call.x, call.gate_up, call.gate_up_scale, *of_first)
    return Planned([], multiply(h, call.down, call.down_scale, *of_second), topk_weights)


def layers(call: Call, logits: Callable[[Call], Tensor]) -> Planned:
    """The choice of experts and their layers, each by csrc's kernels where it has some for this
    many tokens, else by Triton's.  ``logits`` runs the router's layer; x is contiguous."""
    if routes(call):
        routed = plan_sort(call, [], *_route(call))
    else:
        routed = plan_routing(call, logits(call))
    if packs(call):
        return packed.layers(call, routed)
    return (grouped_layers if groups(call) else plan_experts)(call, routed)


def names(call: Call, of_triton: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of what ``layers`` runs, given those of Triton's launches."""
    found = routed_names(of_triton) if routes(call) else of_triton
    if packs(call):
        return packed.names(call, found)
    return grouped_names(found) if groups(call) else found


def _route(call: Call, squares: Tensor | None = None, eps: float = 0.0) -> tuple[Tensor, Tensor]:
    weights, ids = torch.ops.fw_cuda.moe_route.default(
        call.x,
        call.router_weight,
        call.top_k,
        call.scoring,
        call.renormalize,
        float(call.scaling),
        call.correction_bias,
        call.num_groups,
        call.topk_groups,
        squares,
        eps,
        call.router_bias,
    )
    return weights, ids


def route_and_gate_up(
    call: Call, squares: Tensor | None = None, eps: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the router, gate and up; returns (weights, ids, the input of the down layer).  With
    ``squares``, the sums of squares of every 16 columns, x has been multiplied by a norm's weight,
    and these kernels apply the norm's scale."""
    weights, ids = _route(call, squares, eps)
    if call.weight_format:
        return weights, ids, packed.gate_up(call, ids, None, squares, eps)
    h = torch.ops.fw_cuda.moe_gate_up.default(
        call.x, call.gate_up, ids, call.gate_up_scale, call.activation, squares, eps
    )
    return weights, ids, h


def down(call: Call, made: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The weighted sum of the experts' down layers, plus a shared expert's result."""
    weights, ids, h = made
    if call.weight_format:
        results = packed.down(call, h, ids, None)
        launches, out = plans.combine(results, weights, call.shared, None, None)
        run_all(launches)
        return out
    y: Tensor = torch.ops.fw_cuda.moe_down.default(
        h, call.down, ids, weights, call.down_scale, None, call.shared, True
    )
    return y


def down_add_norm(
    call: Call, made: tuple[Tensor, Tensor, Tensor], residual: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(the sum plus a residual, that times the norm's weight, the sums of its squares)."""
    weights, ids, h = made
    if call.weight_format:
        results = packed.down(call, h, ids, None)
        return packed.sum_norm(call, results, weights, residual, norm_weight)
    total, weighted, squares = torch.ops.fw_cuda.moe_down_norm.default(
        h, call.down, ids, weights, norm_weight, call.down_scale, residual, call.shared, True
    )
    return total, weighted, squares


GROUPED = "moe_grouped_linear"
STREAMED = ("moe_route", "moe_gate_up", "moe_down")
"""The names by which ``explain`` calls the launches."""


def streamed_names(call: Call, *, adds: bool = False) -> tuple[str, ...]:
    """The names of the launches for few tokens; ``adds``: up to a residual's sum and its norm."""
    if call.weight_format:
        last = packed.SUM if adds else "_combine_experts_kernel"
        return (STREAMED[0], packed.LINEAR, packed.LINEAR, last)
    *before, last = STREAMED
    return (*before, f"{last}, add" if adds else last)


def routed_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of Triton's launches, with csrc's router in place of a GEMM and the choice."""
    at = names.index("_route_kernel")
    return (*names[: at - 1], STREAMED[0], *names[at + 1 :])


def grouped_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of Triton's launches, with the grouped GEMM in place of the one it replaces."""
    return tuple(GROUPED if name == "_expert_linear_kernel" else name for name in names)
