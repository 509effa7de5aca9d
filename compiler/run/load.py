"""Turns an artifact back into a program: reads files, checks them, loads kernels; compiles nothing.

Imports neither Dynamo nor Inductor nor Triton.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from ... import ops
from ...config import UserError
from ...config.device_table import DeviceTable, parse_table
from ..artifacts.artifact import Artifact, Refusal, parse_json
from .plan import PieceStep, Plan
from .program import Program, link
from .runtime import load_piece

PLAN = "plan.json"
KERNELS = "kernels.json"
TABLE = "device_table.json"
"""This file has what ``-O3`` measured; it is missing if no shape of the model gained."""


def piece_file(piece: str) -> str:
    """The file of a piece's generated code; its compiled kernels lie beside it."""
    return f"pieces/{piece}/code.py"


def kernel_file(variant: ops.Variant) -> str:
    """The file of one Triton kernel variant's compiled code."""
    return f"kernels/{variant.name}.cubin"


def kernels_json(binaries: Mapping[ops.Variant, ops.Binary]) -> list[dict[str, Any]]:
    """The facts of each kernel that ``load`` needs besides its machine code."""
    names = [f.name for f in fields(ops.Binary) if f.name != "cubin"]
    return [
        {"variant": variant.to_json(), "binary": {name: getattr(binary, name) for name in names}}
        for variant, binary in binaries.items()
    ]


def load(artifact: Artifact) -> tuple[Plan, Program]:
    """Load the plan and the program of an artifact, and add its Triton kernels to ``ops.KERNELS``.

    Raises:
        Refusal: a file is missing, not what the manifest says, or not what ``build()`` writes.
    """
    with _refusing(artifact, PLAN):
        plan = Plan.from_json(parse_json(artifact.read(PLAN)))
    kernels = _kernels(artifact)
    table = measured_table(artifact)
    if any(spec.device == "cuda" for spec in plan.inputs.values()):
        ops.load_cuda_library()
    steps = (*plan.constants, *plan.steps)
    pieces = {step.piece for step in steps if isinstance(step, PieceStep)}
    callables = {
        piece: load_piece(
            artifact.read(piece_file(piece)),
            artifact.path / piece_file(piece),
            partial(_read_beside, artifact, piece),
        )
        for piece in pieces
    }
    with _refusing(artifact, PLAN):
        program = link(plan, callables)
    for variant, binary in kernels:
        ops.KERNELS.add(variant, binary)
    if table:
        ops.take_table(table)
    return plan, program


def load_kernels(artifact: Artifact) -> None:
    """Add the Triton kernels of an artifact without a program to ``ops.KERNELS``.

    Raises:
        Refusal: as of ``load``.
    """
    for variant, binary in _kernels(artifact):
        ops.KERNELS.add(variant, binary)


def measured_table(artifact: Artifact) -> DeviceTable | None:
    """The table of what ``-O3`` measured, or None if it wrote nothing.

    Raises:
        Refusal: as of ``load``.
    """
    if TABLE not in artifact.manifest.files:
        return None
    data = artifact.read(TABLE)
    try:
        return parse_table(data, f"artifact {artifact.manifest.key}")
    except UserError as error:
        raise Refusal(artifact.path / TABLE, str(error)) from error


@contextmanager
def _refusing(artifact: Artifact, name: str) -> Iterator[None]:
    """Turn errors in reading a file that ``build()`` did not write into a Refusal."""
    try:
        yield
    except UserError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"is not what fusewright writes: {type(error).__name__}: {error}"
        raise Refusal(artifact.path / name, reason) from error


def _kernels(artifact: Artifact) -> list[tuple[ops.Variant, ops.Binary]]:
    with _refusing(artifact, KERNELS):
        entries = parse_json(artifact.read(KERNELS))
        variants = [ops.Variant.from_json(entry["variant"]) for entry in entries]
        return [
            (variant, ops.Binary(**entry["binary"], cubin=artifact.read(kernel_file(variant))))
            for variant, entry in zip(variants, entries, strict=True)
        ]


def _read_beside(artifact: Artifact, piece: str, name: str) -> bytes:
    return artifact.read(str(PurePosixPath(piece_file(piece)).with_name(name)))
