"""Begins a kernel that is launched before the kernel ahead has finished.

Its blocks start while the last blocks of the kernel ahead still run, which hides its launch.  Then
it waits until the kernel ahead has finished and its results are visible.  All threads of all blocks
wait, before they touch memory and before any of them returns; ``_triton_compile`` checks this in
the code of every such kernel.  So whatever had finished for the kernel ahead has finished for this
one too, however far back it was launched.  A prefetch into L2 is no such touch, since writes of all
blocks are visible in L2.

Three kernels of csrc read before they wait.  Linear layers read weights and their scales, which no
kernel writes.  Prefill attention reads lengths.  Decode attention reads lengths, block tables and
the cache, except the slots that this step stores.  All of that was written before the step's first
kernel, which lets nothing start before it has waited.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_previous(PROGRAMMATIC: tl.constexpr):
    """The first line of a kernel.  The next kernel starts as the blocks of this one end."""
    if PROGRAMMATIC:
        tl.extra.cuda.gdc_wait()


@triton.jit
def start_next_and_wait(PROGRAMMATIC: tl.constexpr, AT_ONCE: tl.constexpr = False):
    """The first line of a kernel that precedes a linear layer or csrc's decode attention.  The next
    kernel starts at once, and by the end of this one has fetched weights, or K and V of earlier
    steps.

    Other kernels should not start the next one this early: its blocks would all lie on the few
    multiprocessors that have room.  If this kernel has more blocks than run at once (1024 of 8
    warps on 132 multiprocessors), the next one is not started early: it would only be in the way.
    With AT_ONCE, the caller knows that all blocks run at once.
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
    """Fetch the line of each pointer into L2, before the wait.  The pointers must be readable."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
