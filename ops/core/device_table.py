"""The device tables as ops ask them: an artifact's own first, then those that are shipped.

Every answer is remembered, found or not: ``report()`` shows which shapes had an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import Any

import torch

from ...config.device_table import DeviceTable, Weight, nearest, shipped
from . import cublaslt as _cublaslt

_on_take: list[Callable[[], None]] = []
_from_artifacts: list[DeviceTable] = []
_found: dict[str, list[int]] = {}
_missed: dict[str, list[int]] = {}
"""GEMM or kernel -> the fewest and most rows, or columns, that were asked for."""


def take(table: DeviceTable) -> None:
    """Ask an artifact's table before all others."""
    if table not in _from_artifacts:
        _from_artifacts.insert(0, table)
        serving.cache_clear()
        for forget in _on_take:
            forget()


def on_take(forget: Callable[[], None]) -> None:
    """Have ``forget`` called whenever a table is taken."""
    _on_take.append(forget)


def gpu_of(device: torch.device) -> tuple[str, int]:
    """Name and compute capability of a GPU; of the one in use for the device of fake tensors, and
    no name and 0 without one."""
    if not torch.cuda.is_available():
        return "", 0
    index = device if device.type == "cuda" else None
    major, minor = torch.cuda.get_device_capability(index)
    return torch.cuda.get_device_name(index), 10 * major + minor


@cache
def serving(device: torch.device) -> tuple[DeviceTable, ...]:
    """The tables whose algorithms a device with the installed cuBLASLt may use, in order.

    The first call starts the library, so it must not come during a capture.
    """
    if device.type != "cuda":
        return ()
    gpu, version = gpu_of(device)[0], _cublaslt.version()
    tables = (*_from_artifacts, *shipped().tables)
    found = tuple(t for t in tables if not t.why_no_algorithms(gpu, version))
    if found:
        _cublaslt.handle(index_of(device))
    return found


def index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def algorithm(
    operands: str, device: torch.device, rows: int, out_features: int, in_features: int
) -> tuple[DeviceTable, bytes] | None:
    """The measured algorithm for a call, with the table that names it; None if none does."""
    for table in serving(device):
        if found := table.find(operands, rows, out_features, in_features):
            break
    else:
        found = None
    if device.type == "cuda":
        _note(bool(found), f"algorithms: {operands} {[out_features, in_features]}, rows", rows)
    return (table, found) if found else None


def _note(hit: bool, what: str, size: int) -> None:
    answers = _found if hit else _missed
    least, most = answers.get(what, (size, size))
    answers[what] = [min(least, size), max(most, size)]


@cache
def portable() -> DeviceTable | None:
    """The nearest table to the GPU here; without a GPU, that of the target that is shipped."""
    return nearest(*gpu_of(torch.device("meta")), shipped().tables)


@lru_cache(4096)
def most_rows(kernel: str, out_features: int) -> int:
    """The most rows for which a kernel is faster than the next; 0 if no table knows this GPU."""
    table = portable()
    ranges = table.rows.get(kernel, ()) if table else ()
    found = next((most for fewest, most in ranges if out_features >= fewest), 0)
    _note(bool(ranges), f"rows: {kernel}, columns", out_features)
    return found


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; for fake and CPU tensors, of the GPU that the nearest table
    describes."""
    if device.type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    table = portable()
    return table.num_sms if table else 1


def ignored(gpu: str, cublaslt: int) -> dict[str, str]:
    """File -> why its algorithms do not serve a GPU with a version of cuBLASLt."""
    reasons = dict(shipped().ignored)
    for table in (*_from_artifacts, *shipped().tables):
        if reason := table.why_no_algorithms(gpu, cublaslt):
            reasons[table.file] = reason
    return reasons


def report(device: torch.device) -> dict[str, Any]:
    """The tables that serve, those that do not with the reason, and what was asked of them: the
    fewest and most rows, or columns, of what was found and of what was not."""
    near = portable()
    said: dict[str, Any] = {"portable": near.file if near else None, "serving": []}
    if device.type == "cuda":
        said["serving"] = [table.file for table in serving(device)]
        said["ignored"] = ignored(gpu_of(device)[0], _cublaslt.version())
    else:
        said["ignored"] = dict(shipped().ignored)
    return said | {"found": dict(_found), "missed": dict(_missed)}


def notes(weights: Iterable[Weight], gpu: str, cublaslt: int) -> list[str]:
    """Lines on which tables a GPU may use, and which weights have algorithms in them."""
    lines = [
        f"device table ignored for algorithms: {why}" for why in ignored(gpu, cublaslt).values()
    ]
    tables = [
        t for t in (*_from_artifacts, *shipped().tables) if not t.why_no_algorithms(gpu, cublaslt)
    ]
    for weight in weights:
        operands, *shape = weight
        found = [(a, t.file) for t in tables for a in t.algorithms if a.weight == weight]
        if found:
            ranges = sorted({(a.least_rows, a.most_rows) for a, _ in found})
            files = ", ".join(dict.fromkeys(file for _, file in found))
            text = f"{len(ranges)} ranges of {ranges[0][0]} to {ranges[-1][1]} rows in {files}"
        else:
            text = "in no table: torch's own call serves it"
        lines.append(f"library algorithms for {operands} {shape}: {text}")
    return lines
