"""Python collects rarely while a process starts, and as before afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from fusewright.config import collecting_rarely


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("before", "during"),
    [((700, 10, 10), 50_000), ((0, 10, 10), 0), ((60_000, 5, 5), 60_000)],
    ids=["Python's own", "never", "more rarely"],
)
def test_a_start_collects_rarely_and_leaves_what_the_caller_had(
    before: tuple[int, int, int], during: int
) -> None:
    gc.set_threshold(*before)
    with pytest.raises(KeyError), collecting_rarely():
        assert gc.get_threshold()[0] == during
        raise KeyError("a start that fails")
    assert gc.get_threshold() == before


@pytest.mark.parametrize("call", ["", "leave_garbage_at_exit()"])
def test_a_command_ends_without_a_collection(call: str) -> None:
    code = f"""
import gc
from fusewright.config import leave_garbage_at_exit
class Noisy:
    def __del__(self):
        print("collected")
one = Noisy()
one.itself = one
del one
{call}
"""
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ("" if call else "collected\n")
