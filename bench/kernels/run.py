"""Runs the benchmark files beside this one under pytest and returns their figures."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ...config import UserError
from ..environment import environment
from .figures import Figure, from_pytest_benchmark

_NONE_SELECTED = 5
"""What pytest ends with."""


def run_benchmarks(select: str | None) -> tuple[dict[str, Any], list[Figure]]:
    """Measure in a process of its own.

    Args:
        select: as for ``pytest -k``; None: everything.

    Returns:
        (environment, figures).

    Raises:
        UserError: there is no GPU, nothing matches, or a benchmark failed; pytest has printed why.
    """
    if not torch.cuda.is_available():
        raise UserError("bench kernels: torch sees no CUDA GPU; run on a machine with one")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        files = sorted(str(path) for path in Path(__file__).parent.glob("bench_*.py"))
        command = [sys.executable, "-m", "pytest", "-q", "--benchmark-only", "--benchmark-quiet"]
        command += [f"--benchmark-json={report}", "-p", "no:cacheprovider", *files]
        command += ["-k", select] if select else []
        code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
        if code == _NONE_SELECTED:
            raise UserError(f"k={select}: no benchmark has such a name, as op-sizes-contender")
        if code or not report.is_file():
            raise UserError(f"bench kernels: pytest ended with exit code {code}, see above")
        return environment(), from_pytest_benchmark(json.loads(report.read_text()))
