"""Moves artifacts out of a store and into one, as folders and tar files that are themselves stores.

An export holds ``artifacts/<key>/…`` and nothing else, so it can be searched where it lies.
"""

from __future__ import annotations

import io
import os
import re
import stat
import tarfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeAlias

from ...config import UserError
from . import disk
from .artifact import DIGEST, MANIFEST, SIGNATURE, Refusal, check_names
from .packed import Entry, Packed

ARTIFACTS = "artifacts"
_MAX_ARCHIVE_BYTES = 2**31
_MAX_MEMBERS = 100_000
_MAX_LONG_NAME_BYTES = 4096
_MEMBER = re.compile(rf"(?:\./)?{ARTIFACTS}/({DIGEST.pattern})/([^/].*)", re.DOTALL)
_FOLDER = re.compile(rf"(?:\./?)?(?:{ARTIFACTS}(?:/{DIGEST.pattern}(?:/.+)?)?/?)?")
_Found: TypeAlias = dict[str, dict[str, Entry]]
"""Key -> name -> file of the artifacts in an archive."""
_REMEDY = "make the archive with `fusewright cache export`"


def export(packed: Packed, destination: Path) -> Path:
    """Write an artifact into a folder, made when missing, or to a file that ends in ``.tar``.

    A folder may hold other artifacts.  A tar file is the same bytes whenever it is made.

    Raises:
        UserError: the destination is taken or cannot be written.
    """
    try:
        if destination.suffix != ".tar":
            return _export_folder(packed, destination)
        _refuse_taken(destination)
        unfinished = destination.with_name(f".{destination.name}.{os.getpid()}")
        disk.replace_file(destination, _tar(packed), unfinished)
        return destination
    except OSError as error:
        where = os.fsdecode(error.filename or destination)
        raise UserError(
            f"{where}: cannot be written: {error.strerror}; give another destination"
        ) from error


def _refuse_taken(path: Path) -> None:
    if os.path.lexists(path):
        raise UserError(f"{path}: exists; delete it or give another destination")


def _export_folder(packed: Packed, root: Path) -> Path:
    path = root / ARTIFACTS / packed.manifest.key
    _refuse_taken(path)
    new = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    disk.remove_tree(unfinished)
    try:
        for folder in reversed(new):
            disk.make_folder(folder)
        write_folder(packed.contents, unfinished)
        unfinished.rename(path)
        disk.sync_folder(path.parent)
    except BaseException:
        disk.remove_tree(unfinished)
        for folder in new:
            with suppress(OSError):  # another export may have put something there
                folder.rmdir()
        raise
    return root


