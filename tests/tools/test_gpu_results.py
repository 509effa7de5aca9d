"""GPU tests that were cut off go on where they were; the stamp counts every test once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
TESTS = """
import os, pytest
def test_passes():
    pass
@pytest.mark.skip
def test_is_skipped():
    pass
@pytest.mark.parametrize("how", ["a test", "a fixture"])
def test_fails(how, request):
    assert how == "a fixture" or "FIXED" in os.environ
@pytest.fixture(autouse=True)
def torn_down(request):
    yield
    assert "a fixture" not in request.node.name or "FIXED" in os.environ
def test_ends_the_process():
    if "FIXED" not in os.environ:
        os._exit(9)
def test_last():
    pass
"""


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "test_them.py").write_text(TESTS)
    found = tmp_path / "results.jsonl"
    found.write_text(json.dumps({"digest": "0"}) + "\n")
    return found


def run(results: Path, *words: str, **environment: str) -> tuple[int, dict[str, str]]:
    """The exit code, and the outcomes since by the tests' names."""
    before = len(results.read_text().splitlines())
    plugins = ("-p", "xdist.plugin", "-p", "gpu_results")
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *words]
    done = subprocess.run(
        [*command, f"--results={results}", f"--results={results.with_suffix('.copy')}"],
        cwd=results.parent,
        env={**os.environ, **ALONE, **environment, "PYTHONPATH": str(TOOLS)},
        capture_output=True,
        check=False,
    )
    lines = results.read_text().splitlines()[before:]
    return done.returncode, {name.partition("::")[2]: how for name, how in map(json.loads, lines)}


@pytest.mark.parametrize("beside", [(), ("-n", "2")], ids=["alone", "beside each other"])
def test_a_run_that_was_cut_off_goes_on_where_it_was(
    results: Path, beside: tuple[str, ...]
) -> None:
    code, first = run(results)
    assert code == 9
    assert first == {
        "test_passes": "passed",
        "test_is_skipped": "skipped",
        "test_fails[a test]": "failed",
        "test_fails[a fixture]": "failed",
    }
    why = results.with_name(f"{results.name}.failed.txt").read_text()
    assert re.findall(r"^=== .*::(.*)$", why, re.M) == [
        "test_fails[a test] (call)",
        "test_fails[a fixture] (teardown)",
    ]
    assert "AssertionError" in why
    with results.open("a") as end:
        end.write('["test_them.py::test_la')  # as a full disk leaves it
        end.write("\n")
    code, then = run(results, *beside, FIXED="1")
    assert code == 0
    assert then == dict.fromkeys(
        ["test_fails[a test]", "test_fails[a fixture]", "test_ends_the_process", "test_last"],
        "passed",
    )
    assert results.with_suffix(".copy").read_text().count("\n") == 8
    assert run(results, FIXED="1") == (5, {})


def test_a_worker_that_crashes_is_a_failure(results: Path) -> None:
    code, found = run(results, "-n", "1")
    assert code == 1 and found["test_ends_the_process"] == "failed"
    assert found["test_last"] == "passed"


def test_outcomes_of_other_sources_do_not_count(tmp_path: Path) -> None:
    code = f"""
import gpu_stamp, pathlib
folder = pathlib.Path({str(tmp_path)!r}) / "there"
path = gpu_stamp.begun(2, {{"digest": "0", "gpu": "H200"}}, folder)
with path.open("a") as end:
    end.write('["a", "failed"]\\n["a", "passed"]\\n["b", "skipped"]\\n')
same = gpu_stamp.begun(2, {{"gpu": "H200", "digest": "0"}}, folder)
print(gpu_stamp.counts(same))
print(gpu_stamp.outcomes(gpu_stamp.begun(2, {{"digest": "1", "gpu": "H200"}}, folder)))
print(gpu_stamp.outcomes(gpu_stamp.begun(1, {{"digest": "0", "gpu": "H200"}}, folder)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(TOOLS)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["{'passed': 1, 'failed': 0, 'skipped': 1}", "{}", "{}"]
