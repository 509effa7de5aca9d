"""A CPU runs each step within its launch.  The policy of drafts is told the time of that step and
no other, so drafts are used where they are right, and not where they are wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from fusewright.engine.core.drafting.policy import DraftPolicy
from fusewright.engine.core.drafting.seams import Always
from fusewright.engine.core.drafting.step_costs import StepCosts, knee
from fusewright.engine.core.drafts import Drafts
from fusewright.engine.core.loop import EngineCore
from fusewright.engine.messages.requests import AddRequest
from fusewright.engine.messages.sampling_params import SamplingParams
from fusewright.engine.messages.step import Batch

from .draft_toy import DraftSetup
from .toy import ToyRunner
from .toy_slots import ToyStep

Cost = Callable[[int], float]
"""Rows of a step -> its seconds."""
COSTS: dict[str, Cost] = {
    "flat": lambda rows: 0.01,
    "in proportion": lambda rows: 0.004 * rows,
}


@dataclass
class Host(ToyRunner):
    """A CPU, by a clock of its own."""

    cost: Cost = COSTS["flat"]
    now_s: float = 0.0

    def launch(self, batch: Batch) -> ToyStep:
        step = super().launch(batch)
        self.now_s += self.cost(batch.num_seqs)
        return step


def core_of(cost: Cost, rate: float, **options: bool) -> tuple[EngineCore, Host, Drafts]:
    """A core over a host whose drafts are right with probability ``rate``."""
    sizes = {"max_num_rows": 32, "max_num_batched_tokens": 64, "num_blocks": 256}
    setup = DraftSetup(lazy=False, rate=rate, **sizes, **options)
    host, scheduler = setup.runner(Host), setup.scheduler()
    assert isinstance(host, Host) and scheduler.drafts is not None
    host.cost = cost
    core = EngineCore(
        scheduler, host, async_scheduling=setup.async_scheduling, now=lambda: host.now_s
    )
    return core, host, scheduler.drafts


def serve(core: EngineCore, name: str, num_requests: int, num_tokens: int) -> None:
    for number in range(num_requests):
        kind = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=number)
        core.add(AddRequest(f"{name} {number}", [1, 2, number], kind, 3 + num_tokens))
    while core.num_unfinished:
        core.step()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_each_step_is_told_its_own_time(on_device: bool, async_scheduling: bool) -> None:
    """The last of a request, behind which none is launched, too."""
    cost = COSTS["in proportion"]
    core, host, drafts = core_of(cost, 0.7, on_device=on_device, async_scheduling=async_scheduling)
    told: list[tuple[int, float]] = []

    class Recorder(Always):
        def observe_step(self, rows: int, depth: int, seconds: float, tokens: int) -> None:
            told.append((rows, seconds))

    drafts.policy = Recorder(4)
    for number in range(5):
        before = len(told)
        serve(core, f"call {number}", 2, 30)
        host.now_s += 100.0  # nobody asks for anything
        assert len(told) > before + 5
    assert len({rows for rows, _ in told}) > 3
    assert [seconds for _, seconds in told] == pytest.approx([cost(rows) for rows, _ in told])
    busy_s = core.stats().busy_s
    assert sum(busy_s.values()) == pytest.approx(sum(cost(b.num_seqs) for b in host.batches))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("num_tokens", [4, 12, 40])
@pytest.mark.parametrize(("shape", "rate"), [("flat", 1.0), ("in proportion", 0.5)])
def test_drafts_are_used_where_they_gain_alone(
    shape: str, rate: float, num_tokens: int, on_device: bool
) -> None:
    """A request of few tokens has its last step often."""
    seconds: dict[str, float] = {}
    for name in ("none", "policy"):
        core, host, drafts = core_of(COSTS[shape], rate, on_device=on_device)
        policy = DraftPolicy(4, StepCosts(knee(190)))
        drafts.policy = policy if name == "policy" else Always(0)
        for number in range(1200 // num_tokens):
            serve(core, f"call {number}", 1, num_tokens)
        seconds[name] = host.now_s
    none, *some = policy.num_chosen
    if shape == "flat":
        assert sum(some) > 100 * none and seconds["policy"] < 0.75 * seconds["none"]
    else:
        assert none > 5 * sum(some) and seconds["policy"] < 1.025 * seconds["none"]
