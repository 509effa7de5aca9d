"""``paged_attention`` with FlashInfer's prefill on Hopper: the implementation ``flashinfer``.

Batches of one query a sequence are csrc's decode kernel's, as without FlashInfer; single queries of
other batches are the Triton decode kernel's.  All pack the heads of a group.
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
from .paged_attention_cuda import decode, takes


def _is_lone(args: tuple[Any, ...]) -> bool:
    """One sequence: FlashInfer's whatever it has, so that it needs no other launch."""
    return len(args[3]) == 1


def _launches(*args: Any) -> tuple[list[Launch], None]:
    return [] if takes(args) or _is_lone(args) else kernels.decode(*args), None


_run_single_queries = run_launches(_launches)


def _run(*args: Any) -> None:
    if takes(args):
        decode(*args)
        return
    fewest = 1 if _is_lone(args) else 2
    flashinfer.prefill(*args[:7], fewest=fewest, num_sms=kernels.num_sms(args[0].device))
    _run_single_queries(*args)


def _supports(desc: OpDesc, decode_supports: Callable[[OpDesc], str]) -> str:
    head_dim = desc["q"].shape[2]
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
    """The implementation; ``decode_supports`` is that of csrc's decode kernel."""
    return Implementation(
        "flashinfer",
        _run,
        partial(_supports, decode_supports=decode_supports),
        devices=("cuda",),
        launches=_launches,
        opt_in=True,
        missing=_missing,
    )
