"""``fusewright explain``: what the stack would do, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from ..config import LEVELS, UserError
from .table import table


def explain(
    levels: Annotated[bool, typer.Option("--levels", help="Print the -O table.")] = False,
) -> None:
    """Explain what the optimization levels turn on."""
    if not levels:
        raise UserError("explain: nothing to explain; use `fusewright explain --levels`")
    typer.echo(levels_table())


def levels_table() -> str:
    """The ``-O`` table, a line a level."""
    rows = [["level", "trace", "passes", "hand kernels", "tuned", "CUDA graphs", "summary"]]
    for number, level in LEVELS.items():
        rows.append(
            [
                f"-O{number}",
                "yes" if level.trace else "no",
                ",".join(level.passes) or "-",
                "yes" if level.hand_kernels else "no",
                "yes" if level.tune else "no",
                level.cudagraph_mode.value,
                level.summary,
            ]
        )
    return table(rows)
