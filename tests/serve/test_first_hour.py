"""Every command of docs/first-hour.md runs on the bundled model, that which bakes first: all others
load what it has compiled."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusewright.serve.cli import main

from .server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_servers")]
PAGE = Path(__file__).resolve().parents[2] / "docs/first-hour.md"
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.M | re.S)
PORT = "localhost:8000"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands run.  The user's store is the folder that the page bakes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("FUSEWRIGHT_BAKED_DIR", str(tmp_path / "baked"))
    return tmp_path


def commands() -> Iterator[tuple[str, str]]:
    for language, block in BLOCK.findall(PAGE.read_text()):
        for text in [block] if language == "python" else block.splitlines():
            yield language, text


def bakes(command: tuple[str, str]) -> bool:
    return "--compile-cache-dir" in command[1]


def test_the_first_hour(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: dict[str, str] = {}
    server = None
    try:
        for language, text in sorted(commands(), key=bakes, reverse=True):
            if server is not None:
                text = text.replace(PORT, server.url.removeprefix("http://"))
            if text.startswith("fusewright serve "):
                server = ServerProcess("-O2").wait_ready()
                continue
            if language == "python":
                exec(compile(text, PAGE.name, "exec"), {})
            elif text.startswith("curl "):
                assert server is not None
                done = subprocess.run(
                    shlex.split(text), capture_output=True, text=True, timeout=300
                )
                print(done.stdout)
                assert done.returncode == 0, text
            else:
                program, *arguments = shlex.split(text)
                assert program == "fusewright"
                assert main(arguments) == 0, text
            captured = capsys.readouterr()
            said[text] = captured.out + captured.err
    finally:
        if server is not None:
            server.stop()
    texts = "\n".join(said.values())
    assert {"95", "46"} <= {*texts.splitlines()}
    for promised in ('"95"', "vllm:num_requests_running", "1 3 5 9", "matched", "TPOT", "goodput"):
        assert promised in texts, promised
    assert "fusewright serve abacus" in json.loads((folder / "tune.json").read_text())["command"]
