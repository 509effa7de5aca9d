"""What every result file says of where it was measured."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """GPU, versions, commit and command of this process."""
    import triton

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.machine()
    return {
        "device": gpu,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "command": _command(),
    }


def _command() -> str:
    """The command line, without the folders of this machine."""
    program, *args = sys.argv
    spec = sys.modules["__main__"].__spec__
    command = [Path(program).name] if spec is None else ["python", "-m", spec.name]
    names = [Path(arg).name if Path(arg).is_absolute() else arg for arg in args]
    return shlex.join([*command, *names])


def commit() -> str:
    """The checkout's commit, or "unknown" where there is no git."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"
