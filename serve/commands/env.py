"""``fusewright env``: what a bug report needs; works without a GPU and without torch."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import typer

from ... import __version__
from ...config.process.memory import host_bytes
from ..console.flags import Json
from ..console.table import table

_FOLDER = Path(__file__).resolve().parents[2]
_ENVIRONMENT = (
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTHONPATH",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_LOGS",
    "TRITON_CACHE_DIR",
    "TRITON_INTERPRET",
)
_TIMEOUT_S = 20


def env(json_output: Json = False) -> None:
    """Print what a bug report needs."""
    facts = collect()
    if json_output:
        typer.echo(json.dumps(facts))
        return
    typer.echo(table([list(fact) for fact in facts.items()], heading=False))


def collect() -> dict[str, str]:
    """Name -> value, in the order of the report.  A missing part says so instead of failing."""
    facts = {
        "fusewright": f"{__version__} at {_FOLDER}",
        "git": _git(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "OS": f"{_os_name()}, kernel {platform.release()}, {platform.libc_ver()[1] or '?'} libc",
        "CPU": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} usable",
        "memory": _memory(),
        "driver": _driver(),
        "nvcc": _nvcc(),
    }
    facts.update(_torch())
    facts.update(_dependencies())
    ours = {name for name in os.environ if name.startswith("FUSEWRIGHT_")}
    set_names = [n for n in sorted({*ours, *_ENVIRONMENT}) if n in os.environ]
    facts["environment"] = (
        " ".join(f"{n}={os.environ[n]}" for n in set_names) or "nothing of ours set"
    )
    return facts


def _run(*command: str) -> str | None:
    """Standard output of a command, None when it is missing or fails."""
    path = shutil.which(command[0])
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, *command[1:]], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _git() -> str:
    # An installed package may lie inside the repository of another project.
    if not (_FOLDER / ".git").exists():
        return "not a checkout"
    commit = _run("git", "-C", str(_FOLDER), "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return "no commit"
    changed = _run("git", "-C", str(_FOLDER), "status", "--porcelain")
    return commit + (" with local changes" if changed else "")


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform()


def _cpu_name() -> str:
    try:
        model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        model = None
    return model[1] if model else platform.processor() or platform.machine()


def _memory() -> str:
    total = host_bytes()
    return "unknown" if total is None else f"{total / 2**30:.1f} GiB"


def _driver() -> str:
    out = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return out.splitlines()[0] if out else "no NVIDIA driver (nvidia-smi found none)"


def _nvcc() -> str:
    out = _run("nvcc", "--version")
    release = re.search(r"V(\d[\d.]+)", out) if out else None
    return release[1] if release else "not on PATH"


def _torch() -> dict[str, str]:
    """torch with the CUDA it was built for, and the GPUs that it sees."""
    try:
        import torch
    except Exception as error:  # a broken install is what a bug report must show
        reason = " ".join(str(error).split())
        return {"torch": f"cannot be imported: {type(error).__name__}: {reason}"}
    facts = {
        "torch": str(torch.__version__),
        "CUDA of torch": str(torch.version.cuda or "none (CPU build)"),
        "GPU": "none",
    }
    # A driver too old for torch warns at length and reports no device.
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    for index in devices:
        gpu = torch.cuda.get_device_properties(index)
        name = "GPU" if index == 0 else f"GPU {index}"
        facts[name] = f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
    return facts | {"kernels of csrc": _csrc()}


def _csrc() -> str:
    from ... import ops

    library = ops.find_cuda_library()
    return str(library) if library else f"not built: {ops.why_csrc_is_not_built()}"


def _dependencies() -> dict[str, str]:
    """Versions of everything but torch that pyproject.toml requires, extras included."""
    try:
        required = metadata.requires("fusewright") or []
    except metadata.PackageNotFoundError:
        return {"dependencies": "unknown: fusewright runs from a folder, it is not installed"}
    names = [re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0] for line in required]
    return {name: _version(name) for name in names if name != "torch"}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
