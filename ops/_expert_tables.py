"""The tuned tiles that a process uses for the experts' GEMMs: those that ``take`` was given.

A process has one set.  Which tiles kernels were compiled for is in an artifact, so a set cannot
change under a program that runs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ..config import UserError
from ..config.expert_tables import ExpertTable, ExpertTile, find_table
from ._linear_desc import LinearDesc

_taken: list[tuple[ExpertTable, ...]] = []
_used: dict[tuple[int, int, str], list[int]] = {}
_missed: dict[tuple[int, int, str], list[int]] = {}
"""Shape -> the fewest and most tokens that were asked for."""


def take(tables: tuple[ExpertTable, ...]) -> None:
    """Use these tables from now on.

    Raises:
        UserError: the process uses others already.
    """
    if _taken and _taken[0] != tables:
        raise UserError(
            "tuned_config_dir: this process uses other tuned tiles for experts already; start "
            "another process, or give every engine of this one the same folder"
        )
    if not _taken:
        _taken.append(tables)
        _found.cache_clear()


def forget() -> None:
    """Use none, and let another set be taken: for a process that has no program any more."""
    _taken.clear()
    _used.clear()
    _missed.clear()
    _found.cache_clear()


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
    found = _found(shape)
    answers = _missed if found is None else _used
    least, most = answers.get(shape, (num_tokens, num_tokens))
    answers[shape] = [min(least, num_tokens), max(most, num_tokens)]
    return None if found is None else found.find(num_tokens)


@lru_cache(256)
def _found(shape: tuple[int, int, str]) -> ExpertTable | None:
    return find_table(_taken[0], shape) if _taken else None


def report() -> dict[str, Any]:
    """Shapes whose tiles are tuned, and those whose are not, with the fewest and most tokens that
    were asked for."""

    def named(answers: dict[tuple[int, int, str], list[int]]) -> dict[str, list[int]]:
        return {f"E={e},N={n},{kind}": asked for (e, n, kind), asked in answers.items()}

    return {"tuned": named(_used), "default": named(_missed)}
