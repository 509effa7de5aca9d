"""A server and a command of a model that is named as on the Hub, from a Hub on 127.0.0.1."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fusewright.model_executor.abacus import FOLDER
from tests.model_executor.fake_hub import Repository, fake_hub, folder_files
from tests.serve.server_process import ServerProcess
from tests.warm import warm_starts


def test_a_name_on_the_hub_is_served_under_it_and_runs_offline_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with fake_hub({"org/abacus": Repository(folder_files(FOLDER), ("v1",))}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        server = ServerProcess(model="org/abacus@v1").wait_ready()
        with server.client() as http:
            (listed,) = http.get("/v1/models").json()["data"]
            assert listed["id"] == http.get("/v1/models/org/abacus").json()["id"] == "org/abacus"
            body = {"model": "org/abacus", "prompt": "37+58=", "temperature": 0}
            assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "95"
        assert server.stop() == 0
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    command = [sys.executable, "-P", "-m", "fusewright.serve.cli", "run", "org/abacus@v1", "-O0"]
    with warm_starts():
        done = subprocess.run(
            [*command, "-p", "37+58=", "--temperature", "0"], capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    assert "95" in done.stdout
