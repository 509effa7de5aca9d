"""The kernels of csrc for mixtures of experts of few tokens: router, gate and up, down.

They stream the weights of the chosen experts alone.  The router's applies the scale of a norm to
its sums, as do gate and up; down adds a residual, and makes what the next norm's reader takes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ._cuda import load_cuda_library
from ._linear_kernels import Target, here
from ._moe import Call
from ._op import TensorDesc

MOST_TOKENS = 8
_MOST_TOP_K, _MOST_EXPERTS, _MOST_GROUPS = 16, 256, 32
_MOST_FEATURES = 16384
# Elements of bfloat16 in a line of memory, which copies take, and rows that a tile has at least.
_LINE, _ROWS = 64, 8


def why_not_streamed(call: Call, rows: int, target: Target) -> str:
    """Why csrc does not serve a mixture for so many tokens, or nothing; reads no data."""
    if target.device.type not in ("cuda", "meta"):
        return f"on {target.device.type}, not CUDA"
    if target.sm != 90:
        return f"built for SM 9.0, not {target.sm / 10 if target.sm else 'an unknown one'}"
    if call.x.dtype != torch.bfloat16 or call.gate_up.dtype != torch.bfloat16:
        return f"dtypes {call.x.dtype} and {call.gate_up.dtype}, not bfloat16"
    if call.shared_gate is not None:
        return "a shared expert has a gate"
    if call.first_expert is not None:
        return "the experts are spread over ranks"
    experts, both, hidden = call.gate_up.shape
    inner = both // 2
    if hidden % _LINE or inner % _LINE or max(hidden, inner) > _MOST_FEATURES:
        return f"{hidden} and {inner} features: not multiples of {_LINE} up to {_MOST_FEATURES}"
    if inner % _ROWS or experts * max(both, hidden) >= 1 << 30:
        return f"weights of {experts} x {both} rows"
    if experts > _MOST_EXPERTS or call.top_k > _MOST_TOP_K or call.num_groups > _MOST_GROUPS:
        return (
            f"top {call.top_k} of {experts} experts in {call.num_groups} groups: at most "
            f"{_MOST_TOP_K} of {_MOST_EXPERTS} in {_MOST_GROUPS}"
        )
    if not 0 < rows <= MOST_TOKENS:
        return f"{rows} tokens: fastest from 1 to {MOST_TOKENS}"
    if target.csrc is None and not load_cuda_library():
        return "csrc is not built into this installation"
    if target.csrc is None and not hasattr(torch.ops.fw_cuda, "moe_route"):
        return "csrc was built without the kernels of experts: build it again"
    return "" if target.csrc is not False else "csrc is not built into this installation"


def _is_read_in_lines(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


@lru_cache(4096)
def _refusal(
    shapes: tuple[Any, ...], attributes: tuple[Any, ...], rows: int, device: torch.device
) -> str:
    held: list[Any] = [None if s is None else TensorDesc(*s) for s in shapes]
    call = Call(*[*held[:9], attributes[0], *held[9:], *attributes[1:]])
    return why_not_streamed(call, rows, here(device))


def streams(call: Call) -> bool:
    """Whether csrc serves a call of real tensors, or of those of a plan."""
    if call.first_expert is not None:
        return False
    tensors = (*call[:9], *call[10:12])
    shapes = tuple([None if t is None else (t.dtype, t.shape) for t in tensors])
    attributes = (call.group_size, *call[12:19])
    if _refusal(shapes, attributes, call.x.shape[0], call.x.device):
        return False
    if call.x.device.type == "meta":
        return True
    return all(map(_is_read_in_lines, (call.router_weight, call.gate_up, call.down)))


def route_and_gate_up(
    call: Call, squares: Tensor | None = None, eps: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, ids, what the down layer reads).  With ``squares``, sums of squares of 16 columns
    each, x is multiplied by a norm's weight and lacks its scale."""
    kernels = torch.ops.fw_cuda
    weights, ids = kernels.moe_route.default(
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
    )
    h = kernels.moe_gate_up.default(call.x, call.gate_up, ids, None, call.activation, squares, eps)
    return weights, ids, h


def down(call: Call, made: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The weighted sum of the experts' down layers, with a shared expert's result."""
    weights, ids, h = made
    y: Tensor = torch.ops.fw_cuda.moe_down.default(
        h, call.down, ids, weights, None, None, call.shared, True
    )
    return y


def down_add_norm(
    call: Call, made: tuple[Tensor, Tensor, Tensor], residual: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(the sum with a residual, that times the norm's weight, its sums of squares)."""
    weights, ids, h = made
    total, weighted, squares = torch.ops.fw_cuda.moe_down_norm.default(
        h, call.down, ids, weights, norm_weight, None, residual, call.shared, True
    )
    return total, weighted, squares


STREAMED = ("moe_route", "moe_gate_up", "moe_down")
"""What is launched, as ``explain`` names it."""
