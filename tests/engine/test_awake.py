"""An event loop that stays awake for a while, where processors are plenty."""

from __future__ import annotations

import asyncio
import os
from itertools import count
from types import SimpleNamespace

import pytest

from fusewright.engine.process import awake as awake_module
from fusewright.engine.process.awake import AWAKE_S, Awake


async def turns(count: int) -> None:
    """Let the event loop do so many times what it has to do; it polls once in each."""
    for _ in range(count):
        await asyncio.sleep(0)


def polls(monkeypatch: pytest.MonkeyPatch, processors: int, *, sleeps: bool = False) -> int:
    """How often a loop with nothing to do looks for work.  It has to stop.  Its clock goes on by a
    tenth of the time at each look, as on a machine that is not busy."""
    looks, clock = count(), count()
    monkeypatch.setattr(os, "sched_yield", lambda: next(looks))
    tenth = AWAKE_S / 10
    monkeypatch.setattr(
        awake_module, "time", SimpleNamespace(monotonic=lambda: next(clock) * tenth)
    )

    async def work() -> int:
        awake = Awake(asyncio.get_running_loop(), processors)
        awake.stay()
        awake.stay()  # it polls already, and goes on
        if sleeps:
            awake.sleep()
        await turns(30)
        found = next(looks)
        await turns(30)
        assert next(looks) == found + 1, "it has not stopped"
        return found

    return asyncio.run(work())


def test_the_loop_polls_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    assert polls(monkeypatch, 16) > 2


def test_it_polls_no_more_when_there_is_enough_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert polls(monkeypatch, 16, sleeps=True) <= 2


def test_with_few_processors_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert polls(monkeypatch, 2) == 0
