"""Claims about the artifact's folder and manifest: one spelling, and no change goes unseen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusewright.compiler.artifacts.artifact import (
    MANIFEST,
    Artifact,
    FileDigest,
    Manifest,
    Refusal,
    canonical_json,
)
from fusewright.compiler.artifacts.key import Key
from fusewright.config import UserError
from tests.compiler.store_process import FILES, REPORT, key, own, publish


def manifest(**report: Any) -> Manifest:
    return Manifest.of(key(), FILES, report or REPORT, "Llama ·, 32 layers")


def test_a_manifest_survives_the_disk() -> None:
    written = manifest()
    assert Manifest.decode(written.encode()) == written
    assert json.loads(written.encode())["factors"]["hardware.sm"] == "90"


def test_a_manifest_has_one_spelling() -> None:
    turned = Key(dict(reversed(key().factors.items())))
    files = dict(reversed(FILES.items()))
    other = Manifest.of(turned, files, dict(REPORT), "Llama ·, 32 layers")
    assert replace(other, created="2026-01-31T12:00:00Z").encode() == (
        replace(manifest(), created="2026-01-31T12:00:00Z").encode()
    )


def test_every_flipped_bit_of_a_manifest_is_found() -> None:
    data = bytearray(manifest().encode())
    for position in range(len(data)):
        for bit in range(8):
            data[position] ^= 1 << bit
            with pytest.raises(ValueError):
                Manifest.decode(bytes(data))
            data[position] ^= 1 << bit
    Manifest.decode(bytes(data))


def test_a_cut_manifest_is_refused() -> None:
    data = manifest().encode()
    for length in range(len(data)):
        with pytest.raises(ValueError):
            Manifest.decode(data[:length])
    with pytest.raises(ValueError):
        Manifest.decode(data + b"\n")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 2}, "has format 2, expected 1"),
        ({"key": "0" * 32}, "is not the digest of its factors"),
        ({"factors": {"hardware.sm": 90}}, "a factor that is no text"),
        ({"label": None}, "has no 'label' of type str"),
        ({"report": []}, "has no 'report' of type dict"),
        ({"files": {"/etc/passwd": FileDigest.of(b"")}}, "not a plain relative path"),
        ({"files": {"../plan.json": FileDigest.of(b"")}}, "not a plain relative path"),
        ({"files": {"pieces/../x": FileDigest.of(b"")}}, "not a plain relative path"),
        ({"files": {"pieces//x": FileDigest.of(b"")}}, "not a plain relative path"),
        ({"files": {"pieces/": FileDigest.of(b"")}}, "not a plain relative path"),
        ({"files": {"": FileDigest.of(b"")}}, "not a plain relative path"),
        ({"files": {".hidden": FileDigest.of(b"")}}, "not a plain relative path"),
        ({"files": {"a\\b": FileDigest.of(b"")}}, "not a plain relative path"),
        ({"files": {"a\0b": FileDigest.of(b"")}}, "not a plain relative path"),
        ({"files": {"manifest.json": FileDigest.of(b"")}}, "is taken"),
        ({"files": {"signature.json": FileDigest.of(b"")}}, "is taken"),
        (
            {"files": {"a": FileDigest.of(b""), "a/b": FileDigest.of(b"")}},
            "both a file and a folder",
        ),
        ({"files": {"plan.json": FileDigest("0" * 63, 1)}}, "has no digest of 'plan.json'"),
        ({"files": {"plan.json": FileDigest("0" * 64, True)}}, "has no size of 'plan.json'"),
    ],
    ids=str,
)
def test_a_manifest_of_nonsense_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Manifest.decode(replace(manifest(), **change).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"null",
        b"{",
        b"{}",
        b"[" * 100_000,
        b'{"format": 1}',
        b'{"format": 1' + b"0" * 5000 + b"}",
        canonical_json({"format": 1, "files": {"x": None}, "factors": {}}),
    ],
    ids=lambda data: str(data[:20]),
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        Manifest.decode(data)


def test_an_unknown_field_is_refused() -> None:
    document = json.loads(manifest().encode())
    document["more"] = 1
    with pytest.raises(ValueError, match="its own digest differs"):
        Manifest.decode(canonical_json(document))


def test_a_report_is_json() -> None:
    counted = manifest(sites={10: "ten", 9: "nine"}, pair=(1, 2))
    assert counted.report == {"sites": {"10": "ten", "9": "nine"}, "pair": [1, 2]}
    assert Manifest.decode(counted.encode()) == counted
    with pytest.raises(ValueError):
        manifest(error=float("nan"))


def test_an_artifact_reads_what_was_published(tmp_path: Path) -> None:
    artifact = publish(own(tmp_path / "store"))
    reopened = Artifact.open(artifact.path)
    assert reopened == artifact
    assert {name: reopened.read(name) for name in reopened.manifest.files} == FILES
    reopened.verify()
    assert reopened.signature() is None


def test_a_file_is_verified_when_it_is_read(tmp_path: Path) -> None:
    artifact = publish(own(tmp_path / "store"))
    (artifact.path / "plan.json").write_bytes(b'{"steps": {}}\n')
    with pytest.raises(Refusal, match=r"plan\.json: has SHA-256 \w+…, expected \w+…; delete"):
        artifact.read("plan.json")
    assert artifact.read("pieces/ab12/code.py") == FILES["pieces/ab12/code.py"]


def test_a_file_outside_of_the_manifest_is_not_read(tmp_path: Path) -> None:
    artifact = publish(own(tmp_path / "store"))
    for name in (MANIFEST, "../../store", "/etc/passwd", "other"):
        with pytest.raises(Refusal, match="is not in the manifest"):
            artifact.read(name)


def test_a_renamed_artifact_is_refused(tmp_path: Path) -> None:
    artifact = publish(own(tmp_path / "store"))
    moved = artifact.path.rename(artifact.path.with_name("0" * 32))
    with pytest.raises(Refusal, match=f"holds the artifact of key {artifact.path.name}"):
        Artifact.open(moved)


def test_a_refusal_is_one_line_with_path_reason_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        Artifact.open(tmp_path)
    assert isinstance(caught.value, Refusal)
    assert str(caught.value) == (
        f"{tmp_path}/manifest.json: cannot be read: No such file or directory; "
        "delete the artifact, so that it is compiled anew, or import it again"
    )
