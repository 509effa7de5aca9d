"""Claims about exports: stores that can be moved and packed, and that import only what is sound."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from fusewright.compiler.artifacts.artifact import Refusal
from fusewright.compiler.artifacts.store import Store
from fusewright.config import UserError
from tests.compiler.store_process import FILES, contents, key, names_below, own, publish


def test_an_export_is_a_store_of_its_own(tmp_path: Path) -> None:
    store = own(tmp_path / "store")
    for number in range(2):
        publish(store, number)
        store.export(key(number).digest, tmp_path / "out" / "image")
    (tmp_path / "out" / "image").rename(tmp_path / "moved")
    before = names_below(tmp_path / "moved")
    assert {name.split("/")[0] for name in before} == {"artifacts"}
    for number in range(2):
        found = Store([tmp_path / "moved"]).find(key(number))
        assert found is not None
        assert contents(found) == FILES
    assert names_below(tmp_path / "moved") == before
    with pytest.raises(UserError, match="exists; delete it or give another destination"):
        store.export(key(1).digest, tmp_path / "moved")


def test_a_tar_export_is_deterministic_and_unpacks_to_a_store(tmp_path: Path) -> None:
    store = own(tmp_path / "store")
    artifact = publish(store)
    first = store.export(key().digest, tmp_path / "first.tar").read_bytes()
    os.utime(artifact.path / "plan.json", (1, 1))
    assert store.export(key().digest, tmp_path / "second.tar").read_bytes() == first
    with tarfile.open(tmp_path / "first.tar") as tar:
        names = tar.getnames()
        assert names == sorted(names)
        assert {(m.mtime, m.uid, m.gid, m.uname) for m in tar} == {(0, 0, 0, "")}
        assert {m.mode for m in tar} == {0o644, 0o755}
    (tmp_path / "unpacked").mkdir()
    tar_x = ["tar", "-x", "--no-same-owner", "-f", tmp_path / "first.tar", "-C"]
    subprocess.run([*tar_x, tmp_path / "unpacked"], check=True)
    found = Store([tmp_path / "unpacked"]).find(key())
    assert found is not None
    assert contents(found) == FILES


@pytest.mark.parametrize("name", ["image", "image.tar"])
def test_what_was_exported_can_be_imported(name: str, tmp_path: Path) -> None:
    artifact = publish(own(tmp_path / "store"))
    own(tmp_path / "store").export(key().digest, tmp_path / name)
    (imported,) = own(tmp_path / "other").import_(tmp_path / name)
    assert imported.manifest == artifact.manifest
    assert own(tmp_path / "other").find(key()) == imported


def test_a_broken_export_is_not_made(tmp_path: Path) -> None:
    store = own(tmp_path / "store")
    artifact = publish(store)
    (artifact.path / "plan.json").write_bytes(b"")
    with pytest.raises(Refusal):
        store.export(key().digest, tmp_path / "image")
    assert not (tmp_path / "image").exists()


def test_an_import_publishes_all_or_nothing(tmp_path: Path) -> None:
    store = own(tmp_path / "store")
    for number in range(3):
        publish(store, number)
        store.export(key(number).digest, tmp_path / "image")
    worst = sorted((tmp_path / "image" / "artifacts").iterdir())[-1]
    (worst / "kernels" / "rms_norm.cubin").write_bytes(b"")
    with pytest.raises(Refusal, match=r"rms_norm\.cubin: is not what the manifest says"):
        own(tmp_path / "other").import_(tmp_path / "image")
    assert not (tmp_path / "other").exists()


def member(name: str, data: bytes = b"", **facts: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for fact, value in facts.items():
        setattr(info, fact, value)
    return info, data


INSIDE = f"artifacts/{key().digest}"


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (member("/etc/passwd", b"x"), "is outside of the archive"),
        (member(f"{INSIDE}/../../../x", b"x"), "is outside of the archive"),
        (member("../x", type=tarfile.DIRTYPE), "is outside of the archive"),
        (member(f"{INSIDE}/l", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "link or device"),
        (member(f"{INSIDE}/l", type=tarfile.LNKTYPE, linkname="plan.json"), "link or device"),
        (member(f"{INSIDE}/d", type=tarfile.CHRTYPE), "link or device"),
        (member(f"{INSIDE}/f", type=tarfile.FIFOTYPE), "link or device"),
        (member("other/file", b"x"), "expected artifacts/<key>/<file>"),
        (member(f"{INSIDE}/plan.json", b"x"), "is there twice"),
        (member(f"{INSIDE}/extra", b"x"), "is not what the manifest says"),
        (member("artifacts/" + "0" * 32 + "/plan.json", b"x"), "manifest.json: is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0].name[-12:],
)
def test_a_tar_file_with_anything_else_is_refused(
    extra: tuple[tarfile.TarInfo, bytes], reason: str, tmp_path: Path
) -> None:
    publish(own(tmp_path / "store"))
    path = own(tmp_path / "store").export(key().digest, tmp_path / "image.tar")
    with tarfile.open(path, "a") as tar:
        tar.addfile(extra[0], io.BytesIO(extra[1]))
    with pytest.raises(Refusal, match=reason):
        own(tmp_path / "other").import_(path)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("length", [0, 1000, 3000, 5000])
def test_a_cut_tar_file_is_refused(length: int, tmp_path: Path) -> None:
    publish(own(tmp_path / "store"))
    path = own(tmp_path / "store").export(key().digest, tmp_path / "image.tar")
    assert path.stat().st_size > 5000
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(Refusal):
        own(tmp_path / "other").import_(path)


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty" / "artifacts").mkdir(parents=True)
    for name in ("absent", "absent.tar", "empty"):
        with pytest.raises(UserError, match=name):
            own(tmp_path / "other").import_(tmp_path / name)
