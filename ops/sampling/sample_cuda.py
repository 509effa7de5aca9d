"""Runs ``sample`` with the kernel of csrc: the implementation ``cuda``.

It takes calls with a filter, and calls without one above a number of rows.  With fewer rows, noise
alone needs more of the device than one cluster a row, so Triton's kernels take those.  Both draw
the same token for a row, to the bit of the noise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.cuda import why_no_csrc
from ..core.desc import OpDesc
from ..core.launch import Launches, run_launches
from ..core.op import on_gpu
from ..launches import sampling

# Columns a row at most: the shared memory of a cluster holds them.
_MOST_COLUMNS = {torch.bfloat16: 524288, torch.float16: 524288, torch.float32: 262144}
# Up to this many rows, Triton serves calls without a filter.  Measured in a graph on an H200 with
# 128256 columns, csrc and Triton take 22 and 22 us at 32 rows, 24 and 38 at 64, 86 and 133 at 256.
_MOST_ROWS_OF_NOISE = 32


def _supports(desc: OpDesc) -> str:
    logits = desc["logits"]
    if reason := why_no_csrc(desc):
        return reason
    if logits.dtype not in _MOST_COLUMNS:
        return f"logits are {logits.dtype}: the kernel takes bfloat16, float16 and float32"
    vocab, most = logits.shape[1], _MOST_COLUMNS[logits.dtype]
    if isinstance(vocab, int) and vocab > most:
        return f"{vocab} columns of {logits.dtype}: the kernel takes {most} or fewer"
    return ""


def _is_few_rows_of_noise(args: tuple[Any, ...]) -> bool:
    logits, _, *filters = args[:5]
    return len(logits) <= _MOST_ROWS_OF_NOISE and all(each is None for each in filters)


def _launches(*args: Any) -> Launches[Tensor | None]:
    return sampling.sample(*args) if _is_few_rows_of_noise(args) else ([], None)


def _run(*args: Any) -> Tensor:
    if _is_few_rows_of_noise(args):
        return run_launches(_launches)(*args)  # type: ignore[no-any-return]
    rows = sampling.rows_of(args[0])
    return torch.ops.fw_cuda.draw_tokens.default(rows, *args[1:])  # type: ignore[no-any-return]


BY_CUDA = on_gpu("cuda", _run, _supports, launches=_launches)
