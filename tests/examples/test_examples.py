"""Every example runs as a user would run it, and prints what it promises."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.warm import warm_starts

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROMISED = {
    "offline_batch.py": [
        "37+58=95  [stop]",
        "905-46=859  [stop]",
        "sort 5 3 9 1=1 3 5 9  [stop]",
        "reverse kernel=lenrek  [stop]",
        "sampled: [",
    ],
    "streaming.py": ["reverse fusewrig=girwesuf  [stop]"],
    "add_a_model.py": ["the new model agrees"],
}


def test_every_example_is_listed_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PROMISED)


@pytest.mark.parametrize("name", PROMISED)
def test_examples_are_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 60


@pytest.mark.product(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", PROMISED)
def test_example(name: str, tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / name]
    # One starts as a user starts it, the others as ``tests.warm`` does.
    with nullcontext() if name == "streaming.py" else warm_starts():
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    for line in PROMISED[name]:
        assert line in done.stdout
