"""An artifact: a folder of plan, code and kernels, and the manifest that accounts for each byte.

The manifest holds every factor of the key, and the digests of every file and of itself.  What does
not match its digest is not used: a ``Refusal`` names the path, the reason and the remedy.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ... import __version__
from ...config import UserError
from . import disk
from .key import Key

FORMAT = 1
MANIFEST = "manifest.json"
SIGNATURE = "signature.json"
DIGEST = re.compile(r"[0-9a-f]{32}")
MAX_MANIFEST_BYTES = 8 * 2**20
MAX_ARTIFACT_BYTES = 2**30
MAX_SIGNATURE_BYTES = 2**16
_MAX_JSON_DEPTH = 32
_MAX_LABEL_CHARACTERS = 1000
_MAX_REASON_CHARACTERS = 300
# Printable ASCII without the backslash; no hidden files, which includes "." and "..".
_NAME_PART = re.compile(r"(?!\.)[!-\[\]-~]{1,200}")
REMEDY = "delete the artifact, so that it is compiled anew, or import it again"
_REPORT_TYPES = {"passes": list, "choices": dict, "pieces": dict, "tuned_us": dict, "seconds": dict}
_TYPES = {
    "created": str,
    "factors": dict,
    "files": dict,
    "key": str,
    "label": str,
    "producer": str,
    "report": dict,
}


class Refusal(UserError):
    """An artifact, or a file of one, that is not used."""

    def __init__(self, path: Path, reason: str, remedy: str = REMEDY) -> None:
        self.path, self.remedy = path, remedy
        self.reason = printable(reason)[:_MAX_REASON_CHARACTERS]
        super().__init__(f"{printable(str(path))}: {self.reason}; {remedy}")


def printable(text: str) -> str:
    """Text with control characters, and others that a terminal does not show, as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def parse_json(data: bytes) -> Any:
    """A JSON document.

    Raises:
        ValueError: the data is not JSON, or is nested too deeply to be handled safely.
    """
    try:
        document = json.loads(data.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    level = [document]
    for _ in range(_MAX_JSON_DEPTH):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return document
    raise ValueError(f"is nested too deeply, expected at most {_MAX_JSON_DEPTH} levels")


@dataclass(frozen=True)
class FileDigest:
    sha256: str
    num_bytes: int

    @classmethod
    def of(cls, data: bytes) -> FileDigest:
        return cls(hashlib.sha256(data).hexdigest(), len(data))


@dataclass(frozen=True)
class Manifest:
    """A manifest says what its artifact is and which files belong to it.

    Attributes:
        key: digest of ``factors``; the name of the artifact's folder.
        factors: name -> value of everything that the code depends on.
        label: a description for people.
        created: UTC, as in 2026-01-31T12:00:00Z.
        producer: program and version that wrote it.
        files: name -> digest and size of every file but manifest and signature.
        report: what its build reports, as JSON.
    """

    key: str
    factors: Mapping[str, str]
    label: str
    created: str
    producer: str
    files: Mapping[str, FileDigest]
    report: Mapping[str, Any]
    format: int = FORMAT

    @classmethod
    def of(
        cls, key: Key, files: Mapping[str, bytes], report: Mapping[str, Any], label: str
    ) -> Manifest:
        """The manifest of new files.

        Raises:
            ValueError: a file's name is not a plain relative path, the report is not JSON, or there
                is more of something than ``decode()`` accepts.
        """
        manifest = cls(
            key=key.digest,
            factors=dict(key.factors),
            label=label,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            producer=f"fusewright {__version__}",
            files={name: FileDigest.of(data) for name, data in files.items()},
            report=json.loads(json.dumps(report, allow_nan=False)),
        )
        manifest._check()
        return manifest

    def encode(self) -> bytes:
        """The one spelling of this manifest: sorted JSON that ends in its own digest."""
        document: dict[str, Any] = {name: getattr(self, name) for name in ("format", *_TYPES)}
        document["files"] = {
            name: {"bytes": entry.num_bytes, "sha256": entry.sha256}
            for name, entry in self.files.items()
        }
        document["sha256"] = hashlib.sha256(canonical_json(document)).hexdigest()
        return canonical_json(document)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """The manifest that ``encode()`` wrote.

        Raises:
            ValueError: the data is anything else, even by a single byte; says what is wrong.
        """
        manifest = cls._read(parse_json(data))
        if manifest.encode() != data:
            raise ValueError("is not what was written: its own digest differs")
        if Key(manifest.factors).digest != manifest.key:
            raise ValueError(f"key {manifest.key} is not the digest of its factors")
        manifest._check()
        return manifest

    def _check(self) -> None:
        """Refuse what a store, a terminal or a reader of the report could stumble over."""
        check_names(self.files)
        if (num_bytes := sum(file.num_bytes for file in self.files.values())) > MAX_ARTIFACT_BYTES:
            raise ValueError(f"lists {num_bytes} bytes, expected at most {MAX_ARTIFACT_BYTES}")
        for name in ("label", "created", "producer"):
            text = getattr(self, name)
            if len(text) > _MAX_LABEL_CHARACTERS or not text.isprintable():
                raise ValueError(
                    f"{name} {text[:80]!r}: expected at most {_MAX_LABEL_CHARACTERS} printable "
                    "characters"
                )
        for name, value in self.factors.items():
            if not (name.isprintable() and value.isprintable()):
                raise ValueError(f"factor {name!r} is {value[:80]!r}, expected printable text")
        for name, expected in _REPORT_TYPES.items():
            if not isinstance(self.report.get(name, expected()), expected):
                raise ValueError(f"{name!r} of its report is no {expected.__name__}")
        if not all(isinstance(entry, dict) for entry in self.report.get("passes", ())):
            raise ValueError("'passes' of its report has an entry that is no dict")

    @classmethod
    def _read(cls, document: Any) -> Manifest:
        if not isinstance(document, dict):
            raise ValueError(f"holds {type(document).__name__}, expected an object")
        if document.get("format") != FORMAT:
            raise ValueError(f"has format {document.get('format')!r}, expected {FORMAT}")
        for name, expected in _TYPES.items():
            if not isinstance(document.get(name), expected):
                raise ValueError(f"has no {name!r} of type {expected.__name__}")
        if not all(isinstance(value, str) for value in document["factors"].values()):
            raise ValueError("has a factor that is no text")
        files = {name: _file_digest(name, entry) for name, entry in document["files"].items()}
        return cls(**{**{name: document[name] for name in _TYPES}, "files": files})


def _file_digest(name: str, entry: Any) -> FileDigest:
    if not isinstance(entry, dict) or type(entry.get("bytes")) is not int or entry["bytes"] < 0:
        raise ValueError(f"has no size of {name!r}")
    sha256 = entry.get("sha256")
    if not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256):
        raise ValueError(f"has no digest of {name!r}")
    return FileDigest(entry["sha256"], entry["bytes"])


