"""Claims about the clock of steps: its sums fit into the time that has passed."""

from __future__ import annotations

import itertools
import time

from fusewright import LLM, SamplingParams
from fusewright.engine.core.step_clock import PHASES


def test_phases_and_idle_time_fit_into_the_time_that_has_passed() -> None:
    before_s = time.perf_counter()
    with LLM("abacus", device="cpu", optimization_level=0, dtype="float32") as llm:
        core, params = llm.engine.core, SamplingParams(temperature=0.0)
        seen = [core.stats()]
        for _ in range(2):
            llm.generate(["37+58=", "1+1="], params, use_tqdm=False)
            seen.append(core.stats())
        at_rest = core.stats()
        passed_s = time.perf_counter() - before_s
    assert seen[0].phase_s == dict.fromkeys(PHASES, 0.0)
    for earlier, later in itertools.pairwise(seen):
        assert all(later.phase_s[phase] > earlier.phase_s[phase] for phase in PHASES)
    assert at_rest.phase_s == seen[-1].phase_s and at_rest.idle_s > seen[-1].idle_s
    # A step is in flight while it is launched and waited for.
    in_flight_s = at_rest.phase_s["launch"] + at_rest.phase_s["wait"]
    assert in_flight_s + at_rest.idle_s <= passed_s
    assert sum(at_rest.phase_s.values()) <= passed_s
