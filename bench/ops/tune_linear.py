"""Writes the device table of this GPU for the shapes of some models.

``python -m fusewright.bench.ops.tune_linear [--models M ...] [--operands O ...] [--rows N ...]``.
It searches as ``-O3`` does (``compiler/lowering/tune_library.py``), but also what the table already
has.  Entries for other weights stay, if the same cuBLASLt was measured, and other sections.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ...compiler.lowering.search import table_here
from ...compiler.lowering.tune_library import ROWS, LibraryMeasure, algorithms_of, fill
from ...config.device_table import FOLDER, OPERANDS, Algorithm, read_table
from ...ops import installed_cublaslt, load_cuda_library
from ...ops.core.device_table import portable
from ..environment import environment

WEIGHTS = {
    "llama3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
    "qwen3-8b": ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)),
    "llama3.2-1b": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048)),
    "qwen3-30b-a3b": ((5120, 2048), (2048, 4096), (128, 2048), (151936, 2048)),
}
"""[out_features, in_features] of qkv, o, gate_up, down, lm_head; of a mixture of experts, whose
layers have kernels of their own, the router in place of gate_up and down."""
_FP8_MOST_FEATURES = 100_000  # lm_head stays in bfloat16


def search(options: argparse.Namespace, known: Sequence[Algorithm]) -> tuple[list[Algorithm], int]:
    """The known entries with those of the searched weights replaced, and how many are new."""
    shapes = dict.fromkeys(shape for name in options.models for shape in WEIGHTS[name])
    weights = [
        (operands, n, k)
        for operands in options.operands
        for n, k in shapes
        if operands == "bfloat16" or n <= _FP8_MOST_FEATURES
    ]
    filled = fill(
        weights,
        (),
        LibraryMeasure(weights, known, print),
        seconds=options.seconds,
        rows=options.rows,
    )
    for skipped in filled.skipped:
        print(f"no time left: {skipped}")
    kept, new = [a for a in known if a.weight not in weights], algorithms_of(filled)
    return [*kept, *new], len(new)


def copy_tb_s() -> float:
    """The rate of a device-to-device copy of 2 GiB in TB/s, which counts bytes read and bytes
    written.  The best of 10 copies counts."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return round(2 * source.nbytes / _least_ms(lambda: target.copy_(source)) / 1e9, 2)


def matrix_tflop_s() -> dict[str, float]:
    """The rate of an 8192-cubed matrix multiplication in bfloat16, in TFLOP/s.  The best of 10
    counts."""
    size = 8192
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    ms = _least_ms(lambda: torch.mm(a, b, out=out))
    return {"bfloat16": float(round(2 * size**3 / ms / 1e9))}


def _least_ms(call: Callable[[], object]) -> float:
    """The shortest of 10 calls on the device, in ms."""
    times_ms: list[float] = []
    for _ in range(10):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        call()
        ended.record()
        ended.synchronize()
        times_ms.append(begun.elapsed_time(ended))
    return min(times_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--output", type=Path, help="the table; default: that in use")
    parser.add_argument("--models", nargs="+", default=list(WEIGHTS), choices=WEIGHTS)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--seconds", type=float, default=600, help="stop after so many")
    parser.add_argument("--operands", nargs="+", default=OPERANDS, choices=OPERANDS)
    options = parser.parse_args()
    if not load_cuda_library():
        raise SystemExit("tune_linear: csrc is not built into this installation")
    here = table_here()
    path = options.output or FOLDER / here.name
    old = read_table(path) if path.is_file() else None
    if old and old.gpu != here.gpu:
        raise SystemExit(f"tune_linear: {path}: of {old.gpu}, this is {here.gpu}; give --output")
    serves = old and not old.why_not("algorithms", here.gpu, installed_cublaslt())
    with torch.inference_mode():
        algorithms, count = search(options, old.algorithms if old and serves else ())
    env = environment()
    ceilings = {"copy_tb_s": copy_tb_s(), "matrix_tflop_s": matrix_tflop_s()}
    new = table_here(env["commit"], env["command"], **ceilings, algorithms=algorithms)
    if old is None and (near := portable()):
        old = replace(here, rows=near.rows, measured={"rows": near.measured["rows"]})
        old = replace(old, unknown_rows=near.unknown_rows)
    table = replace(old or here, algorithms=()).updated(new)
    path.write_text(table.text())
    print(f"{count} algorithms into {path}")


if __name__ == "__main__":
    main()
