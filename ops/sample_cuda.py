"""``sample`` by the kernel of csrc: the implementation ``cuda``, for calls with a filter.

Without one, noise is the time, and wants more of the device than the cluster of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._cuda import why_no_csrc
from ._op import Implementation, OpDesc
from .launches.sampling import rows_of

_SM = 90
# Columns a row at most: the shared memory of a cluster holds them.
_MOST_COLUMNS = {torch.bfloat16: 524288, torch.float16: 524288, torch.float32: 262144}


def _supports(desc: OpDesc) -> str:
    logits = desc["logits"]
    if desc.device != "cuda":
        return f"on {desc.device}, not CUDA"
    if desc.sm != _SM:
        return f"built for SM 9.0, not {desc.sm / 10 if desc.sm else 'an unknown one'}"
    if logits.dtype not in _MOST_COLUMNS:
        return f"logits are {logits.dtype}: the kernel takes bfloat16, float16 and float32"
    if all(desc[name] is None for name in ("top_k", "top_p", "min_p")):
        return "no filter"
    vocab, most = logits.shape[1], _MOST_COLUMNS[logits.dtype]
    if isinstance(vocab, int) and vocab > most:
        return f"{vocab} columns of {logits.dtype}: the kernel takes {most} or fewer"
    return why_no_csrc(desc)


def _run(logits: Tensor, *args: Any) -> Tensor:
    return torch.ops.fw_cuda.draw_tokens.default(  # type: ignore[no-any-return]
        rows_of(logits), *args
    )


BY_CUDA = Implementation("cuda", _run, _supports, devices=("cuda",))
