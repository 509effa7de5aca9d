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


ENDS = """
import atexit, sys, threading, time
from fusewright.config import leave
class Noisy:
    def __del__(self):
        print("collected")
one = Noisy()
one.itself = one
kept = Noisy()
atexit.register(print, "exit handler")
print("said", end=" ")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
"""


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("leave(7)", "said thread\nexit handler\n"),
        ("sys.exit(7)", "said thread\nexit handler\ncollected\ncollected\n"),
    ],
    ids=["leave", "exit"],
)
def test_leaving_is_an_exit_that_takes_nothing_apart(end: str, said: str) -> None:
    command = [sys.executable, "-P", "-c", ENDS + end]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (7, said, "")


def test_a_stream_that_fails_keeps_no_process_from_leaving() -> None:
    code = ENDS + "sys.stdout.flush(); sys.stderr = None; sys.stdout.close(); leave(3)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 3


def test_the_command_leaves_its_modules_as_they_are() -> None:
    code = (
        ENDS + "import fusewright.serve.cli as cli; sys.argv = ['fusewright', 'bogus']; cli.run()"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "No such command" in done.stderr
    assert done.stdout == "said thread\nexit handler\n"