def write_folder(contents: Mapping[str, bytes], folder: Path) -> None:
    """A new folder with these files, on the disk when this returns; raises OSError."""
    disk.make_folder(folder)
    parents = folders_of(contents)
    for parent in parents:
        disk.make_folder(folder / parent)
    for name, data in contents.items():
        disk.write_file(folder / name, data)
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
        Refusal: an artifact is not what its manifest says, or the archive holds anything else, or
            more than an artifact can be.
        UserError: there is no such archive.
    """
    try:
        if source.is_dir():
            return _checked(_folder_entries(source), source)
        with disk.open_file(source) as file:
            return _checked(_tar_entries(file, source), source)
    except OSError as error:
        where = Path(os.fsdecode(error.filename or source))
        remedy = "give an exported folder or .tar"
        raise Refusal(where, f"cannot be read: {error.strerror}", remedy) from error


def _checked(folders: _Found, source: Path) -> list[Packed]:
    if not folders:
        raise Refusal(source, "holds no artifact", _REMEDY)
    entries = [entry for files in folders.values() for entry in files.values()]
    if (num_bytes := sum(entry.num_bytes for entry in entries)) > _MAX_ARCHIVE_BYTES:
        raise Refusal(
            source,
            f"holds {num_bytes} bytes, expected at most {_MAX_ARCHIVE_BYTES}",
            "import the artifacts one by one",
        )
    for digest, files in folders.items():
        try:
            check_names(sorted(files.keys() - {MANIFEST, SIGNATURE}))
        except ValueError as error:
            raise Refusal(source / ARTIFACTS / digest, str(error), _REMEDY) from error
    return [Packed.checked(source / ARTIFACTS / digest, files) for digest, files in folders.items()]


def _folder_entries(source: Path) -> _Found:
    folders: _Found = {}
    for folder in sorted((source / ARTIFACTS).iterdir()):
        if not DIGEST.fullmatch(folder.name):
            continue
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise Refusal(folder, "is a link or file, expected a folder", _REMEDY)
        files = folders.setdefault(folder.name, {})
        for name, info in disk.walk(folder):
            if stat.S_ISREG(info.st_mode):
                read = partial(disk.read_file, folder / name, info.st_size)
                files[name] = Entry(info.st_size, read)
            elif not stat.S_ISDIR(info.st_mode):
                raise Refusal(folder / name, "is a link or device, expected a file", _REMEDY)
    return folders


def _tar_entries(file: BinaryIO, source: Path) -> _Found:
    """The files of a tar file.  Only what ``export()`` and a plain ``tar -c`` write is read: files,
    folders and long names; ``tarfile`` itself also obeys links, sparse files and nested headers."""
    folders: _Found = {}
    file_bytes = os.fstat(file.fileno()).st_size
    offset, long_name = 0, None
    for _ in range(_MAX_MEMBERS):
        file.seek(offset)
        if (block := file.read(tarfile.BLOCKSIZE)) == bytes(tarfile.BLOCKSIZE):
            return folders
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            reason = f"is cut short or damaged at byte {offset}" if offset else "is no tar file"
            raise Refusal(source, f"{reason}: {error}", _REMEDY) from error
        start = offset + tarfile.BLOCKSIZE
        name = info.name if long_name is None else long_name
        if not 0 <= info.size <= file_bytes - start:
            reason = f"member {name!r} has {info.size} bytes, of which the file has not so many"
            raise Refusal(source, f"{reason}: it is cut short", _REMEDY)
        offset = start + -(-info.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        read = partial(_read_at, file, start, info.size, source)
        long_name = None
        if info.type != tarfile.GNUTYPE_LONGNAME:
            _add_member(folders, name, info, read, source)
        elif info.size > _MAX_LONG_NAME_BYTES:
            raise Refusal(source, f"has a member whose name has {info.size} bytes", _REMEDY)
        else:
            long_name = os.fsdecode(read().rstrip(b"\0"))
    raise Refusal(source, f"has {_MAX_MEMBERS} members or more", _REMEDY)


def _add_member(
    folders: _Found, name: str, info: tarfile.TarInfo, read: Callable[[], bytes], source: Path
) -> None:
    path = PurePosixPath(name)
    reason = None
    if path.is_absolute() or ".." in path.parts:
        reason = "is outside of the archive"
    elif info.isdir():
        reason = None if _FOLDER.fullmatch(name) else f"expected {ARTIFACTS}/<key>/<file>"
    elif info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        reason = "is a link or device, a sparse file or an extended header, expected a file"
    elif (match := _MEMBER.fullmatch(name)) is None:
        reason = f"expected {ARTIFACTS}/<key>/<file>"
    elif match[2] in (files := folders.setdefault(match[1], {})):
        reason = "is there twice"
    else:
        files[match[2]] = Entry(info.size, read)
    if reason is not None:
        raise Refusal(source, f"member {name[:200]!r}: {reason}", _REMEDY)


def _read_at(file: BinaryIO, offset: int, num_bytes: int, source: Path) -> bytes:
    file.seek(offset)
    data = file.read(num_bytes)
    if len(data) != num_bytes:
        raise Refusal(source, f"is cut short: it ends before byte {offset + num_bytes}", _REMEDY)
    return data
