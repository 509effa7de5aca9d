"""Runs the benchmark files beside this one under pytest and returns their figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from ...config import UserError
from ..environment import environment
from .attention_rivals import absent
from .figures import Figure, load, save

_FAMILIES = ("rows", "linear", "joined", "experts", "attention", "rope_kv_store", "sampling")
_NONE_SELECTED = 5
"""Exit code of pytest when no test was selected."""


def run_benchmarks(select: str | None, path: Path) -> tuple[dict[str, Any], list[Figure]]:
    """Measure in a process of its own.

    Args:
        select: as for ``pytest -k``; None: everything.
        path: where figures are written, each as it is measured.

    Returns:
        (environment, figures).

    Raises:
        UserError: there is no GPU, nothing matches, or a benchmark failed; pytest has printed why.
    """
    if not torch.cuda.is_available():
        raise UserError("bench kernels: torch sees no CUDA GPU; run on a machine with one")
    if select is None or "attention" in select:
        for line in absent():
            print(line, file=sys.stderr)
    save(path, environment(), [])
    files = [str(Path(__file__).parent / f"bench_{name}.py") for name in _FAMILIES]
    command = [sys.executable, "-m", "pytest", "-q", "--benchmark-only", "--benchmark-quiet"]
    command += [f"--figures={path.absolute()}", "-p", "no:cacheprovider", *files]
    command += ["-k", select] if select else []
    code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    if code == _NONE_SELECTED:
        raise UserError(f"k={select}: no benchmark has such a name, as op-sizes-contender")
    if code:
        raise UserError(f"bench kernels: pytest ended with exit code {code}, see above")
    return load(path)
