"""Loads the compiled kernels of csrc/: one library, whose initializers register ``fw_cuda::*``.

The wheel or ``tools/build_csrc.sh`` puts ``_fw_cuda.so`` into this package; without it, or on a
torch without CUDA, the other implementations serve.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from ...config.arch import why_csrc_has_no_code
from .desc import OpDesc

LIBRARY_NAME = "_fw_cuda.so"
_ROOT = Path(__file__).resolve().parents[2]


def find_cuda_library() -> Path | None:
    """The library's path, or None.  An editable install has two folders: the newest build wins."""
    folders = sys.modules[__package__.rpartition(".")[0]].__path__
    built = [path for folder in folders if (path := Path(folder) / LIBRARY_NAME).is_file()]
    return max(built, key=lambda path: path.stat().st_mtime, default=None)


def why_csrc_is_not_built() -> str:
    """Say what kept csrc from being built when this package was installed, and what to do.

    pip shows nothing of what a build prints, so tools/build_backend.py leaves it in the metadata.
    """
    if (_ROOT / "tools" / "build_csrc.sh").is_file():
        return "this is a checkout; run tools/build_csrc.sh"
    try:
        recorded = metadata.distribution("fusewright").read_text("no_kernels.txt")
    except metadata.PackageNotFoundError:
        recorded = None
    return (recorded or f"{LIBRARY_NAME} is missing; install fusewright again").strip()


def why_no_csrc(desc: OpDesc, op: str = "") -> str:
    """Why csrc does not serve any call on a device, or an empty string: the device is not CUDA,
    csrc has no code for it, or is not built into this installation, or without ``op``."""
    if desc.device != "cuda":
        return f"on {desc.device}, not CUDA"
    return why_csrc_has_no_code(desc.sm) or why_not_built(desc.csrc, op)


def why_not_built(csrc: bool | None, op: str = "") -> str:
    """Why csrc, or ``op`` of it, is not there, or an empty string; ``csrc``: as of ``OpDesc``."""
    if not (load_cuda_library() if csrc is None else csrc):
        return "csrc is not built into this installation"
    if op and csrc is None and not hasattr(torch.ops.fw_cuda, op):
        return f"csrc was built without {op}: build it again"
    return ""


@cache
def load_cuda_library() -> bool:
    """Register ``fw_cuda::*``; False without a library or without CUDA in torch.

    Raises RuntimeError when the library is there but does not load.
    """
    path = find_cuda_library()
    if path is None or not torch.backends.cuda.is_built():
        return False
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise RuntimeError(
            f"the CUDA kernels {path} do not load under torch {torch.__version__} ({error}); "
            "rebuild them with tools/build_csrc.sh or delete the file"
        ) from error
    return True
