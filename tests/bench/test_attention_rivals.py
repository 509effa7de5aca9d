"""Rivals of attention are given our pages, lengths and windows, and compute what the op computes.

Their packages need a GPU.  What stands for them here computes, from the arguments that their
documents describe, by loops over sequences.
"""

from __future__ import annotations

import itertools
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.bench.kernels.attention_rivals import RIVALS, Shape, absent, rivals
from fusewright.bench.kernels.bench_attention import Layer, make
from fusewright.bench.kernels.harness import Model
from fusewright.ops import BY_NAME

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SMALL = Model("small", 0, 0, 4, 2, 64, 0)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, before: int) -> Tensor:
    """Causal attention of one sequence's last queries: TND; ``before``: -1, or how many positions
    in front of its own a query sees."""
    k, v = (t.float().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    logits = torch.einsum("qnd,knd->nqk", q.float(), k) * scale
    place = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    hidden = (place < 0) | ((place > before) if before >= 0 else torch.zeros(1, dtype=torch.bool))
    return torch.einsum("nqk,knd->qnd", logits.masked_fill(hidden, -torch.inf).softmax(-1), v)


class Wrapper:
    """FlashInfer's wrappers: rows of pages are planned, then run."""

    def __init__(self, workspace: Tensor, layout: str, use_tensor_cores: bool = False) -> None:
        assert layout == "NHD" and workspace.dtype == torch.uint8

    def run(self, q: Tensor, cache: Tensor) -> Tensor:
        assert cache.dtype == self.facts["kv_data_type"] and q.dtype == self.facts["q_data_type"]
        results = []
        for s, last in enumerate(self.last.tolist()):
            pages = self.indices[self.indptr[s] : self.indptr[s + 1]].long()
            length = (len(pages) - 1) * self.sizes[3] + last
            k, v = (t.flatten(0, 1)[:length] for t in cache[pages].unbind(1))
            some = q[self.starts[s] : self.starts[s + 1]]
            results.append(attend(some, k, v, self.facts["sm_scale"], self.facts["window_left"]))
        return torch.cat(results)

    def keep(
        self, starts: Any, indptr: Any, indices: Any, last: Any, *sizes: int, **facts: Any
    ) -> None:
        assert {t.dtype for t in (starts, indptr, indices, last)} == {torch.int32}
        self.starts, self.indptr, self.indices, self.last = starts, indptr, indices, last
        self.sizes, self.facts = sizes, facts


class Decode(Wrapper):
    def plan(self, indptr: Tensor, *rest: Any, **facts: Any) -> None:
        self.keep(torch.arange(len(indptr), dtype=torch.int32), indptr, *rest, **facts)


class Prefill(Wrapper):
    def plan(self, *rest: Any, causal: bool, **facts: Any) -> None:
        assert causal
        self.keep(*rest, **facts)


def with_kvcache(q: Tensor, k: Tensor, v: Tensor, **facts: Any) -> Tensor:
    """FlashAttention's function over pages."""
    starts = facts["cu_seqlens_q"].tolist()
    assert facts["causal"] and not facts["attention_chunk"]
    assert facts["max_seqlen_q"] == max(b - a for a, b in itertools.pairwise(starts))
    results = []
    for s, length in enumerate(facts["cache_seqlens"].tolist()):
        pages = facts["page_table"][s].long()
        keys, values = (t[pages].flatten(0, 1)[:length] for t in (k, v))
        some = q[starts[s] : starts[s + 1]]
        scale, before = facts["softmax_scale"], facts["window_size"][0]
        results.append(attend(some, keys, values, scale, before))
    return torch.cat(results)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {
        "flashinfer": {
            "BatchDecodeWithPagedKVCacheWrapper": Decode,
            "BatchPrefillWithPagedKVCacheWrapper": Prefill,
        },
        "flash_attn_interface": {"flash_attn_with_kvcache": with_kvcache},
    }
    for name, functions in parts.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize(("num_seqs", "queries", "context"), [(3, 1, 37), (2, 20, 37), (1, 5, 5)])
def test_a_rival_computes_what_the_op_computes(
    num_seqs: int, queries: int, context: int, window: int
) -> None:
    args = make(Layer(SMALL, window), BF16, [context] * num_seqs, queries, torch.device("cpu"))
    BY_NAME["paged_attention"].reference(*args)
    found = rivals(Shape(BF16, 64, window))
    assert [*found] == ["flashinfer", "flash-attn-3"]
    for rival in found.values():
        torch.testing.assert_close(rival.plan(*args)().to(BF16), args[5], rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("shape", "names"),
    [
        (Shape(FP8, 128), ["flashinfer"]),
        (Shape(BF16, 96), ["flash-attn-3"]),
        (Shape(BF16, 128, chunk=8192), ["flash-attn-3"]),
        (Shape(BF16, 64, sinks=True), []),
        (Shape(BF16, 512), []),
    ],
)
def test_rivals_are_those_of_the_same_layer(shape: Shape, names: list[str]) -> None:
    assert [*rivals(shape)] == names
    for name, rival in RIVALS.items():
        assert bool(rival.why_not(shape)) is (name not in names)


@pytest.mark.usefixtures("installed")
def test_what_is_there_needs_no_line() -> None:
    assert absent() == []


def test_a_rival_that_is_not_there_is_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for rival in RIVALS.values():
        monkeypatch.delitem(sys.modules, rival.module, raising=False)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    lines = absent()
    assert len(lines) == len(RIVALS) and rivals(Shape(BF16, 128)) == {}
    assert "flashinfer is not measured: Python finds no module flashinfer; pip install" in lines[0]
