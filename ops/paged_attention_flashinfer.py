"""Runs ``paged_attention`` with FlashInfer's prefill on Hopper: the implementation ``flashinfer``.

It is ``cuda`` with another prefill kernel from ``FEWEST_TOKENS`` tokens on.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from . import flashinfer
from ._launch import Launch
from ._op import Implementation, OpDesc
from .launches.paged_attention import num_sms
from .paged_attention_cuda import decode, has_decodes, has_prefills, runs

# Chosen beside Triton's prefill. csrc's takes less time with more tokens too: bench/NOTES.md.
FEWEST_TOKENS = 257


def _takes(args: tuple[Any, ...]) -> bool:
    """Whether FlashInfer has the prefills of a call."""
    return has_prefills(args) and len(args[0]) >= FEWEST_TOKENS


def _run(*args: Any, cuda: Implementation) -> None:
    if not _takes(args):
        cuda.fn(*args)
        return
    # A lone sequence is all of FlashInfer's, whatever it has: no other launch.
    fewest = 2 if has_decodes(args) else 1
    flashinfer.prefill(*args[:7], fewest=fewest, num_sms=num_sms(args[0].device))
    if has_decodes(args):
        decode(*args)


def _launches(*args: Any, cuda: Implementation) -> tuple[list[Launch], None]:
    assert cuda.launches is not None
    return ([], None) if _takes(args) else cuda.launches(*args)


def _runs(*args: Any) -> tuple[str, ...]:
    return runs(*args, prefill="flashinfer paged_attention") if _takes(args) else runs(*args)


def _supports(desc: OpDesc, cuda: Implementation) -> str:
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
    return cuda.supports(desc)


def _missing(desc: OpDesc) -> str:
    return flashinfer.missing_module(desc["q"].shape[2])


def by_flashinfer(cuda: Implementation) -> Implementation:
    """The implementation, of the implementation ``cuda``."""
    return Implementation(
        "flashinfer",
        partial(_run, cuda=cuda),
        partial(_supports, cuda=cuda),
        devices=("cuda",),
        launches=partial(_launches, cuda=cuda),
        opt_in=True,
        missing=_missing,
        runs=_runs,
    )