def canonical_json(document: Mapping[str, Any]) -> bytes:
    """Sorted, readable JSON: equal documents give equal bytes."""
    text = json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode()


def check_names(names: Iterable[str]) -> None:
    """Refuse file names that are not plain relative paths, or that differ in case alone.

    Raises:
        ValueError: names the file.
    """
    known = {MANIFEST, SIGNATURE}
    folders: set[str] = set()
    for count, name in enumerate(names, 1):
        if count > disk.MAX_FILES:
            raise ValueError(f"more than {disk.MAX_FILES} files")
        if name.count("/") > disk.MAX_DEPTH:
            raise ValueError(f"file name {name[:80]!r} is more than {disk.MAX_DEPTH} folders deep")
        if not all(_NAME_PART.fullmatch(part) for part in name.split("/")):
            raise ValueError(f"file name {name[:200]!r} is not a plain relative path")
        if (folded := name.lower()) in known:
            raise ValueError(f"file name {name!r} is taken")
        known.add(folded)
        folders |= _parents(folded)
    if both := known & folders:
        raise ValueError(f"{min(both)!r} is both a file and a folder")


def _parents(name: str) -> set[str]:
    return {str(parent) for parent in PurePosixPath(name).parents} - {"."}


@dataclass(frozen=True)
class Artifact:
    """A folder with its manifest; the folder's name is the key."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: Path) -> Artifact:
        """Open the artifact in a folder.  Only its manifest is read.

        Raises:
            Refusal: the manifest is missing, changed, or of another key than the folder's name.
        """
        try:
            manifest = Manifest.decode(disk.read_file(path / MANIFEST, MAX_MANIFEST_BYTES))
        except OSError as error:
            raise Refusal(path / MANIFEST, f"cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise Refusal(path / MANIFEST, str(error)) from error
        if path.name != manifest.key:
            raise Refusal(path, f"holds the artifact of key {manifest.key}")
        return cls(path, manifest)

    def read(self, name: str) -> bytes:
        """A file's content.

        Raises:
            Refusal: the file is missing or not what the manifest says.
        """
        path = self.path / name
        if (expected := self.manifest.files.get(name)) is None:
            raise Refusal(path, "is not in the manifest")
        try:
            data = disk.read_file(path, expected.num_bytes)
        except FileNotFoundError as error:
            raise Refusal(path, "is missing") from error
        except OSError as error:
            raise Refusal(path, f"cannot be read: {error.strerror}") from error
        if len(data) != expected.num_bytes:
            raise Refusal(path, f"has {len(data)} bytes, expected {expected.num_bytes}")
        if (digest := FileDigest.of(data)) != expected:
            reason = f"has SHA-256 {digest.sha256[:12]}…, expected {expected.sha256[:12]}…"
            raise Refusal(path, reason)
        return data

    def signature(self) -> bytes | None:
        """The content of the signature's file; None when there is none.

        Raises:
            Refusal: it cannot be read.
        """
        path = self.path / SIGNATURE
        try:
            return disk.read_file(path, MAX_SIGNATURE_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Refusal(path, f"cannot be read: {error.strerror}") from error

    def verify(self) -> None:
        """Read every file, and look for files that do not belong.

        Raises:
            Refusal: names the first that is wrong.
        """
        expected = {*self.manifest.files, MANIFEST, SIGNATURE}
        folders = {parent for name in self.manifest.files for parent in _parents(name)}
        try:
            for name, info in disk.walk(self.path):
                if name not in (folders if stat.S_ISDIR(info.st_mode) else expected):
                    raise Refusal(self.path / name, "is not in the manifest")
        except OSError as error:
            where = Path(os.fsdecode(error.filename or self.path))
            raise Refusal(where, f"cannot be read: {error.strerror}") from error
        for name in self.manifest.files:
            self.read(name)
