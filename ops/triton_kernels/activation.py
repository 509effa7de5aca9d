"""Activations: ``act(gate) * up`` from one packed row of gate and up, or from a row of each; or
``act(x)``.

Bandwidth-bound: a row of 2 * I elements is read and I are written.  Each thread has two loads of
16 bytes in flight.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import start_next_and_wait
from .float8 import to_float32

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def logistic(x):
    """1 / (1 + exp(-x)), 0 below -87.3: nothing is spent on subnormal numbers."""
    if _INTERPRETED:
        return 1.0 / (1.0 + tl.exp(-x))
    else:
        return tl.inline_asm_elementwise(
            """mul.f32 $0, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 $0, $0;
            add.f32 $0, $0, 0f3F800000;
            rcp.approx.ftz.f32 $0, $0;""",
            "=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """``act(gate) * up`` in float32."""
    if ACTIVATION == "silu":
        exponent = gate
    else:
        # 0.5 * (1 + tanh(u)) is the logistic function of 2u; sqrt(2 / pi) as in the paper.
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * logistic(exponent) * up


@triton.jit
def gated_with(
    gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr
):  # fmt: skip
    """``gated`` with options: both clamped, up with an offset, the gate times ALPHA inside."""
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if UP_OFFSET != 0:
        up += UP_OFFSET
    if ALPHA != 1:
        return gate * logistic(ALPHA * gate) * up
    else:
        return gated(gate, up, ACTIVATION)


@triton.jit
def plain(x, ACTIVATION: tl.constexpr):
    """``act(x)`` in float32."""
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_new":
        return gated(x, 1.0, ACTIVATION)
    else:
        positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return positive * positive if ACTIVATION == "relu2" else positive


@triton.jit
def _gated_activation_kernel(
    gate_up_ptr, up_ptr, out_ptr, intermediate, row_stride, up_row_stride, ACTIVATION: tl.constexpr,
    GATES: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    start_next_and_wait(PROGRAMMATIC)
    # Neighbours in the grid are neighbours in memory: 4 % faster than rows first.
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    cols = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    mask = cols < intermediate
    gate_ptr = gate_up_ptr + row * row_stride
    if INTERLEAVED:
        # Loaded side by side and parted in registers, so that accesses stay whole vectors.
        both = tl.program_id(0) % PARTS * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        packed = to_float32(tl.load(gate_ptr + both, mask=both < 2 * intermediate, other=0.0))
        gate, up = tl.split(tl.reshape(packed, (BLOCK, 2)))
    elif not GATES:
        gate = to_float32(tl.load(gate_ptr + cols, mask=mask, other=0.0))
        up = 1.0
    else:
        if up_ptr is None:
            up_ptr = gate_ptr + intermediate
        else:
            up_ptr += row * up_row_stride
        gate = to_float32(tl.load(gate_ptr + cols, mask=mask, other=0.0))
        up = to_float32(tl.load(up_ptr + cols, mask=mask, other=0.0))
    if GATES:
        out = gated_with(gate, up, ACTIVATION, ALPHA, LIMIT, UP_OFFSET)
    else:
        out = plain(gate, ACTIVATION)
    tl.store(out_ptr + row * intermediate + cols, out.to(out_ptr.dtype.element_ty), mask=mask)
