"""Plain tables, as wide as the terminal; as wide as they are in a pipe."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

_GAP = 2
_NARROWEST = 12
"""Columns are not made narrower: a table for less room overflows."""


def line_width(stream: TextIO | None = None) -> int | None:
    """Columns of the terminal behind ``stream`` (standard output if None); None in a pipe, where
    nothing is wrapped unless COLUMNS is set."""
    stream = stream or sys.stdout
    if stream.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return shutil.get_terminal_size().columns
    return None


def table(
    rows: Sequence[Sequence[str]], *, heading: bool = True, stream: TextIO | None = None
) -> str:
    """Rows of equal length as aligned lines; long cells are wrapped where ``stream`` is narrow.

    Args:
        rows: the first one is the heading.
        heading: whether there is one, which is underlined.
        stream: where the table will be written; standard output if None.
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    _shrink(widths, line_width(stream))
    lines: list[str] = []
    for number, row in enumerate(rows):
        cells = [wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
        for index in range(max(map(len, cells))):
            parts = [
                (cell[index] if index < len(cell) else "").ljust(width)
                for cell, width in zip(cells, widths, strict=True)
            ]
            lines.append((" " * _GAP).join(parts).rstrip())
        if heading and number == 0:
            lines.append((" " * _GAP).join("-" * width for width in widths))
    return "\n".join(lines)


def wrap(text: str, width: int | None, indent: str = "") -> list[str]:
    """``text`` in lines of at most ``width``, broken after spaces, commas and semicolons,
    else within a word; all but the first line are indented."""
    if width is None or len(text) <= width:
        return [text]
    lines, line = [], ""
    for piece in re.findall(r"[^ ,;]*[ ,;]+|[^ ,;]+", text):
        rest = piece
        if len(line) + len(rest.rstrip()) > width and line.strip():
            lines.append(line.rstrip())
            line = indent
        while len(line) + len(rest.rstrip()) > width:
            room = width - len(line)
            cut = max(rest.rfind(sign, 0, room) for sign in "_/=:|") + 1 or room
            lines.append(line + rest[:cut])
            line, rest = indent, rest[cut:]
        line += rest
    return [*lines, line.rstrip()] if line.strip() else lines


def _shrink(widths: list[int], room: int | None) -> None:
    """Take from the widest columns until the table fits, or none is left that may lose more."""
    if room is None:
        return
    excess = sum(widths) + _GAP * (len(widths) - 1) - room
    while excess > 0 and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
        excess -= 1
