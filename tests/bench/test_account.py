"""The account of a run: every step is in one row, with its padding and times."""

from __future__ import annotations

import time
from collections import Counter

from fusewright import SamplingParams
from fusewright.bench.account import account, recorded
from fusewright.bench.serving import run
from fusewright.bench.workloads import equal
from fusewright.config import EngineOptions, Hardware
from fusewright.engine.engine import Engine

RECORDING = Hardware(device="cpu", name="recording", graphs="recording")


def make() -> Engine:
    sizes = (1, 2, 4, 8, 16)
    options = EngineOptions(
        max_num_seqs=4, max_num_batched_tokens=24, max_model_len=64, cudagraph_capture_sizes=sizes
    )
    return Engine(options, RECORDING)


def test_rows_hold_every_step_and_what_was_computed_for_nobody() -> None:
    engine = make()
    start = time.perf_counter()
    with recorded(engine) as steps:
        run(engine, equal(3, 6, 5, 200))
    seconds = time.perf_counter() - start
    rows = {(row["kind"], row["graph"]): row for row in account(steps)}
    # 18 prompt tokens are beyond the captured 16; 3 decodes run at 4.
    assert rows["mixed", "NONE"]["tokens"] == 18 and rows["mixed", "NONE"]["padding"] == 0
    decodes = rows["decode", "FULL"]
    assert (decodes["steps"], decodes["seqs"], decodes["tokens"]) == (4, 12, 12)
    assert decodes["padding"] == 0.25
    times = [row[name] for row in rows.values() for name in ("device_s", "pause_s", "waited_s")]
    assert min(times) >= 0 and 0 < sum(r["device_s"] for r in rows.values()) < seconds
    counters = Counter({key: row["steps"] for key, row in rows.items()})
    assert counters == engine.dispatcher.counters


def test_an_engine_that_was_watched_runs_as_before() -> None:
    engine = make()
    with recorded(engine) as steps:
        pass
    engine.add_request("12+34=", SamplingParams(temperature=0.0, max_tokens=4))
    while engine.has_unfinished():
        engine.step()
    assert steps == [] and account(steps) == []
    assert "launch" not in vars(engine.core.runner) and "choose" not in vars(engine.dispatcher)
