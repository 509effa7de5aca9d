"""``fusewright bisect``: which pass, at which site, moves a level's outputs away from ``-O0``.

Exit codes: 0 outputs are within tolerance; 1 they are not, and where is printed; 2 bad options.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ...config.numbers import check_number
from ..console.flags import Json, model_flags
from ..console.options import checked


@model_flags
def bisect(
    engine: dict[str, Any],
    tolerance: Annotated[
        float | None, typer.Option(help="Largest relative error of an output; by dtype if unset.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Find the pass and site at which outputs leave those of -O0; exit code 1 if there is one."""
    options = checked(engine, weights=True)
    if tolerance is not None:
        check_number(tolerance=tolerance)
    from ...engine.bisect import bisect_model

    culprit, limit = bisect_model(
        options, tolerance=tolerance, say=lambda line: typer.echo(line, err=True)
    )
    level = f"-O{options.optimization_level}"
    if json_output:
        culprit_json = asdict(culprit) if culprit else None
        typer.echo(json.dumps({"tolerance": limit, "seed": options.seed, "culprit": culprit_json}))
    elif culprit is None:
        typer.echo(f"{level} is within {limit:g} of -O0 (inputs from seed {options.seed})")
    else:
        d = culprit.difference
        where = " at ".join(filter(None, (culprit.name, culprit.site, culprit.module)))
        typer.echo(
            f"{culprit.stage} {where or level}: {d.output} is off by {d.error:.3g} (relative, "
            f"tolerance {limit:g}); at flat index {d.index}, {d.want} became {d.got}; inputs from "
            f"seed {options.seed}"
        )
    if culprit is not None:
        raise typer.Exit(1)
