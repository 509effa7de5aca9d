"""``Ceilings`` are the measured rates that bound a step on one GPU model."""

from __future__ import annotations

from dataclasses import dataclass

from .device_table import DeviceTable


@dataclass(frozen=True)
class Ceilings:
    """What a GPU reached at most where nothing else was in the way.

    Attributes:
        copy_tb_s: bytes read and written by a device-to-device copy; 0: not measured.
        bfloat16_tflop_s, fp8_tflop_s: matrix multiplications; 0: not measured.
        notes: sentences about figures that are not what their names say.
    """

    gpu: str
    copy_tb_s: float
    bfloat16_tflop_s: float
    fp8_tflop_s: float
    notes: tuple[str, ...] = ()


def ceilings(table: DeviceTable) -> Ceilings:
    """The ceilings of a table's GPU.  A rate of matrix multiplications that the table lacks is
    that of its best cuBLASLt algorithm in bfloat16, and twice that of bfloat16 in FP8."""
    notes = []
    bfloat16 = table.matrix_tflop_s.get("bfloat16", 0.0)
    if not bfloat16:
        rates = [
            2 * a.most_rows * a.out_features * a.in_features / a.us / 1e6
            for a in table.algorithms
            if a.operands == "bfloat16" and a.us
        ]
        bfloat16 = round(max(rates, default=0.0))
        notes.append(
            f"{table.gpu}: bfloat16 TFLOP/s are those of its fastest measured linear layer; those "
            "of a large matrix multiplication are not measured"
        )
    fp8 = table.matrix_tflop_s.get("fp8", 0.0)
    if not fp8:
        fp8 = 2 * bfloat16
        notes.append(f"{table.gpu}: FP8 TFLOP/s are taken as twice those of bfloat16")
    return Ceilings(table.gpu, table.copy_tb_s, bfloat16, fp8, tuple(notes))
