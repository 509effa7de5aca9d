"""Begins a kernel that is launched before the kernel ahead has finished.

Its blocks start while the last ones ahead still run, which hides its launch.  It then waits until
the kernel ahead has finished and its results are visible.  The rule, which ``_triton_compile``
checks in the code of every such kernel: all threads of all blocks wait, before they touch memory
and before any of them returns.  Then whatever had finished for the kernel ahead has finished for
this one too, at any distance.  A prefetch into L2 touches nothing: L2 is where writes meet reads.

Three kernels of csrc read before they wait.  Linears read weights and their scales, which no
kernel writes.  Prefill attention reads lengths; decode attention those, block tables and the cache
but for the slots that this step stores.  Those were written before the step's first kernel, which
lets nothing start before it has waited.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_previous(PROGRAMMATIC: tl.constexpr):
    """The first line of a kernel.  The next one starts as this one's blocks end."""
    if PROGRAMMATIC:
        tl.extra.cuda.gdc_wait()


@triton.jit
def start_next_and_wait(PROGRAMMATIC: tl.constexpr, AT_ONCE: tl.constexpr = False):
    """The first line of a kernel that comes before a linear or csrc's decode attention: the next
    one starts at once, and has fetched weights, or K and V of earlier steps, when this one ends.

    Not for others: blocks that start this early lie on the few multiprocessors that have room.  Nor
    where the blocks are more than run at once (1024 of 8 warps on 132 multiprocessors, unless
    AT_ONCE says that they do): there the next one's would only be in the way.
    """
    if PROGRAMMATIC and AT_ONCE:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    elif PROGRAMMATIC:
        num_programs = tl.num_programs(0) * tl.num_programs(1)
        # A predicate instead of a branch: nothing may lead around the wait.
        tl.inline_asm_elementwise(
            """{
            .reg .pred few;
            setp.le.s32 few, $1, 1024;
            @few griddepcontrol.launch_dependents;
            griddepcontrol.wait;
            mov.b32 $0, 0;
            }""",
            "=r,r",
            [num_programs],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def prefetch(pointers):
    """Ask L2 for the line of each pointer, which must be one that may be read; before the wait."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
