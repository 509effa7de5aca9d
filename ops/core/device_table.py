"""The device tables as ops ask them: an artifact's own first, then those of the user's folder, then
those that are shipped.

Kernels are compiled for the tiles in a table, so a process has one set, which cannot change under a
program that runs.  Every answer is remembered, found or not: ``report()`` shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import Any

import torch

from ...config import UserError
from ...config.device_table import DeviceTable, Weight, find_experts, nearest, shipped
from ...config.expert_tables import ExpertShape, ExpertTable
from . import cublaslt as _cublaslt

_on_change: list[Callable[[], None]] = []
_of_folder: list[tuple[DeviceTable, ...]] = []
_from_artifacts: list[DeviceTable] = []
_found: dict[str, list[int]] = {}
_missed: dict[str, list[int]] = {}
"""GEMM, kernel or experts -> the fewest and most rows, columns or tokens that were asked for."""


def take_all(tables: tuple[DeviceTable, ...], *, measures: bool = False) -> None:
    """Use the tables of a configuration from now on; ``measures``: as ``-O3`` does.

    Raises:
        UserError: the process uses others already.
    """
    if not measures and any(table.experts for table in _from_artifacts):
        raise UserError(
            "optimization_level: this process uses tiles for experts that -O3 measured; start "
            "another process for another level"
        )
    if _of_folder and _of_folder[0] != tables:
        raise UserError(
            "tuned_config_dir: this process uses other device tables already; start another "
            "process, or give every engine of this one the same folder"
        )
    if not _of_folder:
        _of_folder.append(tables)
        _forget_answers()


def take(table: DeviceTable) -> None:
    """Use a table that was measured for a program, before all others; raises UserError if programs
    of this process use other tiles for its experts."""
    for experts in table.experts:
        there = expert_table(experts.shape)
        name = _name_of(experts.shape)
        if there != experts and (there is not None or f"tiles: {name}, tokens" in _missed):
            raise UserError(
                f"-O3: this process uses other tiles for {name} already; start another process"
            )
    if table not in _from_artifacts:
        _from_artifacts.insert(0, table)
        _forget_answers()


def on_change(forget: Callable[[], None]) -> None:
    """Have ``forget`` called whenever a table is taken."""
    _on_change.append(forget)


def forget() -> None:
    """Drop all tables that were taken, so that another set can be.  No program may be left that
    uses them."""
    for taken in (_of_folder, _from_artifacts, _found, _missed):
        taken.clear()
    _forget_answers()


def _forget_answers() -> None:
    for answers in (serving, portable, most_rows, num_sms, expert_table):
        answers.cache_clear()
    for forget in _on_change:
        forget()


def _tables() -> tuple[DeviceTable, ...]:
    return (*_from_artifacts, *(_of_folder[0] if _of_folder else ()), *shipped())


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
    found = _with_algorithms(gpu_of(device)[0], _cublaslt.installed())
    if found:
        _cublaslt.handle(index_of(device))
    return found


def _with_algorithms(gpu: str, cublaslt: str) -> tuple[DeviceTable, ...]:
    return tuple(
        t for t in _tables() if t.algorithms and not t.why_not("algorithms", gpu, cublaslt)
    )


def index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def algorithm(
    operands: str, device: torch.device, rows: int, out_features: int, in_features: int
) -> tuple[DeviceTable, bytes] | None:
    """The measured algorithm for a call, with the table that names it; None if none does."""
    tables = ((t, t.find(operands, rows, out_features, in_features)) for t in serving(device))
    found = next(((table, held) for table, held in tables if held), None)
    if device.type == "cuda":
        _note(bool(found), f"algorithms: {operands} {[out_features, in_features]}, rows", rows)
    return found


def _note(hit: bool, what: str, size: int) -> None:
    answers = _found if hit else _missed
    least, most = answers.get(what, (size, size))
    answers[what] = [min(least, size), max(most, size)]


@cache
def portable() -> DeviceTable | None:
    """The nearest table to the GPU here; without a GPU, that of the target that is shipped."""
    return nearest(*gpu_of(torch.device("meta")), _tables())


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


@lru_cache(256)
def expert_table(shape: ExpertShape) -> ExpertTable | None:
    """The tuned tiles of experts of a shape.  A configuration has what is shipped of them."""
    return find_experts((*_from_artifacts, *(_of_folder[0] if _of_folder else ())), shape)


def expert_tiles(shape: ExpertShape, num_tokens: int) -> ExpertTable | None:
    """``expert_table``, with a note that a call of so many tokens asked for it."""
    found = expert_table(shape)
    _note(found is not None, f"tiles: {_name_of(shape)}, tokens", num_tokens)
    return found


def _name_of(shape: ExpertShape) -> str:
    experts, intermediate, kind = shape
    return f"{experts} experts of {intermediate}, {kind}"


def ignored(gpu: str, cublaslt: str) -> dict[str, str]:
    """File -> why its algorithms do not serve a GPU with a version of cuBLASLt."""
    reasons = {table.file: table.why_not("algorithms", gpu, cublaslt) for table in _tables()}
    return {file: reason for file, reason in reasons.items() if reason}


def left_out() -> list[str]:
    """A sentence for each table with rows of kernels that this build lacks."""
    return [sentence for table in _tables() if (sentence := table.left_out)]


def report(device: torch.device) -> dict[str, Any]:
    """The tables that serve, those that do not with the reason, rows that were left out, and what
    was asked of them: the fewest and most rows, columns or tokens of what was found and of what was
    not."""
    near = portable()
    said: dict[str, Any] = {"portable": near.file if near else None, "serving": [], "ignored": {}}
    said["left_out"] = left_out()
    if device.type == "cuda":
        said["serving"] = [table.file for table in serving(device)]
        said["ignored"] = ignored(gpu_of(device)[0], _cublaslt.installed())
    return said | {"found": dict(_found), "missed": dict(_missed)}


def notes(weights: Iterable[Weight], gpu: str, cublaslt: str) -> list[str]:
    """Lines on which tables a GPU may use, what of them is left out, and which weights have
    algorithms in them."""
    found: dict[str, list[str]] = {}
    lines = [f"device table: {sentence}" for sentence in left_out()]
    lines += [
        f"device table ignored for algorithms: {why}" for why in ignored(gpu, cublaslt).values()
    ]
    tables = _with_algorithms(gpu, cublaslt)
    for weight in weights:
        operands, *shape = weight
        known = [(a, t.file) for t in tables for a in t.algorithms if a.weight == weight]
        ranges = sorted({(a.least_rows, a.most_rows) for a, _ in known})
        text = "in no table, so torch's own call serves"
        if ranges:
            files = ", ".join(dict.fromkeys(file for _, file in known))
            text = f"{len(ranges)} ranges of {ranges[0][0]} to {ranges[-1][1]} rows in {files}"
        found.setdefault(text, []).append(f"{operands} {shape}")
    lines += [f"library algorithms for {', '.join(w)}: {text}" for text, w in found.items()]
    return lines
