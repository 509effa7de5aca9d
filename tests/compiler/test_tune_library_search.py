"""The search for a library algorithm, over a GPU and a library that only take time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.compiler.lowering import tune_library
from fusewright.compiler.lowering.search import Times, winner
from fusewright.compiler.lowering.tune import NUM_TOKENS
from fusewright.compiler.lowering.tune_library import (
    ROWS,
    TuningProblem,
    _copies,
    _nbytes,
    is_right,
    neighbours,
    problem,
    screened,
    stream_us,
    tuned,
)
from fusewright.config.device_table import OPERANDS, Algorithm, Weight
from fusewright.ops.core import cublaslt as _cublaslt

DTYPES = dict.fromkeys(OPERANDS, torch.float8_e4m3fn) | {"bfloat16": torch.bfloat16}
FEW, MOST = 33, 64
BEST = {"tile": 18, "cluster": 4, "split_k": 3, "reduction": 2, "option": 7}
"""The settings of the fastest algorithm."""


def algorithm(**settings: int) -> bytes:
    first = {"tile": 12, "cluster": 2, "split_k": 1, "reduction": 0, "option": 0} | settings
    made = bytearray(64)
    for name, value in first.items():
        made[4 * _cublaslt.SETTINGS[name][0]] = value
    return bytes(made)


class Library:
    """The part of cuBLASLt that reads and changes algorithms; it knows no cluster 9."""

    def cublasLtMatmulAlgoConfigGetAttribute(
        self, algorithm: bytes, number: int, value: Any, *_: Any
    ) -> int:
        value._obj.value = algorithm[4 * number]
        return 0

    def cublasLtMatmulAlgoConfigSetAttribute(
        self, algorithm: Any, number: int, value: Any, size: int
    ) -> int:
        algorithm[4 * number] = value._obj.value
        return int(number == _cublaslt.SETTINGS["cluster"][0] and value._obj.value == 9)


@dataclass
class Gpu:
    """A clock that calls move on.  Each setting that is not the best one costs time."""

    now_us: float = 0.0
    before_us: dict[int, float] = field(default_factory=lambda: {MOST: 80.0, FEW: 80.0})
    """Rows -> time of what runs without a table."""
    heuristic: tuple[bytes, ...] = (algorithm(),)
    refused: set[bytes] = field(default_factory=set)
    wrong: dict[bytes, set[int]] = field(default_factory=dict)
    """Algorithm -> numbers of rows at which its result is wrong."""
    ran: Counter[bytes] = field(default_factory=Counter)
    graphs: Counter[int] = field(default_factory=Counter)
    """Rounds -> calls that were timed in graphs of so many."""

    def us(self, algorithm: bytes) -> float:
        apart = {n: abs(_cublaslt.setting(algorithm, n) - best) for n, best in BEST.items()}
        return 50.0 + sum(min(steps, 3) + steps / 100 for steps in apart.values())

    def run_before(self, x: Tensor, *_: Any) -> None:
        self.now_us += self.before_us[len(x)]

    def graph_us(self, fns: Sequence[Callable[[], Any]], *, calls: int, rounds: int) -> float:
        self.graphs[rounds] += 1
        start = self.now_us
        for fn in fns:
            fn()
        return (self.now_us - start) / len(fns)


@dataclass
class Plan:
    gpu: Gpu
    rows: int

    def algorithms(self, most: int) -> list[bytes]:
        return [*self.gpu.heuristic[:most]]

    def refuses(self, algorithm: bytes) -> str:
        return "status 15" if algorithm in self.gpu.refused else ""

    def run(
        self, x: Tensor, weight: Tensor, y: Tensor, algorithm: bytes, *scales: Tensor
    ) -> Tensor:
        assert not self.refuses(algorithm)
        self.gpu.ran[algorithm] += 1
        self.gpu.now_us += self.gpu.us(algorithm)
        exact = x.float() @ weight.float().T
        if scales:
            exact = exact * scales[0] * scales[1].T
        if self.rows in self.gpu.wrong.get(algorithm, ()):
            exact[-1, -1] += exact.abs().max() / 100
        return y.copy_(exact)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = made.now_us

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) / 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(_cublaslt, "_library", Library)
    monkeypatch.setattr(tune_library, "graph_us", made.graph_us)
    monkeypatch.setattr(tune_library, "_unmeasured", made.run_before)
    monkeypatch.setattr(
        tune_library, "GemmPlan", lambda operands, device, rows, n, k: Plan(made, rows)
    )
    return made


def entry_of(found: tuple[Times[Algorithm | None], str]) -> tuple[Algorithm | None, str]:
    times, line = found
    return winner(times), line


def make(rows: int, operands: str = "bfloat16") -> TuningProblem:
    weight: Weight = (operands, 24, 32)  # type: ignore[assignment]
    pool = (torch.randn(16 * 24 * 32) / 6).to(DTYPES[operands])
    return problem(weight, rows, pool)


def test_ranges_of_rows_are_of_eight_and_widen_by_a_half_at_most() -> None:
    assert all(rows % 8 == 0 for rows in ROWS)
    assert all(1 < more / rows <= 1.5 for rows, more in pairwise(ROWS))
    assert {n.bit_count() for n in NUM_TOKENS} == {1} and min(NUM_TOKENS) > 1


@pytest.mark.parametrize("operands", OPERANDS)
def test_a_problem_has_what_the_op_gets(gpu: Gpu, operands: str) -> None:
    p = make(3, operands)
    assert p.x.shape == (3, 32) and p.y.shape == (3, 24) and p.y.dtype == torch.bfloat16
    assert len(p.weights) == 16 and {w.shape for w in p.weights} == {(24, 32)}
    assert p.x.dtype == p.weights[0].dtype == DTYPES[operands]
    shapes = {"bfloat16": [], "fp8 tensor": [(1, 1)] * 2, "fp8 token": [(3, 1), (24, 1)]}
    assert [tuple(scale.shape) for scale in p.scales] == shapes[operands]
    right, wrong = algorithm(), algorithm(tile=1)
    gpu.wrong[wrong] = {3}
    assert p.error(right) < 2.0**-8 < p.error(wrong) < 2.0**-6
    assert is_right(right, p) and not is_right(wrong, p)
    gpu.refused.add(right)
    assert not is_right(right, p)


@pytest.mark.parametrize("n", [64, 4096, 16384, 65536, 131072, 400_000])
def test_copies_of_a_weight_exceed_the_cache_and_are_no_more_than_it_takes(n: int) -> None:
    weight: Weight = ("bfloat16", n, 4096)
    copies = _copies(weight)
    assert 2 <= copies <= 16
    assert copies in (2, 16) or (copies + 1) * _nbytes(weight) > 512 << 20
    assert copies in (2, 16) or copies * _nbytes(weight) <= 512 << 20
    assert {16384: 4, 65536: 2}.get(n, copies) == copies


def test_a_screening_reads_no_weight_twice(gpu: Gpu) -> None:
    read: list[int] = []

    def call(i: int) -> None:
        read.append(i)
        gpu.now_us += 1000.0 if i == 0 else 10.0 * i

    assert stream_us(call) == pytest.approx((10 + 20 + 30 + 40) / 4)
    assert read == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["tile", "cluster", "split", "option"])
def test_a_step_to_a_neighbour_leads_back(gpu: Gpu, kind: str) -> None:
    start = algorithm(tile=12, cluster=4, split_k=3, reduction=2, option=5)
    found = list(neighbours(start, kind))
    known = [other for other in found if other is not None]
    assert len(known) == len(set(known)) == len(found) - (kind == "cluster")
    for other in known:
        changed = {n for n in BEST if _cublaslt.setting(other, n) != _cublaslt.setting(start, n)}
        assert changed <= ({"split_k", "reduction"} if kind == "split" else {kind})
        if kind != "split" or _cublaslt.setting(other, "split_k") > 1:
            assert start in neighbours(other, kind)
    whole = algorithm(tile=12, cluster=4, option=5)
    assert (whole in known) == (kind == "split"), "a product that is not split"


def test_tiles_are_positive(gpu: Gpu) -> None:
    found = {_cublaslt.setting(a, "tile") for a in neighbours(algorithm(tile=3), "tile") if a}
    assert found == {1, 2, 4, 5, 6, 7, 11}


def test_the_search_finds_the_fastest_and_times_each_once(gpu: Gpu) -> None:
    p = make(MOST)
    gpu.refused |= {algorithm(tile=tile) for tile in (13, 15)}
    found = screened(p, ())
    assert found[0] == algorithm(**BEST) and len(found) == len(set(found)) == 10
    assert [gpu.us(a) for a in found] == sorted(gpu.us(a) for a in found)
    assert set(gpu.ran.values()) == {5}, "one call ahead of the four that are timed"
    assert sorted(map(gpu.us, gpu.ran))[:10] == [gpu.us(a) for a in found]
    assert len(gpu.ran) == 164, "as many as its steps and its breadths make"


def test_a_seed_is_found_from_nowhere(gpu: Gpu) -> None:
    gpu.heuristic = (algorithm(tile=60),)
    best = algorithm(**BEST)
    assert screened(make(MOST), ())[0] != best
    assert screened(make(MOST), [best])[0] == best
    seeds = {best}
    entry, _ = entry_of(tuned(make(MOST), make(FEW), seeds))
    assert entry is not None and entry.algorithm == best.hex() and seeds == {best}


def test_an_entry_has_what_was_measured(gpu: Gpu) -> None:
    seeds = {algorithm(option=3)}
    p = make(MOST)
    entry, line = entry_of(
        tuned(TuningProblem(**vars(p) | {"weights": p.weights[:1]}), make(FEW), seeds)
    )
    assert entry is not None and entry.weight == ("bfloat16", 24, 32)
    assert (entry.least_rows, entry.most_rows) == (FEW, MOST)
    assert (entry.us, entry.us_before) == (50.0, 80.0)
    assert bytes.fromhex(entry.algorithm) == algorithm(**BEST) in seeds
    assert line == (
        "bfloat16       24    32  64    80.0    50.0 -37.5%  0,18,3,2,0,7,0,0,4  wrong 0"
        "  33 rows 50.0 against 80.0"
    )
    # Finalists, the verified ones, and both sides at both ends.
    assert gpu.graphs == {3: 10, 9: 5, 5: 1 + 2}


@pytest.mark.parametrize(
    ("rows", "few", "least"), [(MOST, FEW, MOST - 8 + 1), (MOST, 60, 60)], ids=["narrowed", "as is"]
)
def test_where_it_loses_with_the_fewest_rows_an_entry_is_for_the_last_ones(
    gpu: Gpu, rows: int, few: int, least: int
) -> None:
    gpu.before_us[few] = 49.0
    entry, _ = entry_of(tuned(make(rows), make(few), set()))
    assert entry is not None and (entry.least_rows, entry.most_rows) == (least, rows)


@pytest.mark.parametrize("rows", [MOST, FEW])
def test_a_wrong_algorithm_is_no_entry(gpu: Gpu, rows: int) -> None:
    gpu.wrong[algorithm(**BEST)] = {rows}
    entry, line = entry_of(tuned(make(MOST), make(FEW), set()))
    assert entry is not None and entry.us > 50.0 and "wrong 1" in line
    assert entry.algorithm != algorithm(**BEST).hex()


def test_no_entry_without_a_right_algorithm_or_without_a_gain(gpu: Gpu) -> None:
    gpu.before_us[MOST] = 50.9
    seeds: set[bytes] = set()
    entry, line = entry_of(tuned(make(MOST), make(FEW), seeds))
    assert entry is None and "against" not in line and seeds == {algorithm(**BEST)}
    gpu.before_us[MOST] = 51.1
    assert entry_of(tuned(make(MOST), make(FEW), seeds))[0] is not None
    gpu.wrong = {a: {MOST} for a in gpu.ran}
    entry, line = entry_of(tuned(make(MOST), make(FEW), set()))
    assert entry is None and line.endswith("none of 10 is right")
