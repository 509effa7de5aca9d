"""A process of a warm parent is like one that has been started, but for what is imported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serve.server_process import is_running, wait_for
from tests.warm import real_starts, warm_starts

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="starts are real where a GPU is"),
    pytest.mark.skipif(not os.environ.get("PYTHONSAFEPATH"), reason="make sets it"),
]

TELL = """
import json, os, random, sys
facts = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "name": __name__, "folder": os.getcwd(),
    "parent": os.getppid(), "environment": dict(os.environ), "input": sys.stdin.read(),
    "imported": sorted(sys.modules), "is_leader": os.getsid(0) == os.getpid(),
    "files": sorted(map(int, os.listdir("/proc/self/fd"))),
    "command": open("/proc/self/cmdline").read().strip("\\0").split("\\0"),
    "random": random.random(),
}
print(json.dumps(facts))
"""


@pytest.fixture(params=[warm_starts, real_starts], ids=["warm", "real"])
def is_warm(request: pytest.FixtureRequest) -> Iterator[bool]:
    with request.param():
        yield request.param is warm_starts


def told(*words: str, **options: Any) -> Any:
    command = [sys.executable, "-P", *words]
    done = subprocess.run(command, capture_output=True, text=True, input="said", **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_has_what_it_was_given(is_warm: bool, tmp_path: Path) -> None:
    env = {**os.environ, "GIVEN": "a=b"}
    reads, writes = os.pipe()
    facts = told(
        *("-c", TELL, "x y", "-v"),
        env=env,
        cwd=tmp_path,
        pass_fds=[writes],
        start_new_session=True,
    )
    os.close(reads)
    os.close(writes)
    assert facts["argv"] == ["-c", "x y", "-v"]
    assert (
        facts["orig_argv"]
        == facts["command"]
        == [sys.executable, "-P", *facts["argv"][:1], TELL, "x y", "-v"]
    )
    assert (facts["name"], facts["folder"], facts["input"]) == ("__main__", str(tmp_path), "said")
    assert facts["environment"] == env
    assert facts["parent"] == os.getpid()
    assert facts["is_leader"]
    assert {0, 1, 2, writes} <= set(facts["files"])
    assert len(facts["files"]) == 5, "and the folder that is listed"
    assert ("torch" in facts["imported"]) == is_warm
    assert not [name for name in facts["imported"] if name.startswith("fusewright")]
    assert facts["random"] != told("-c", TELL)["random"]


def test_files_and_modules_run_as_main(is_warm: bool, tmp_path: Path) -> None:
    file = tmp_path / "tell.py"
    file.write_text(TELL)
    of_file = told(str(file), "1")
    assert (of_file["argv"], of_file["name"]) == ([str(file), "1"], "__main__")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    of_module = told("-m", "tell", "1", env=env)  # another path: this is a real start
    assert (of_module["argv"], of_module["name"]) == ([str(file), "1"], "__main__")
    assert "torch" not in of_module["imported"]


@pytest.mark.parametrize(
    ("code", "returned", "said"),
    [
        ("raise SystemExit", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import atexit, os; atexit.register(lambda: os.write(2, b'end\\n'))", 0, "end\n"),
        (
            "import os, threading as t; t.Timer(0.1, lambda: os.write(2, b'late')).start()",
            0,
            "late",
        ),
    ],
)
def test_it_ends_as_python_does(is_warm: bool, code: str, returned: int, said: str) -> None:
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == returned
    assert done.stderr.endswith(said) if said else done.stderr == ""


def test_what_it_starts_is_its_own_and_warm_if_asked() -> None:
    inner = [sys.executable, "-P", "-c", TELL]
    outer = f"import os, subprocess; print(os.getpid()); subprocess.run({inner!r}, input=b'')"
    for nested in (False, True):
        with warm_starts(nested=nested):
            command = [sys.executable, "-P", "-u", "-c", outer]
            done = subprocess.run(command[:2] + command[3:], stdout=subprocess.PIPE, text=True)
        lines = sorted(done.stdout.splitlines())
        (pid,) = [line for line in lines if line.isdigit()]
        facts = json.loads(next(line for line in lines if line.startswith("{")))
        assert facts["parent"] == int(pid)
        assert ("torch" in facts["imported"]) == nested


def test_nothing_outlives_who_started_it() -> None:
    """A worker that is killed leaves neither its warm parent nor that of a child."""
    code = """
import os, subprocess, sys, time
sys.path.append(sys.argv[1])
from tests.warm import warm_starts
with warm_starts(nested=True):
    child = subprocess.Popen([sys.executable, "-P", "-c", "input()"], stdin=subprocess.PIPE)
print(os.getpgid(0), flush=True)
time.sleep(600)
"""
    root = str(Path(__file__).resolve().parent.parent)
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code, root],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as worker:
        assert worker.stdout is not None
        group = int(worker.stdout.readline())
        try:
            # The worker, its warm parent, the child, and the child's.
            wait_for(lambda: len(members_of(group)) == 4)
            members = members_of(group)
        finally:
            worker.kill()
        wait_for(lambda: not any(map(is_running, members)))


def members_of(group: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            if os.getpgid(int(path.name)) == group and is_running(int(path.name)):
                found.append(int(path.name))
    return found
