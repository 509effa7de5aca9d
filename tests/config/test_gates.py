"""A pass runs where the table says that it gains, and an explicit option wins over the table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusewright.config import (
    LEVELS,
    PASSES,
    EngineOptions,
    Hardware,
    ModelLimits,
    gates,
    resolve,
)
from fusewright.config.gates import GATES, Measured

GPU = Hardware(device="cuda", name="NVIDIA H200", sm=90, graphs="cuda")
LIMITS = ModelLimits(1024, "bfloat16")
WORKS = ("decode 1", "decode 64", "decode 256", "prefill 2048")


def measured(
    name: str,
    on: float,
    off: float = 10.0,
    **facts: Any,
) -> Measured:
    """Figures that are equal but at 64 rows, ``on`` against ``off``."""
    known: dict[str, Any] = {"sm": 90, "dtype": "bfloat16", "gpu": "G", "model": "M"}
    known |= {"commit": "C", "source": "S"}
    times = dict.fromkeys(WORKS, 5.0) | {"decode 64": off}
    noise = dict.fromkeys(times, 0.0) | {"decode 64": 0.01}
    on_ms = times | {"decode 64": on}
    return Measured(name=name, **(known | facts), on_ms=on_ms, off_ms=times, noise=noise)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "gates.json"
    path.write_text('{"measured": []}')
    return path


@pytest.mark.parametrize(
    ("on", "why"),
    [
        (9.0, ""),
        (10.05, ""),  # noise
        (10.2, "it loses: on against off: decode 1 5.000 against 5.000 ms (+0.0% ± 0.0%), d"),
    ],
)
def test_a_pass_is_off_where_it_loses(on: float, why: str, table: Path) -> None:
    gates.update([measured("p", on), measured("q", 20.0)], table)
    said = gates.why_off("p", 90, "bfloat16", path=table)
    assert said.startswith(why) and bool(said) == bool(why)


@pytest.mark.parametrize(
    ("noise", "change", "losses"),
    [(0.0, 0.98, 0), (0.0, 1.003, 0), (0.0, 1.007, 1), (0.05, 1.008, 0), (0.05, 1.012, 1)],
)
def test_a_small_difference_decides_nothing_and_noise_hides_no_large_loss(
    noise: float, change: float, losses: int
) -> None:
    found = measured("p", 10.0 * change)
    found = replace(found, noise=dict.fromkeys(found.on_ms, noise))
    assert len(found.losses) == losses


def test_nothing_is_concluded_for_another_gpu_or_dtype(table: Path) -> None:
    gates.update([measured("p", 20.0)], table)
    for sm, dtype in ((80, "bfloat16"), (90, "fp8")):
        assert gates.why_off("p", sm, dtype, path=table) == ""


def test_new_figures_take_the_place_of_the_old(table: Path) -> None:
    gates.update([measured("p", 20.0), measured("q", 20.0)], table)
    gates.update([measured("p", 9.0), measured("p", 9.0, dtype="fp8")], table)
    assert len(json.loads(table.read_text())["measured"]) == 3
    assert gates.why_off("p", 90, "bfloat16", path=table) == ""
    assert gates.why_off("q", 90, "bfloat16", path=table) != ""


def test_the_tables_own_figures_decide_what_levels_run() -> None:
    for level in (2, 3):
        ran = resolve(EngineOptions(optimization_level=level), GPU, LIMITS).compile.passes
        for name in PASSES:
            off = gates.why_off(name, 90, "bfloat16")
            assert (name in ran) == (name in LEVELS[level].passes and not off), name
    first = resolve(EngineOptions(optimization_level=1), GPU, LIMITS)
    assert first.compile.passes == LEVELS[1].passes


def test_an_explicit_option_wins_over_the_table() -> None:
    options = EngineOptions(passes=PASSES)
    assert resolve(options, GPU, LIMITS).compile.passes == PASSES


def test_the_table_names_passes_that_exist_and_where_figures_come_from() -> None:
    for entry in gates.measured_passes(GATES):
        assert entry.name in PASSES and entry.gpu and entry.model and entry.commit and entry.source
        assert entry.on_ms.keys() == entry.off_ms.keys() == entry.noise.keys() != set()
        assert all(0.5 < ratio < 2 for ratio in entry.ratios.values())
