"""Finds the description of a captured model, from which a start knows its spec without its library.

A cold start writes the description into the artifact.  A folder's ``config.json``, the headers of
its checkpoint and our own sources name it, so that another start looks for exactly that name among
the artifacts.  ``skeleton`` has the other half, which is read together with the weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec

from ...config.errors import UserError
from ..checkpoint import UNNEEDED, RawTensor, checkpoint_files, read_raw_header
from ..checkpoint_facts import equal_bits
from ..spec import ModelSpec

_PACKAGE = Path(__file__).resolve().parents[1]
SPEC, MODEL, BUFFERS = "spec.json", "model.json", "buffers.safetensors"
"""The files of a description: ``DescribedSpec``, ``skeleton.DescribedModel``, values of buffers."""


class Files(Protocol):
    """An artifact, of which ``read`` gives the content of a file."""

    def read(self, name: str) -> bytes: ...


Lookup: TypeAlias = Callable[[str], Iterable[Files]]
"""Gives the artifacts that have a file of some name."""


def nowhere(name: str) -> Iterable[Files]:
    """A ``Lookup`` that finds nothing."""
    return ()


class Tied(msgspec.Struct, frozen=True, array_like=True):
    """Two tensors of a checkpoint whose parameters ``config.json`` ties, and whether they have the
    same bits, which decides whether the parameters are one."""

    one: str
    other: str
    equal: bool


class DescribedSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Holds what ``read_spec`` said of a folder, and what it read for that besides headers."""

    spec: ModelSpec
    tied: tuple[Tied, ...]


def described_spec(
    folder: Path, values: Mapping[str, Any], lookup: Lookup, ranks: int = 1
) -> ModelSpec | None:
    """The spec of a folder that some artifact describes; None if none does.

    Args:
        values: of ``config.json``.
        ranks: over which the model is spread.
    """
    if (headers := raw_headers(folder)) is None:
        return None
    for name, artifact in artifacts_of(values, headers, lookup, ranks):
        try:
            described = msgspec.json.decode(artifact.read(name + SPEC), type=DescribedSpec)
            if all(_holds(tied, headers) for tied in described.tied):
                return _of_library(described.spec)
        except (UserError, msgspec.MsgspecError, KeyError, _OtherLibrary):
            continue
    return None


def artifacts_of(
    values: Mapping[str, Any], headers: Mapping[str, RawTensor], lookup: Lookup, ranks: int
) -> Iterator[tuple[str, Files]]:
    """The artifacts that describe a model, each with the folder of the description in it."""
    name = described_folder(values, headers, ranks)
    for artifact in lookup(name + SPEC):
        yield name, artifact


def described_folder(
    values: Mapping[str, Any], headers: Mapping[str, RawTensor], ranks: int
) -> str:
    """The folder in an artifact that describes a model: it names all that the description depends
    on but the version of the library, which the description has in it.

    Args:
        values: of ``config.json``.
        headers: from ``raw_headers``; neither files nor places in them count.
        ranks: over which the model is spread.
    """
    rows = sorted((name, tensor.dtype, tensor.shape) for name, tensor in headers.items())
    facts = [_sources(), version("torch"), values, rows, ranks]
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return f"described/{hashlib.sha256(text.encode()).hexdigest()[:32]}/"


def raw_headers(folder: Path) -> dict[str, RawTensor] | None:
    """The tensors of a folder's checkpoint, read without torch; None if there is none that can be
    read."""
    try:
        return {
            name: tensor
            for file in checkpoint_files(folder)
            for name, tensor in read_raw_header(file).items()
            if not UNNEEDED.search(name)
        }
    except UserError:
        return None


class _OtherLibrary(Exception):
    """The model was captured from another version of the library than the one installed."""


def _of_library(spec: ModelSpec) -> ModelSpec:
    """The spec, if its model is the installed library's.  Where there is no library, its version
    is that of the artifact, and a note says so."""
    assert spec.captured is not None
    library = spec.captured.library
    try:
        installed = f"transformers {version('transformers')}"
    except PackageNotFoundError:
        note = f"transformers is not installed: the model is what {library} made of it"
        return replace(spec, notes=(*spec.notes, note))
    if installed != library:
        raise _OtherLibrary
    return spec


def _holds(tied: Tied, headers: Mapping[str, RawTensor]) -> bool:
    return equal_bits(headers[tied.one], headers[tied.other]) == tied.equal


@cache
def _sources() -> str:
    """Digest of the sources that read and build models."""
    digest = hashlib.sha256()
    for file in sorted(_PACKAGE.rglob("*.py")):
        digest.update(file.relative_to(_PACKAGE).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
