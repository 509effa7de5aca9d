"""Holds a whole artifact in memory, on its way between stores and archives.

Nothing in an archive is believed before its manifest was read, and a file is read only if its size
is the one in the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .artifact import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_SIGNATURE_BYTES,
    SIGNATURE,
    Artifact,
    FileDigest,
    Manifest,
    Refusal,
    parse_json,
)


@dataclass(frozen=True)
class Entry:
    """A file of an archive, unread: its size there, and what reads it."""

    num_bytes: int
    read: Callable[[], bytes]


@dataclass(frozen=True)
class Packed:
    """All of an artifact in memory, on its way between stores and archives."""

    manifest: Manifest
    files: Mapping[str, bytes]
    signature: bytes | None = None

    @classmethod
    def of(cls, artifact: Artifact) -> Packed:
        """Raises Refusal when a file is not what the manifest says."""
        artifact.verify()
        files = {name: artifact.read(name) for name in artifact.manifest.files}
        return cls(artifact.manifest, files, artifact.signature())

    @property
    def contents(self) -> dict[str, bytes]:
        signature = {} if self.signature is None else {SIGNATURE: self.signature}
        return {MANIFEST: self.manifest.encode(), **signature, **self.files}

    @classmethod
    def checked(cls, path: Path, entries: Mapping[str, Entry]) -> Packed:
        """An artifact of untrusted ``entries``, which were found at ``path``.  A file is read only
        if it has the size that the manifest says.

        Raises:
            Refusal: they are not exactly what their manifest says.
        """
        remedy = "make the archive again"

        def take(name: str, limit_bytes: int) -> bytes:
            if (num_bytes := entries[name].num_bytes) > limit_bytes:
                reason = f"has {num_bytes} bytes, expected at most {limit_bytes}"
                raise Refusal(path / name, reason, remedy)
            return entries[name].read()

        if MANIFEST not in entries:
            raise Refusal(path / MANIFEST, "is missing", remedy)
        data = take(MANIFEST, MAX_MANIFEST_BYTES)
        try:
            manifest = Manifest.decode(data)
        except ValueError as error:
            raise Refusal(path / MANIFEST, str(error), remedy) from error
        if path.name != manifest.key:
            raise Refusal(path, f"holds the artifact of key {manifest.key}", remedy)
        signature = take(SIGNATURE, MAX_SIGNATURE_BYTES) if SIGNATURE in entries else None
        names = entries.keys() - {MANIFEST, SIGNATURE}
        for name in sorted(names ^ manifest.files.keys()):
            missing = "is missing" if name in manifest.files else "is not what the manifest says"
            raise Refusal(path / name, missing, remedy)
        files: dict[str, bytes] = {}
        for name, expected in manifest.files.items():
            same_size = entries[name].num_bytes == expected.num_bytes
            files[name] = entries[name].read() if same_size else b""
            if not same_size or FileDigest.of(files[name]) != expected:
                raise Refusal(path / name, "is not what the manifest says", remedy)
            if name.endswith(".json"):
                try:
                    parse_json(files[name])
                except ValueError as error:
                    raise Refusal(path / name, f"is no JSON: {error}", remedy) from error
        return cls(manifest, files, signature)
