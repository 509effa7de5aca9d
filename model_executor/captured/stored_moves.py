"""Moves as text, for starts that do not plan them again: those need no ``transformers``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

from ..checkpoint import TensorInfo
from .moves import Axis, Move, in_file_order


def dump_moves(moves: Iterable[Move], found: Mapping[str, TensorInfo]) -> str:
    """Moves that were planned for the tensors of a checkpoint, from ``read_headers``."""
    rows = [
        (move.source.name, move.parameter, move.source_start, move.dest_start, move.axes)
        for move in moves
    ]
    return json.dumps({"headers": _digest(found), "moves": rows}, separators=(",", ":"))


def load_moves(text: str, found: Mapping[str, TensorInfo]) -> list[Move] | None:
    """The moves again, in file order; None where the checkpoint has other tensors than the one that
    they were planned for, or the text is damaged.  Files may have other names."""
    try:
        stored = json.loads(text)
        if stored["headers"] != _digest(found):
            return None
        moves = [
            Move(found[name], str(parameter), tuple(source), tuple(dest), _axes(axes))
            for name, parameter, source, dest, axes in stored["moves"]
        ]
    except (ValueError, KeyError, TypeError):
        return None
    return in_file_order(moves)


def _axes(rows: Iterable[Iterable[int]]) -> tuple[Axis, ...]:
    return tuple(Axis(*row) for row in rows)


def _digest(found: Mapping[str, TensorInfo]) -> str:
    """Return a digest of all names, shapes and types."""
    rows = sorted((info.name, info.shape, info.dtype) for info in found.values())
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
