"""What `pip install .` leaves: a pure wheel that keeps the reason, or a compiler's message."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def pip_wheel(
    folder: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """pip as a user calls it, without the index."""
    command = [sys.executable, "-P", "-m", "pip", "wheel", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "-w", str(folder), *arguments, str(ROOT)]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PATH": path} | environment,
    )


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = pip_wheel(folder, "-C", "kernels=off")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.iterdir()
    return wheel


def test_a_wheel_without_kernels_is_tagged_pure(pure_wheel: Path) -> None:
    assert pure_wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(pure_wheel) as wheel:
        (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/WHEEL"))
        assert b"Root-Is-Purelib: true\nTag: py3-none-any\n" in wheel.read(name)


def test_an_installation_without_kernels_says_why(pure_wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(pure_wheel) as wheel:
        wheel.extractall(tmp_path)
    code = """
import sys
# The finder of an editable install, as .venv has one, comes before PYTHONPATH.
sys.meta_path = [f for f in sys.meta_path if "editable" not in type(f).__module__]
from fusewright.serve.cli import main
assert main(["env", "--json"]) == 0
from fusewright.config import Hardware
from fusewright.engine.worker.missing_kernels import say_where_csrc_is_missing
say_where_csrc_is_missing(Hardware("cuda", "an H100", sm=90))
say_where_csrc_is_missing(Hardware("cuda", "an A100", sm=80))
say_where_csrc_is_missing(Hardware("cpu", "a CPU"))
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert str(tmp_path) in facts["fusewright"]
    assert facts["kernels of csrc"] == "not built: installed with kernels=off"
    assert done.stderr.splitlines() == [
        "an H100 runs without the CUDA kernels of csrc, which is slower: installed with kernels=off"
    ]


def test_a_broken_nvcc_fails_the_install_with_its_message(tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'nvcc fatal: no license 4711' >&2\nexit 1\n")
    nvcc.chmod(0o755)
    done = pip_wheel(tmp_path / "wheels", CUDACXX=str(nvcc))
    assert done.returncode != 0
    assert "nvcc fatal: no license 4711" in done.stdout + done.stderr
    assert not [*(tmp_path / "wheels").glob("*.whl")]


def test_an_unknown_choice_of_kernels_is_refused(tmp_path: Path) -> None:
    done = pip_wheel(tmp_path, "-C", "kernels=yes")
    assert done.returncode != 0
    assert "kernels='yes': expected one of auto, on, off" in done.stdout + done.stderr
