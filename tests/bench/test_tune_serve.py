"""Claims about ``tune serve``: it finds the best point, measures few, and goes on from its file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusewright.bench.tune_serve import (
    Found,
    Point,
    grid,
    raise_memory,
    rounds,
    search,
    to_profile,
)
from fusewright.bench.workloads import Work
from fusewright.config import MachineError
from fusewright.serve.cli import main

pytestmark = pytest.mark.usefixtures("warm_servers")
SEQS, TOKENS = (32, 64, 128, 256, 512), (1024, 2048, 4096, 8192, 16384)
POINTS = grid(SEQS, TOKENS, 4096)


def surface(point: Point) -> float:
    """Goodput with its summit at 128 x 4096; more memory helps up to 0.94."""
    memory = point.gpu_memory_utilization or 0.9
    return (
        10 * memory
        - abs(SEQS.index(point.max_num_seqs) - 2)
        - abs(TOKENS.index(point.max_num_batched_tokens) - 2) / 2
    )


class Surface:
    """A measure of ``surface`` that notes what it is asked."""

    def __init__(self, of: Callable[[Point], float] = surface) -> None:
        self.of, self.asked = of, list[tuple[Point, int, float]]()

    def __call__(self, point: Point, num_requests: int, floor: float) -> dict[str, Any]:
        self.asked.append((point, num_requests, floor))
        if (point.gpu_memory_utilization or 0) > 0.95:
            raise MachineError("out of memory")
        return {"goodput_per_s": self.of(point)}


def ignore(rows: Any, row: Any) -> None:
    pass


def test_a_grid_has_the_points_that_differ_in_effect() -> None:
    assert grid((64, 256), (128, 512), 4096) == [Point(64, 128), Point(64, 512), Point(256, 512)]
    assert grid((2,), (64, 128, 512), 50) == [Point(2, 64), Point(2, 128)]
    assert grid((64,), (32,), 100) == []


def test_a_round_keeps_a_third_for_twice_the_requests() -> None:
    assert rounds(25, 500) == [(25, 125), (9, 250), (3, 500)]
    assert rounds(4, 500) == [(4, 250), (2, 500)]
    assert rounds(1, 500) == [(1, 500)]


def test_the_best_point_is_found_and_measured_in_every_round() -> None:
    measure = Surface()
    best = search(POINTS, 500, Found([], measure, ignore))
    assert (best["max_num_seqs"], best["max_num_batched_tokens"]) == (128, 4096)
    assert [count for point, count, _ in measure.asked if point == Point(128, 4096)] == [
        125,
        250,
        500,
    ]
    assert len(measure.asked) == 25 + 9 + 3


def test_a_point_need_only_beat_those_that_would_be_kept_instead() -> None:
    measure = Surface()
    search(POINTS[:4], 100, Found([], measure, ignore))
    values = [surface(point) for point in POINTS[:4]]
    floors = [floor for _, _, floor in measure.asked]
    assert floors[:2] == [0, 0]
    assert floors[2:4] == [sorted(values[:n], reverse=True)[1] for n in (2, 3)]


def test_memory_is_raised_until_the_server_no_longer_starts() -> None:
    found = Found([], Surface(), ignore)
    best = raise_memory(search(POINTS, 500, found), 500, found)
    assert best["gpu_memory_utilization"] == 0.94


def test_an_interrupted_search_goes_on_where_it_was() -> None:
    kept: list[Any] = []

    class Interrupted(Surface):
        def __call__(self, *asked: Any) -> dict[str, Any]:
            if len(self.asked) == 30:
                raise KeyboardInterrupt
            return super().__call__(*asked)

    def keep(rows: list[Any], row: Any) -> None:
        kept[:] = rows

    with pytest.raises(KeyboardInterrupt):
        search(POINTS, 500, Found([], Interrupted(), keep))
    rest, whole = Surface(), Surface()
    best = search(POINTS, 500, Found(kept, rest, keep))
    assert best == search(POINTS, 500, Found([], whole, ignore))
    assert rest.asked == whole.asked[30:] and len(kept) == 37


def test_points_that_cannot_be_served_are_passed_over() -> None:
    def small(point: Point) -> float:
        if point.max_num_seqs >= 128:
            raise MachineError("too large")
        return surface(point)

    found = Found([], Surface(small), ignore)
    assert search(POINTS, 500, found)["max_num_seqs"] == 64
    with pytest.raises(MachineError, match="no point could be measured; the first: too large"):
        search(POINTS[-3:], 500, found)


def test_the_profile_is_of_as_many_requests_as_were_open() -> None:
    works = [Work([1] * length, output) for length, output in ((10, 20), (31, 41))]
    best = {"max_num_seqs": 8, "requests_per_s": 4.0, "e2e_ms": {"mean": 400.0}}
    prefill, decode = to_profile(best, works)
    assert (prefill.phase, prefill.batch_size) == ("prefill", 1)
    assert (decode.phase, decode.batch_size, decode.input_len) == ("decode", 2, 21)
    assert decode.output_len == 31
    assert to_profile({**best, "requests_per_s": 0.1}, works)[1].batch_size == 1
    (_, most) = to_profile({**best, "max_num_seqs": 16, "requests_per_s": 900.0}, works * 50)
    assert most.batch_size == 16
    for each in to_profile(best, [Work([1], 1)]):
        each.check()


@pytest.mark.product(2, of="commands that measure")
def test_the_command_measures_servers_and_says_how_to_start_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "t.json"
    requests = "--dataset random --input-len 8 --output-len 4 --num-prompts 6 --request-rate inf"
    points = "--try-seqs 2,4 --max-num-batched-tokens 64 --device cpu -O0"
    argv = [*f"tune serve abacus {requests} {points} --json --output".split(), str(file)]
    assert main([*argv, "--goodput", "e2e:600000"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads(file.read_text())
    assert [(row["max_num_seqs"], row["asked"]) for row in record["rows"]] == [(2, 6), (4, 6)]
    assert record["best"]["goodput_per_s"] == max(r["requests_per_s"] for r in record["rows"])
    assert record["command"] == (
        "fusewright serve abacus --device cpu --optimization-level 0 "
        f"--max-num-seqs {record['best']['max_num_seqs']} --max-num-batched-tokens 64"
    )
    assert set(record["profile"]) == {"prefill", "decode"}
    for phase, found in record["profile"].items():
        kernels = json.loads((tmp_path / "t.profile" / phase / "kernels.json").read_text())
        assert kernels["rows"] == found["kernels"] and found["kernels"][0]["us_a_step"] > 0
        assert kernels["options"]["input_len"] == 8
    engine = json.loads((tmp_path / "t.profile" / "engine.json").read_text())
    assert engine["num_layers"] > 0
    argv.append("--no-profile")
    # Nothing is measured again, so that the same command ends with the same rows.
    assert main([*argv, "--goodput", "e2e:600000"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["rows"] == record["rows"] and "profile" not in again
    assert main([*argv, "--goodput", "e2e:5"]) == 2
    assert "was measured with other limits_ms; remove it" in capsys.readouterr().err
