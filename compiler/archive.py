"""Artifacts out of a store and into one: folders and tar files that are themselves stores.

An export holds ``artifacts/<key>/…`` and nothing else, so it can be searched where it lies.
"""

from __future__ import annotations

import io
import os
import re
import stat
import tarfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath

from ..config import UserError
from . import disk
from .artifact import DIGEST, Packed, Refusal

ARTIFACTS = "artifacts"
_MAX_FILE_BYTES = 2**31
_MEMBER = re.compile(rf"(?:\./)?{ARTIFACTS}/({DIGEST.pattern})/([^/].*)")
_REMEDY = "make the archive with `fusewright cache export`"


def export(packed: Packed, destination: Path) -> Path:
    """Write an artifact into a folder, made when missing, or to a file that ends in ``.tar``.

    A folder may hold other artifacts.  A tar file is the same bytes whenever it is made.

    Raises:
        UserError: the destination is taken or cannot be written.
    """
    try:
        if destination.suffix == ".tar":
            partial = destination.with_name(f".{destination.name}.{os.getpid()}")
            disk.replace_file(destination, _tar(packed), partial)
            return destination
        return _export_folder(packed, destination)
    except OSError as error:
        where = os.fsdecode(error.filename or destination)
        raise UserError(
            f"{where}: cannot be written: {error.strerror}; give another destination"
        ) from error


def _export_folder(packed: Packed, root: Path) -> Path:
    root.parent.mkdir(parents=True, exist_ok=True)
    disk.make_folder(root)
    disk.make_folder(root / ARTIFACTS)
    path = root / ARTIFACTS / packed.manifest.key
    if os.path.lexists(path):
        raise UserError(f"{path}: exists; delete it or give another destination")
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    disk.remove_tree(partial)
    try:
        write_folder(packed.contents, partial)
        partial.rename(path)
        disk.sync_folder(path.parent)
    finally:
        disk.remove_tree(partial)
    return root


def write_folder(
    contents: Mapping[str, bytes],
    folder: Path,
    write: Callable[[Path, bytes], None] = disk.write_file,
) -> None:
    """A new folder with these files, on the disk when this returns; raises OSError."""
    disk.make_folder(folder)
    parents = folders_of(contents)
    for parent in parents:
        disk.make_folder(folder / parent)
    for name, data in contents.items():
        write(folder / name, data)
    for parent in (*parents, "."):
        disk.sync_folder(folder / parent)


def folders_of(names: Iterable[str]) -> list[str]:
    """The folders that files of these names lie in, outer ones first."""
    return sorted({str(p) for name in names for p in PurePosixPath(name).parents} - {"."})


def _tar(packed: Packed) -> bytes:
    prefix = f"{ARTIFACTS}/{packed.manifest.key}"
    contents = {f"{prefix}/{name}": data for name, data in packed.contents.items()}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in sorted({*folders_of(contents), *contents}):
            info = tarfile.TarInfo(name)  # mtime, uid and gid 0
            data = contents.get(name)
            info.mode = 0o755 if data is None else 0o644
            info.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
            info.size = len(data or b"")
            tar.addfile(info, io.BytesIO(data or b""))
    return buffer.getvalue()


def read(source: Path) -> list[Packed]:
    """Every artifact of an exported folder or tar file, each byte checked.

    Raises:
        Refusal: an artifact is not what its manifest says, or the archive holds anything else.
        UserError: there is no such archive.
    """
    try:
        found = _read_folder(source) if source.is_dir() else _read_tar(source)
    except OSError as error:
        where = Path(os.fsdecode(error.filename or source))
        raise UserError(
            f"{where}: cannot be read: {error.strerror}; give an exported folder or .tar"
        ) from error
    if not found:
        raise Refusal(source, "holds no artifact", _REMEDY)
    return [
        Packed.checked(source / ARTIFACTS / digest, contents) for digest, contents in found.items()
    ]


def _read_folder(source: Path) -> dict[str, dict[str, bytes]]:
    found: dict[str, dict[str, bytes]] = {}
    for folder in sorted((source / ARTIFACTS).iterdir()):
        if DIGEST.fullmatch(folder.name):
            contents = found.setdefault(folder.name, {})
            for name, info in disk.walk(folder):
                if not stat.S_ISDIR(info.st_mode):
                    contents[name] = disk.read_file(folder / name, _MAX_FILE_BYTES)
    return found


def _read_tar(source: Path) -> dict[str, dict[str, bytes]]:
    found: dict[str, dict[str, bytes]] = {}
    try:
        with tarfile.open(source, mode="r:") as tar:
            for member in tar:
                _add_member(found, tar, member, source)
    except tarfile.TarError as error:
        raise Refusal(source, f"is no sound tar file: {error}", _REMEDY) from error
    return found


def _add_member(
    found: dict[str, dict[str, bytes]], tar: tarfile.TarFile, member: tarfile.TarInfo, source: Path
) -> None:
    where = source / member.name
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        raise Refusal(where, "is outside of the archive", _REMEDY)
    if member.isdir():
        return
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
        raise Refusal(where, "is a link or device, expected a file", _REMEDY)
    if (match := _MEMBER.fullmatch(member.name)) is None:
        raise Refusal(where, f"expected {ARTIFACTS}/<key>/<file>", _REMEDY)
    contents = found.setdefault(match[1], {})
    if match[2] in contents:
        raise Refusal(where, "is there twice", _REMEDY)
    file = tar.extractfile(member)
    assert file is not None, "regular files have content"
    contents[match[2]] = file.read()
    if len(contents[match[2]]) != member.size:
        raise Refusal(where, "is cut short", _REMEDY)
