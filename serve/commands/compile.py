"""``fusewright compile``: compile ahead of time, into a store that later starts load from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..console.flags import Json, TargetSm, model_flags
from ..console.options import checked
from ..console.report import checks_line, startup_table

if TYPE_CHECKING:
    from ...engine.aot_compile import AotResult


@model_flags
def compile(
    engine: dict[str, Any],
    target_sm: TargetSm = None,
    dump: Annotated[
        Path | None,
        typer.Option("--dump", help="Write graphs, pieces and code of each phase to this folder."),
    ] = None,
    json_output: Json = False,
) -> None:
    """Compile a model ahead of time, verify every rewrite, and keep the artifact.

    Each stage of a pipeline has an artifact, and a line of its own with --json; so has what drafts.
    """
    options = dict(engine)
    if options.get("optimization_level") != 0 and not options.get("enforce_eager"):
        options.setdefault("verify", True)
    asked = checked(options)
    from ...engine.aot_compile import aot_compile

    for result in aot_compile(asked, target_sm=target_sm, dump=dump):
        _say(result, json_output)


def _say(result: AotResult, json_output: bool) -> None:
    artifact = result.compiled.artifact
    assert artifact is not None
    if json_output:
        record = {
            "key": artifact.manifest.key,
            "path": str(artifact.path),
            "label": result.label,
            "built": result.compiled.built,
            "startup": result.startup.to_json(),
            "compile": result.compiled.seconds,
            "left": list(result.left),
            "report": dict(artifact.manifest.report),
        }
        typer.echo(json.dumps(record))
        return
    verb = "compiled" if result.compiled.built else "found"
    typer.echo(f"{verb} {result.label}\n{artifact.path}")
    typer.echo(startup_table(result.startup.to_json(), result.compiled.seconds))
    typer.echo(checks_line(artifact.manifest.report["passes"], artifact.manifest.key))
    for item in result.left:
        typer.echo(f"left to the first start: {item}")
    if result.dump is not None:
        typer.echo(f"read {result.dump / 'index.md'}")
