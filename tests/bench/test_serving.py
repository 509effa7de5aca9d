"""Workloads are those of NUMBERS.md; a run times every token of every request."""

from __future__ import annotations

import json
import statistics
from math import inf
from pathlib import Path

import pytest

from fusewright.bench.serving import RequestTimes, Run, parse_limits, run
from fusewright.bench.workloads import MIXES, arrivals, equal, mix
from fusewright.config import UserError
from fusewright.serve.cli import main
from tests.engine.toy import Setup


def test_a_mix_is_the_same_every_time_and_has_the_stated_means() -> None:
    for name, mean_in, mean_out in (
        ("chat", 200, 160),
        ("prefill-heavy", 442, 14),
        ("decode-heavy", 442, 227),
    ):
        works = mix(name, 500, 1000)
        assert works == mix(name, 500, 1000)
        lengths = [len(w.prompt_token_ids) for w in works], [w.output_len for w in works]
        assert statistics.mean(lengths[0]) == pytest.approx(mean_in, rel=0.02)
        assert statistics.mean(lengths[1]) == pytest.approx(mean_out, rel=0.05)
    assert set(MIXES) == {"chat", "prefill-heavy", "decode-heavy"}


def test_a_run_counts_every_token_and_orders_its_times() -> None:
    engine = Setup(num_blocks=64, max_num_seqs=3).engine()
    works = [*equal(4, 7, 5, 200), *equal(2, 3, 1, 200)]
    result = run(engine, works)
    assert (result.input_tokens, result.output_tokens) == (34, 22)
    assert len(result.requests) == 6 and len(result.gaps) == 4 * 4
    assert all(0 < r.ttft <= r.e2e <= result.seconds * 1e3 for r in result.requests)
    assert [r.tpot == 0 for r in result.requests] == [False] * 4 + [True] * 2
    assert engine.on_tokens is None and not engine.has_unfinished()


def test_requests_come_at_their_rate() -> None:
    result = run(Setup().engine(), equal(5, 3, 2, 200), arrivals(5, 50, inf))
    assert result.seconds >= 4 / 50


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    times = [RequestTimes(100, 10, 500), RequestTimes(100, 30, 500), RequestTimes(900, 10, 950)]
    report = Run(2.0, 0, 0, times, [10.0]).to_json(parse_limits(["ttft:500", "tpot:20"]))
    assert report["goodput_per_s"] == 0.5
    assert report["ttft_ms"]["p50"] == 100
    assert report["itl_ms"]["mean"] == 10
    stalled = [RequestTimes(100, 10, 500, itl) for itl in (12, 80)]
    assert Run(1.0, 0, 0, stalled).to_json(parse_limits(["itl:50"]))["goodput_per_s"] == 1


@pytest.mark.parametrize("item", ["ttft", "ttft:x", "itl:0", "speed:1"])
def test_a_limit_of_another_form_is_refused(item: str) -> None:
    with pytest.raises(UserError, match="expected a measure of ttft"):
        parse_limits([item])


def test_a_workload_longer_than_the_model_is_refused() -> None:
    with pytest.raises(UserError, match="requests of 70 tokens, max_model_len is 64"):
        run(Setup(max_model_len=64).engine(), equal(1, 60, 10, 200))


@pytest.mark.slow
def test_the_commands_measure_and_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch-size", "1", "--batch-size", "2", "--input-len", "8", "--output-len", "4"]
    files = ["--output", str(tmp_path / "l.json"), "--plot", str(tmp_path / "l.png")]
    assert main(["bench", "latency", "abacus", "-O0", *sizes, *files]) == 0
    record = json.loads((tmp_path / "l.json").read_text())
    assert [row["batch"] for row in record["rows"]] == [1, 2]
    assert record["engine"]["prefix_cache"]["enabled"] is False
    assert (tmp_path / "l.png").read_bytes().startswith(b"\x89PNG")
    argv = ["bench", "throughput", "abacus", "-O0", "--dataset", "nope"]
    assert main(argv) == 2
    assert "expected one of chat, prefill-heavy, decode-heavy" in capsys.readouterr().err
