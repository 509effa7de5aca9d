"""Makes the files of an artifact's Triton kernels, and whole artifacts that have nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from .. import ops
from ..config import CompileConfig
from .artifacts.key import Wanted
from .capture.source import OutsideCalls
from .emit.kernels import outside_variants
from .run.load import KERNELS, kernel_file, kernels_json
from .timer import Timer


def build_kernels(
    calls: OutsideCalls, config: CompileConfig, wanted: Wanted, timer: Timer
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Compile the kernels of calls beside a program; arguments are those of ``compile_kernels()``.

    Returns:
        The artifact's files, by name, and its report.
    """
    with timer.phase("kernels"):
        variants = outside_variants(calls, config, device=wanted.device, sm=wanted.sm)
        files = kernel_files(variants, wanted.sm, timer)
    report: dict[str, Any] = {name: {} for name in ("choices", "pieces", "tuned_us")}
    report |= {
        "passes": [],
        "outside": sorted({name for name, _ in calls(1, 1)}),
        "kernels": len(variants),
        "seconds": {name: round(value, 4) for name, value in timer.seconds.items()},
    }
    return files, report


def kernel_files(variants: Iterable[ops.Variant], sm: int, timer: Timer) -> dict[str, bytes]:
    """Compile the variants that the process has not yet; the files that ``load`` reads."""
    variants = sorted(variants, key=lambda variant: variant.name)
    ops.KERNELS.precompile(variants, sm, on_done=timer.count("kernel", len(variants)))
    held = ops.KERNELS.binaries()
    binaries = {variant: held[variant] for variant in variants}
    files = {kernel_file(variant): binary.cubin for variant, binary in binaries.items()}
    return files | {KERNELS: as_json(kernels_json(binaries))}


def as_json(data: Any) -> bytes:
    """A file of JSON, the same for the same data."""
    return (json.dumps(data, indent=1, sort_keys=True) + "\n").encode()
