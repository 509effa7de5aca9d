"""What computes nothing is dropped; what copies or changes anything stays."""

from __future__ import annotations

import torch
from torch import Tensor

from fusewright import ops
from fusewright.passes import build_passes, run_passes
from tests.passes.graphs import capture, hidden, targets


def test_noops_and_dead_code_go() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.view(-1, 32).to(torch.float32).contiguous()
        _unused = y * 3
        return y.reshape(y.shape[0], 32) + 1

    gm = capture(fn, x=hidden())
    (report,) = run_passes(gm, build_passes(["cleanup"]), verify=True)
    assert targets(gm) == ["add"]
    assert report.matched == 5


def test_what_does_something_stays() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.t().contiguous().to(torch.bfloat16).view(-1)

    gm = capture(fn, x=hidden())
    before = targets(gm)
    run_passes(gm, build_passes(["cleanup"]), verify=True)
    assert targets(gm) == before


def test_copies_stay() -> None:
    gm = capture(lambda x: x.to(torch.float32, copy=True).add_(1), x=hidden())
    run_passes(gm, build_passes(["cleanup"]))
    assert "to" in targets(gm)


def test_ops_that_only_mutate_stay() -> None:
    def fn(k: Tensor, kv_cache: Tensor, slots: Tensor) -> Tensor:
        heads = k.view(-1, 2, 16)
        ops.kv_store(heads, heads, kv_cache, slots)
        return k + 1

    gm = capture(
        fn,
        k=hidden(),
        kv_cache=torch.zeros(4, 2, 8, 2, 16),
        slots=torch.arange(7, dtype=torch.int32),
    )
    run_passes(gm, build_passes(["cleanup"]))
    assert "kv_store.default" in targets(gm)


def test_writes_whose_result_nobody_reads_stay() -> None:
    def fn(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        x.zero_()
        y[0] = 1
        torch.add(z, 1, out=z)
        torch.relu_(z)
        return x + y + z

    inputs = {name: hidden() for name in "xyz"}
    gm = capture(fn, **inputs)
    before = targets(gm)
    run_passes(gm, build_passes(["cleanup"]), verify=True)
    assert targets(gm) == before
    assert {"zero_", "setitem", "relu_"} <= set(before)
