"""The tuned tiles that a process uses for the experts' GEMMs: those that ``take`` was given.

A process has one set: the tables of a folder, and those that ``-O3`` measured, which artifacts
hold.  Which tiles kernels were compiled for is in an artifact, so a set cannot change under a
program that runs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ...config import UserError
from ...config.expert_tables import ExpertTable, ExpertTile, find_table
from ..linear.desc import LinearDesc

_taken: list[tuple[ExpertTable, ...]] = []
_measured: list[ExpertTable] = []
_used: dict[tuple[int, int, str], list[int]] = {}
_missed: dict[tuple[int, int, str], list[int]] = {}
"""Shape -> the fewest and most tokens that were asked for."""


def take(tables: tuple[ExpertTable, ...], *, measures: bool = False) -> None:
    """Use these tables from now on, those of a folder.

    Args:
        measures: the program measures tiles for experts that have none.

    Raises:
        UserError: the process uses others already.
    """
    if _measured and not measures:
        raise UserError(
            "optimization_level: this process uses tiles for experts that -O3 measured; start "
            "another process for another level"
        )
    if _taken and _taken[0] != tables:
        raise UserError(
            "tuned_config_dir: this process uses other tuned tiles for experts already; start "
            "another process, or give every engine of this one the same folder"
        )
    if not _taken:
        _taken.append(tables)
        table_of.cache_clear()


def add_measured(table: ExpertTable) -> None:
    """Use a table that was measured for a program, too.

    Raises:
        UserError: programs of this process use other tiles for such experts.
    """
    there = table_of(table.shape)
    if there == table:
        return
    if there is not None or table.shape in _missed:
        experts, intermediate, kind = table.shape
        raise UserError(
            f"-O3: this process uses other tiles for {experts} experts of {intermediate}, {kind}, "
            "already; start another process"
        )
    _measured.append(table)
    table_of.cache_clear()


def forget() -> None:
    """Drop all tables, so that another set can be taken.  No program may be left that uses them."""
    _taken.clear()
    _measured.clear()
    _used.clear()
    _missed.clear()
    table_of.cache_clear()


def shape_of(desc: LinearDesc) -> tuple[int, int, str]:
    """The shape by which tables are found, of either layer of the experts."""
    inner = desc.out_features // 2 if desc.activation else desc.in_features
    kind = "fp8" if desc.format.scaled else "bfloat16"
    return desc.groups, inner, "fp8 block" if desc.weight_format == "fp8 block" else kind


def tile_of(desc: LinearDesc, num_tokens: int) -> ExpertTile | None:
    """The tuned tile of a layer for so many tokens; None: no table has its shape."""
    if desc.format.dtype.itemsize > 2:
        return None
    shape = shape_of(desc)
    found = table_of(shape)
    answers = _missed if found is None else _used
    least, most = answers.get(shape, (num_tokens, num_tokens))
    answers[shape] = [min(least, num_tokens), max(most, num_tokens)]
    return None if found is None else found.find(num_tokens)


@lru_cache(256)
def table_of(shape: tuple[int, int, str]) -> ExpertTable | None:
    """The table that serves experts of a shape, if there is one."""
    return find_table((*(_taken[0] if _taken else ()), *_measured), shape)


def report() -> dict[str, Any]:
    """Shapes whose tiles are tuned, and those whose are not, with the fewest and most tokens that
    were asked for."""

    def named(answers: dict[tuple[int, int, str], list[int]]) -> dict[str, list[int]]:
        return {f"E={e},N={n},{kind}": asked for (e, n, kind), asked in answers.items()}

    return {"tuned": named(_used), "default": named(_missed)}
