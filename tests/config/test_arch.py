from __future__ import annotations

import re
from pathlib import Path

import pytest

from fusewright.config.arch import ARCHS, HOPPER, arch, why_csrc_has_no_code

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("sm", "expected"), [(0, 90), (75, 80), (80, 80), (87, 86), (89, 89), (90, 90), (103, 100)]
)
def test_a_capability_has_the_facts_of_the_nearest_below(sm: int, expected: int) -> None:
    assert arch(sm).sm == expected


def test_only_what_came_with_hopper_starts_early() -> None:
    assert [a.sm for a in ARCHS if a.programmatic] == [a.sm for a in ARCHS if a.sm >= 90]


def test_csrc_says_what_it_is_built_for() -> None:
    assert why_csrc_has_no_code(90) == ""
    assert why_csrc_has_no_code(89) == "built for SM 9.0, not 8.9"
    assert why_csrc_has_no_code(0) == "built for SM 9.0, not an unknown one"
    assert HOPPER.shared_bytes == 227 * 1024


def test_the_build_compiles_csrc_for_the_architectures_of_the_table() -> None:
    cmake = (ROOT / "CMakeLists.txt").read_text()
    found = re.search(r'set\(FUSEWRIGHT_ARCHS "([^"]*)"', cmake)
    assert found
    assert found[1].split(";") == [a.csrc for a in ARCHS if a.csrc]
