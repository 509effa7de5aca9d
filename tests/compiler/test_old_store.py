"""Claims about stores of older versions, which kept hard links to all files in ``objects/``."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from tests.compiler.store_process import FILES, contents, key, names_below, own, publish


@pytest.fixture
def old_root(tmp_path: Path) -> Path:
    """A store of three artifacts that share their equal files with ``objects/ab/<sha256>``."""
    root = tmp_path / "store"
    for number in range(3):
        publish(own(root), number)
    for path in (path for path in (root / "artifacts").rglob("*") if path.is_file()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        thing = root / "objects" / digest[:2] / digest
        thing.parent.mkdir(parents=True, exist_ok=True)
        if thing.exists():
            path.unlink()
            path.hardlink_to(thing)
        else:
            thing.hardlink_to(path)
    assert len(names_below(root / "objects")) == len(FILES) + 3  # and as many manifests
    return root


def test_artifacts_of_an_old_store_are_found_and_its_objects_go_at_a_prune(old_root: Path) -> None:
    store = own(old_root)
    for number in range(3):
        found = store.find(key(number))
        assert found is not None
        assert contents(found) == FILES
    assert [entry.problem for entry in store.ls()] == [None] * 3
    os.utime(old_root / "used" / key(1).digest, (1000, 1000))
    assert store.prune(unused_since=1500) == [key(1).digest]
    assert not (old_root / "objects").exists()
    assert contents(store.get(key(0).digest)) == contents(store.get(key(2).digest)) == FILES


def test_publishing_to_an_old_store_removes_its_objects(old_root: Path) -> None:
    store = own(old_root)
    assert contents(publish(store, 3)) == FILES
    assert not (old_root / "objects").exists()
    assert all(store.find(key(number)) is not None for number in range(4))


def test_only_objects_of_old_stores_are_removed_from_their_folder(
    old_root: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs" / "cd" / ("cd" * 32)
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"mine")
    objects = old_root / "objects"
    (objects / "notes.txt").write_bytes(b"mine")
    (objects / "info").mkdir()
    (objects / "info" / ("ab" * 32)).write_bytes(b"mine")
    shutil.rmtree(objects / "cd", ignore_errors=True)
    (objects / "cd").symlink_to(theirs.parent)
    own(old_root).prune(max_bytes=10**9)
    assert names_below(objects) == {"notes.txt", f"info/{'ab' * 32}"}
    assert theirs.read_bytes() == b"mine"
    shutil.rmtree(objects)
    objects.symlink_to(theirs.parent.parent)
    own(old_root).prune(max_bytes=10**9)
    assert theirs.read_bytes() == b"mine"
