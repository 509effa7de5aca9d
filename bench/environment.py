"""Says in a result file where, when and over which sources it was measured, and tells later whether
those sources have changed.
"""

from __future__ import annotations

import datetime
import hashlib
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ("config", "csrc", "ops")
ENGINE = (*KERNELS, "passes", "compiler", "graph_capture", "model_executor", "engine")
"""Folders of the package that decide how fast a kernel is, and how fast the whole engine is."""
_SUFFIXES = {".py", ".cu", ".cuh", ".cpp", ".h", ".json"}


def environment() -> dict[str, Any]:
    """GPU, versions, commit, command and time of this process, and a digest of each folder."""
    import torch
    import triton

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.machine()
    return {
        "device": gpu,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "sources": source_digests(ENGINE),
    }


def source_digests(folders: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    return {folder: _digest(root, folder) for folder in folders}


def _digest(root: Path, folder: str) -> str:
    digest = hashlib.sha256()
    for path in sorted((root / folder).rglob("*")):
        if path.suffix in _SUFFIXES:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def changed_since(
    measured: Mapping[str, Any], folders: Iterable[str], root: Path = ROOT
) -> list[str] | None:
    """The folders whose sources differ from those that a result was measured over.

    Args:
        measured: the ``environment`` of the result. One without digests is compared by its commit.
        folders: those that the result depends on.

    Returns:
        The changed folders, or None where the result has no digests and git does not know its
        commit.
    """
    if digests := measured.get("sources"):
        present = source_digests(folders, root)
        return [name for name in present if digests.get(name) != present[name]]
    base = str(measured.get("commit", "unknown")).split()[0]
    known = re.fullmatch(r"[0-9a-f]{7,40}", base)
    names = _git("diff", "--name-only", base, "--", *folders, root=root) if known else None
    if names is None:
        return None
    changed = {Path(name).parts[0] for name in names.split() if Path(name).suffix in _SUFFIXES}
    return [folder for folder in folders if folder in changed]


def _command() -> str:
    """The command line, without the folders of this machine."""
    program, *args = sys.argv
    spec = sys.modules["__main__"].__spec__
    command = [Path(program).name] if spec is None else ["python", "-m", spec.name]
    names = [Path(arg).name if Path(arg).is_absolute() else arg for arg in args]
    return shlex.join([*command, *names])


def commit() -> str:
    return (_git("rev-parse", "--short", "HEAD") or "").strip() or "unknown"


def _git(*arguments: str, root: Path = ROOT) -> str | None:
    """Run git in ``root``; returns what it prints, or None where it fails or is missing."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return None if done.returncode else done.stdout
