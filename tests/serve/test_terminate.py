"""Claims about commands that are ended from outside: nothing of them stays behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .progress_lines import is_progress

pytestmark = pytest.mark.usefixtures("warm")
WAIT_S = 300


def wait_for(what: Callable[[], object], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + WAIT_S
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to stand in for")
def test_sigterm_while_compiling_leaves_no_folder_and_no_compiler(tmp_path: Path) -> None:
    for name in ("tools", "scratch", "inductor"):
        (tmp_path / name).mkdir()
    started = tmp_path / "started"
    # A compiler that takes for ever, but answers for its version.
    (tmp_path / "tools" / "g++").write_text(
        f'#!/bin/sh\ncase "$*" in *.cpp*|*.hpp*) ;; *) exec {shutil.which("g++")} "$@";; esac\n'
        f"echo $$ >> {started}\nsleep 600\n"
    )
    (tmp_path / "tools" / "g++").chmod(0o755)
    env = os.environ | {
        "PATH": f"{tmp_path / 'tools'}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path / "scratch"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    env.pop("CXX", None)
    argv = ["run", "--device", "cpu", "--no-cache", "-p", "1+1="]
    process = subprocess.Popen(
        [sys.executable, "-m", "fusewright.serve.cli", *argv],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: started.exists() and started.read_text().endswith("\n"), process)
    assert any(path.name.startswith("fusewright-") for path in (tmp_path / "scratch").iterdir())
    compilers = [int(pid) for pid in started.read_text().split()]
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (128 + signal.SIGTERM, "")
    assert is_progress(err.splitlines()), err
    assert list((tmp_path / "scratch").iterdir()) == []
    assert not any(map(is_running, compilers))


HOLD = """
import sys, time
from fusewright.compiler.artifacts.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "half").write_bytes(b"x")
    print(folder, flush=True)
    time.sleep(600)
"""


def test_what_a_killed_process_left_is_removed_by_the_next_and_a_live_ones_kept(
    tmp_path: Path,
) -> None:
    (tmp_path / "fusewright-of-others").mkdir()
    env = os.environ | {"TMPDIR": str(tmp_path)}
    holders = []
    for _ in range(3):
        command = [sys.executable, "-c", HOLD]
        holder = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        assert holder.stdout is not None
        folder = Path(holder.stdout.readline().strip()).parent
        assert folder.parent == tmp_path
        holders.append((holder, folder))
        if len(holders) == 1:
            holder.kill()
            holder.wait()
            assert folder.exists()
    try:
        (_, dead), (_, live), (_, last) = holders
        assert set(tmp_path.iterdir()) == {live, last, tmp_path / "fusewright-of-others"}
        assert not dead.exists()
    finally:
        for holder, _ in holders:
            holder.kill()
            holder.wait()
