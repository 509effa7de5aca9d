"""``make mutants`` draws the same edits for a seed, tests each in a copy, and names survivors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "mutants.py"
# Plugins that are installed take longer to load than the tests of an edit.
WITHOUT_PLUGINS = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
SOURCE = '''"""A text: 1 + 1."""
from __future__ import annotations


def count(values: list[int] | None, most: int = 3, *, strict: bool = False) -> int:
    if not values or most < 1:
        raise ValueError(f"{most - 1} is too few")
    total = sum(sorted(values, reverse=True)[:most])
    return total - 1 if strict and values[0] is not None else total


def unused(a: int, b: int) -> tuple[int, int]:
    return divmod(a, b)


def _cases(seed: int) -> Iterator[Case]:
    yield Case(seed + 1)


def guarded(a: list[int], b: list[int]) -> list[int]:
    return [max(one, other) for one, other in zip(sorted(a), b, strict=True)]
'''
TESTS = """
from fusewright.sums import count

def test_the_largest_are_added():
    assert count([1, 2, 3, 4]) == 9 and count([5, 1], 1) == 5 and count([5], strict=True) == 4
"""
TEST = "strict and values[0] is not None"
EXPECTED = {
    "5: 3 -> 4", "5: 3 -> 2", "5: False -> True", "6: or -> and", "6: not values -> values",
    "6: < -> <=", "6: 1 -> 2", "6: 1 -> 0", "8: reverse=True -> (nothing)", "8: True -> False",
    "9: - -> +", "9: 1 -> 2", "9: 1 -> 0", "9: and -> or", "9: 0 -> 1", "9: 0 -> -1",
    "9: is not -> is", "13: a, b -> b, a", "21: sorted(a), b -> b, sorted(a)",
    f"9: total - 1 if {TEST} else total -> total if {TEST} else total - 1",
}  # fmt: skip


def checkout(folder: Path) -> Path:
    root = folder / "checkout"
    (root / "tests").mkdir(parents=True)
    (root / "__init__.py").touch()
    (root / "sums.py").write_text(SOURCE)
    (root / "folder").mkdir()
    (root / "folder" / "sum_cases.py").write_text("SIZES = (1, 2)\n")
    (root / "tests" / "test_sums.py").write_text(TESTS)
    table = 'preload = []\noptions = []\n[covers]\n"*.py" = ["tests/test_{stem}.py"]\n'
    (root / "tests" / "mutants.toml").write_text(table)
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    return root


def run(root: Path, *options: str) -> tuple[int, str, list[dict[str, str]]]:
    output = root.parent / "mutants.json"
    command = [sys.executable, str(TOOL), "--root", str(root), "--paths", "sums.py", "folder"]
    command += ["--output", str(output), *options]
    done = subprocess.run(command, env=WITHOUT_PLUGINS, capture_output=True, text=True, check=False)
    assert output.exists(), done.stderr
    return done.returncode, done.stdout, json.loads(output.read_text())["edits"]


@pytest.mark.slow
def test_every_edit_is_tested_in_a_copy_and_survivors_are_named(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    status, said, edits = run(root, "--count", "1000", "--jobs", "2")
    results = {f"{e['line']}: {e['before']} -> {e['after'] or '(nothing)'}": e for e in edits}
    assert {*results} == EXPECTED
    survived = {name for name, edit in results.items() if edit["result"] == "survived"}
    assert survived >= {"13: a, b -> b, a", "6: 1 -> 0", "6: or -> and"}
    assert survived <= {*EXPECTED} - {"5: 3 -> 2", "9: - -> +", "5: False -> True"}
    assert status == 1 and all(f"  sums.py:{name}" in said for name in survived)
    assert f"{len(EXPECTED)} edits: {len(EXPECTED) - len(survived)} killed" in said
    killed = [edit for edit in edits if edit["result"] == "killed"]
    assert {edit["test"] for edit in killed} == {"tests/test_sums.py::test_the_largest_are_added"}
    assert (root / "sums.py").read_text() == SOURCE


def test_a_seed_draws_the_same_edits_and_another_seed_others(tmp_path: Path) -> None:
    sys.path.insert(0, str(TOOL.parent))
    try:
        from mutants import draw
    finally:
        sys.path.pop(0)
    root = checkout(tmp_path)
    drawn = [[str(e) for e in draw(root, ["sums.py"], 6, seed)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] and len(set(drawn[0])) == 6


def test_tests_that_fail_without_an_edit_stop_the_run(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    (root / "tests" / "test_sums.py").write_text("def test_no():\n    assert False\n")
    command = [sys.executable, str(TOOL), "--root", str(root), "--paths", "sums.py", "--count", "1"]
    done = subprocess.run(command, env=WITHOUT_PLUGINS, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert (
        "without any edit, tests/test_sums.py::test_no fails in: tests/test_sums.py" in done.stderr
    )
