"""``paged_attention`` with FlashInfer's prefill on Hopper: the implementation ``flashinfer``.

Sequences with one query stay with the decode kernel, which packs the heads of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from . import flashinfer
from ._launch import Launch, run_launches
from ._op import Implementation, OpDesc
from .launches import paged_attention as kernels

_SM = 90


def _decode(*args: Any) -> tuple[list[Launch], None]:
    return kernels.decode(*args), None


_run_decode = run_launches(_decode)


def _run(*args: Any) -> None:
    q, kv_cache, block_table, seq_lens, query_start_loc, out, scale, *_ = args
    if len(q) > len(seq_lens) > 0:
        sms = kernels.num_sms(q.device)
        flashinfer.prefill(
            q, kv_cache, block_table, seq_lens, query_start_loc, out, scale, num_sms=sms
        )
    _run_decode(*args)


def _supports(desc: OpDesc, decode_supports: Callable[[OpDesc], str]) -> str:
    head_dim = desc["q"].shape[2]
    if desc.device != "cuda" or desc.sm != _SM:
        on = f"SM {desc.sm / 10}" if desc.sm else desc.device
        return f"the module is for SM {_SM / 10}, not {on}"
    if any(desc[name].dtype != torch.bfloat16 for name in ("q", "kv_cache", "out")):
        dtypes = ", ".join(str(desc[name].dtype) for name in ("q", "kv_cache", "out"))
        return f"q, kv_cache and out are {dtypes}: the module takes bfloat16"
    if head_dim not in flashinfer.TILES:
        return f"head_dim {head_dim}: the modules are for {', '.join(map(str, flashinfer.TILES))}"
    if desc["sliding_window"] > 0:
        return "sliding window: the module reads keys outside of it"
    if desc["soft_cap"] > 0:
        return "soft cap: the module has none"
    return decode_supports(desc)


def _missing(desc: OpDesc) -> str:
    return flashinfer.missing_module(desc["q"].shape[2])


def by_flashinfer(decode_supports: Callable[[OpDesc], str]) -> Implementation:
    """The implementation; ``decode_supports`` is that of the decode kernel's."""
    return Implementation(
        "flashinfer",
        _run,
        partial(_supports, decode_supports=decode_supports),
        devices=("cuda",),
        launches=_decode,
        opt_in=True,
        missing=_missing,
    )
