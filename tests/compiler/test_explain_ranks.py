"""A model that sums over ranks is explained for a number of them: launches, bytes, sites."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fusewright import ops
from fusewright.compiler.build import Lowered, lower_model
from fusewright.compiler.capture.source import Example, Source
from fusewright.compiler.capture.trace import Traced
from fusewright.compiler.inspect.explain import DecodeStep, Explanation, explain
from fusewright.compiler.inspect.sites import Where, copied, expected_sites
from fusewright.compiler.record import Record
from fusewright.compiler.timer import Timer
from fusewright.config import LEVELS, UserError
from fusewright.serve.commands.explain_text import explanation
from tests.compiler.test_compile import config

GROUP = "nobody makes it: nothing runs"
HIDDEN, ROWS = 256, 7
FUSE = "fuse_all_reduce_norm"
FUSED = tuple(name for name in LEVELS[2].passes if name != "fuse_chain")
UNFUSED = tuple(name for name in FUSED if name != FUSE)


class Block(nn.Module):
    """A split linear with what follows in a decoder: the sum, the residual, the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.split = nn.Parameter(torch.randn(HIDDEN, HIDDEN, dtype=torch.bfloat16))
        self.weight = nn.Parameter(torch.ones(HIDDEN, dtype=torch.bfloat16))

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        residual = residual + ops.all_reduce(ops.linear(x, self.split, None), GROUP)
        return ops.linear(ops.rms_norm(residual, self.weight, 1e-5), self.split, None)


class _Before(Record):
    traced: Traced | None = None

    def graph(self, title: str, traced: Traced) -> None:
        self.traced = self.traced or copied(traced)


def explained(passes: tuple[str, ...], world_size: int) -> tuple[Lowered, Explanation]:
    named = {n: torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16) for n in ("x", "residual")}
    dynamic = {name: {0: "num_tokens"} for name in named}
    source = Source(Block().requires_grad_(False), Example(tuple(named.values()), named, dynamic))
    before = _Before()
    lowered = lower_model(
        source,
        config(2, passes=passes, verify=False),
        sm=0,
        timer=Timer(lambda phase: None),
        record=before,
    )
    assert before.traced is not None
    where = Where(None)
    off = {} if FUSE in passes else {FUSE: "by this test"}
    sites = expected_sites(lowered.reports, before.traced, passes, off, where)
    step = DecodeStep(ROWS, 128, world_size)
    return lowered, explain(lowered, before.traced, where, sites, step)


def test_bytes_follow_the_number_of_ranks() -> None:
    row = 2 * HIDDEN * ROWS
    for fused in (False, True):
        passes = FUSED if fused else UNFUSED
        two, four = (explained(passes, ranks)[1] for ranks in (2, 4))
        # A rank sends each part of x that is not its own twice: 2 x 1/2, 2 x 3/4.
        assert (four.bytes - two.bytes) / row == pytest.approx(2 * 3 / 4 - 2 * 1 / 2)
    unfused = explained(UNFUSED, 2)[1]
    assert unfused.bytes - explained(FUSED, 2)[1].bytes == 2 * row


def test_sites_and_launches_are_told() -> None:
    facts = explained(UNFUSED, 2)[1]
    launches = {call.op: call.launches for layer in facts.layers for call in layer.calls}
    assert launches["fw_native::all_reduce"] == 1
    (off,) = (site for site in facts.sites if site.name == FUSE)
    assert (off.outcome, off.reason, off.count) == ("off", "by this test", 1)
    facts = explained(FUSED, 2)[1]
    launches = {call.op: call.launches for layer in facts.layers for call in layer.calls}
    assert launches["fw_native::all_reduce_add_rms_norm"] is facts.launches is None
    (on,) = (site for site in facts.sites if site.name == FUSE)
    assert (on.outcome, on.count) == ("matched", 1)
    (calls,) = (calls for p, calls in facts.fusions if p.name == "all-reduce + add + RMSNorm")
    assert calls == 1
    text = explanation("a block on each of 2 ranks", facts, graphs=False)
    assert "all_reduce_add_rms_norm" in text and "not known" in text


def test_without_a_number_of_ranks_it_is_refused() -> None:
    with pytest.raises(UserError, match="all_reduce reduces over ranks, and world_size=1; give"):
        explained(UNFUSED, 1)
