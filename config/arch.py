"""``ARCHS`` holds the facts about GPU architectures.  Kernels and checks read them here alone.

The figures are those of NVIDIA's CUDA programming guide (its table of compute capabilities).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """One compute capability.

    Attributes:
        sm: the compute capability, 90 for 9.0.
        shared_bytes: shared memory that one block may ask for.
        programmatic: whether a kernel may start before the one ahead has ended (programmatic
            dependent launch).
        csrc: the name under which nvcc compiles csrc for it, "" where csrc has no code for it:
            its kernels use TMA and wgmma, which are of 9.0 alone.
        block_scales: whether cuBLASLt multiplies FP8 with scales of blocks of 128 there.
    """

    sm: int
    shared_bytes: int
    programmatic: bool = False
    csrc: str = ""
    block_scales: bool = False


HOPPER = Arch(90, 227 << 10, programmatic=True, csrc="90a", block_scales=True)
ARCHS = (
    Arch(80, 163 << 10),
    Arch(86, 99 << 10),
    Arch(89, 99 << 10),
    HOPPER,
    Arch(100, 227 << 10, programmatic=True),
    Arch(120, 99 << 10, programmatic=True),
)
"""By compute capability."""


def arch(sm: int) -> Arch:
    """The architecture of a compute capability: its own entry, or that of the highest one below it
    in ``ARCHS``, else the first.  0 stands for an unknown GPU and means ``HOPPER``, which the
    kernels are written for."""
    if not sm:
        return HOPPER
    return max((a for a in ARCHS if a.sm <= sm), key=lambda a: a.sm, default=ARCHS[0])


def why_csrc_has_no_code(sm: int) -> str:
    """Why the kernels of csrc cannot run on a GPU of this compute capability; "" if they can."""
    built = [a.sm for a in ARCHS if a.csrc]
    if sm in built:
        return ""
    names = " and ".join(f"{each / 10}" for each in built)
    return f"built for SM {names}, not {sm / 10 if sm else 'an unknown one'}"
