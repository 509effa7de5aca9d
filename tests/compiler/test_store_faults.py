"""Faults, made for real: races, kills, flipped bytes, foreign owners, full and read-only disks.

Each ends in a refusal that names the file, or in a store that is whole; never in a wrong artifact.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusewright.compiler.artifacts.artifact import Artifact
from fusewright.compiler.artifacts.store import Store
from fusewright.compiler.artifacts.store_folder import StoreError
from tests.compiler.store_process import (
    FILES,
    contents,
    key,
    names_below,
    own,
    publish,
    run,
    small_disk,
)

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


@pytest.fixture
def fast() -> Iterator[Path]:
    """A folder in memory, where fsync costs nothing, that every user may enter."""
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def refusal(root: Path) -> str:
    """The one reason why the sample is not found."""
    store = own(root)
    assert store.find(key()) is None
    (refused,) = store.refusals
    return str(refused)


def files_of(artifact: Artifact) -> list[str]:
    return ["manifest.json", *sorted(artifact.manifest.files)]


# Many writers, dying writers


def test_eight_processes_publish_one_key_and_get_one_artifact(fast: Path) -> None:
    winners = run("race", fast / "store")
    assert len(winners) == 8
    assert len(set(winners)) == 1
    found = own(fast / "store").find(key())
    assert found is not None
    assert found.manifest.report == {"by": winners[0]}
    assert contents(found) == FILES
    assert names_below(fast / "store" / "tmp") == set()


def test_eight_processes_replace_one_broken_artifact(fast: Path) -> None:
    broken = publish(own(fast / "store"))
    (broken.path / "plan.json").write_bytes(b"")
    assert len(set(run("race", fast / "store"))) == 1
    found = own(fast / "store").find(key())
    assert found is not None
    assert contents(found) == FILES


def test_eight_processes_that_lock_build_once(fast: Path) -> None:
    results = run("locked_race", fast / "store")
    assert [result["built"] for result in results].count(True) == 1
    assert any(result["waited"] for result in results)
    assert {result["plan"] for result in results} == {FILES["plan.json"].decode()}


def test_a_hundred_killed_writers_leave_a_valid_store(fast: Path, fw_seed: int) -> None:
    counted = run("kill", fast / "store", 100, fw_seed)
    # Otherwise no kill was in the middle of anything.
    assert counted["interrupted"] >= 20, counted
    assert counted["visible"] >= 100, counted
    store = own(fast / "store")
    found = store.find(key(8))
    assert found is not None
    assert contents(found) == FILES
    assert all(entry.problem is None for entry in store.ls())
    assert list((fast / "store" / "tmp").iterdir()) == []


# Changed bytes


def test_flipped_bytes_are_refused_by_file_name(tmp_path: Path, fw_seed: int) -> None:
    rng = random.Random(fw_seed)
    artifact = publish(own(tmp_path / "store"))
    for name in files_of(artifact):
        path = artifact.path / name
        sound = path.read_bytes()
        for _ in range(50):
            flipped = bytearray(sound)
            flipped[rng.randrange(len(sound))] ^= 1 << rng.randrange(8)
            path.write_bytes(flipped)
            assert refusal(tmp_path / "store").startswith(f"{path}: ")
        path.write_bytes(sound)
    assert own(tmp_path / "store").find(key()) == artifact


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "has .* bytes|own digest|not JSON"),
        (lambda path: path.write_bytes(b""), "has 0 bytes|Expecting value"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "expected at most|Extra data"),
        (lambda path: path.unlink(), "is missing|No such file"),
        (lambda path: (path.unlink(), path.mkdir()), "is not in the manifest|Is a directory"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "is neither a file nor a folder"),
    ],
    ids=["truncated", "emptied", "longer", "deleted", "a folder", "a FIFO"],
)
def test_a_damaged_file_is_refused_and_rebuilt(
    damage: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    store = own(tmp_path / "store")
    for name in files_of(publish(store)):
        path = publish(store).path / name
        damage(path)
        message = refusal(tmp_path / "store")
        assert message.startswith(f"{path}: ")
        assert re.search(reason, message), message
        assert contents(publish(store)) == FILES
        assert own(tmp_path / "store").find(key()) is not None


@pytest.mark.parametrize("name", ["extra.so", "kernels/extra.cubin", "extra/"])
def test_an_extra_file_is_refused(name: str, tmp_path: Path) -> None:
    path = publish(own(tmp_path / "store")).path / name
    if name.endswith("/"):
        path.mkdir()
    else:
        path.write_bytes(b"")
    assert refusal(tmp_path / "store").startswith(f"{path}: is not in the manifest; delete")


# Changed owners and rights

PLACES = [".", "artifacts", "{}", "{}/kernels", "{}/manifest.json", "{}/kernels/rms_norm.cubin"]


def place_of(artifact: Artifact, place: str) -> Path:
    root = artifact.path.parent.parent
    return root / place.format(artifact.path.relative_to(root))


@AS_ROOT
@pytest.mark.parametrize("place", PLACES)
def test_what_belongs_to_another_user_is_refused(place: str, tmp_path: Path) -> None:
    path = place_of(publish(own(tmp_path / "store")), place)
    os.chown(path, 12345, 0)
    message = refusal(tmp_path / "store")
    assert message.startswith(f"{path}: belongs to uid 12345, expected 0; if you trust")
    os.chown(path, 0, 12345)
    assert own(tmp_path / "store").find(key()) is not None


@pytest.mark.parametrize("extra", [0o002, 0o020])
@pytest.mark.parametrize("place", PLACES)
def test_what_others_may_write_is_refused(place: str, extra: int, tmp_path: Path) -> None:
    path = place_of(publish(own(tmp_path / "store")), place)
    mode = path.stat().st_mode & 0o777
    path.chmod(mode | extra)
    message = refusal(tmp_path / "store")
    assert message.startswith(f"{path}: may be written by others (mode {mode | extra:04o}); if")
    path.chmod(mode)
    assert own(tmp_path / "store").find(key()) is not None


def test_nothing_is_published_where_others_may_write(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o777)
    with pytest.raises(StoreError, match=r"may be written by others \(mode 0777\); .*chmod go-w"):
        publish(own(tmp_path / "store"))
    assert list((tmp_path / "store").iterdir()) == []


@pytest.mark.parametrize("place", PLACES[1:])
def test_symbolic_links_are_refused(place: str, tmp_path: Path) -> None:
    path = place_of(publish(own(tmp_path / "store")), place)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert refusal(tmp_path / "store").startswith(f"{path}: is a symbolic link, expected")


# Disks that cannot be written

LARGE = {f"kernels/{index}.cubin": bytes([index]) * 30_000 for index in range(10)}


def test_a_full_disk_is_an_error_that_leaves_nothing_behind(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 256) as disk:
        root = disk / "store"
        store = own(root)
        publish(store)
        before = names_below(root)
        with pytest.raises(StoreError) as caught:
            publish(store, 1, LARGE)
        message = str(caught.value)
        assert "No space left on device; free space (`fusewright cache prune`) or" in message
        assert str(root) in message
        assert names_below(root) == before
        assert own(root).find(key()) is not None
        assert contents(publish(store, 2)) == FILES


def test_with_a_spare_folder_a_full_disk_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", 256) as disk:
        root = disk / "store"
        store = own(root, spare=lambda: tmp_path / "spare")
        with store.lock(key(1)):
            artifact = publish(store, 1, LARGE)
        assert artifact.path.is_relative_to(tmp_path / "spare")
        assert contents(artifact) == LARGE
        assert store.find(key(1)) == artifact
        assert not list((root / "artifacts").iterdir()) + list((root / "tmp").iterdir())
    told = capsys.readouterr().err
    assert told.startswith(f"{root} cannot be written: what is compiled now will be compiled again")
    assert "No space left on device; free space" in told
    assert told.count("\n") == 1


def test_a_file_that_may_not_grow_is_an_error_that_leaves_nothing_behind(tmp_path: Path) -> None:
    message = run("limited", tmp_path / "store", 1000)
    assert "File too large; free space (`fusewright cache prune`) or give another" in message
    assert names_below(tmp_path / "store") == set()
    assert contents(publish(own(tmp_path / "store"))) == FILES


def make_read_only(root: Path) -> None:
    for path in [root, *root.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)


def test_a_read_only_store_is_found_by_another_user_and_not_written(fast: Path) -> None:
    publish(own(fast / "store"))
    make_read_only(fast / "store")
    before = {path: path.stat().st_mtime_ns for path in (fast / "store").rglob("*")}
    result = run("as_nobody", fast / "store")
    assert result["found"] == [FILES[name].hex() for name in sorted(FILES)]
    assert len(result["errors"]) == 4
    for error in result["errors"]:
        assert "cannot be written: Permission denied; give another " in error
    assert {path: path.stat().st_mtime_ns for path in (fast / "store").rglob("*")} == before


@AS_ROOT
def test_an_unreadable_store_is_refused_not_missed(fast: Path) -> None:
    publish(own(fast / "store"))
    (fast / "store" / "artifacts").chmod(0o700)
    (message,) = run("as_nobody", fast / "store")["found"]
    assert "cannot be read: Permission denied" in message


def test_a_read_only_export_is_searched_before_the_users_store(fast: Path) -> None:
    own_store = own(fast / "mine")
    publish(own_store)
    own_store.export(key().digest, fast / "image")
    (fast / "image").rename(fast / "opt")
    make_read_only(fast / "opt")
    found = Store([fast / "opt", fast / "mine"], write_to=fast / "mine").find(key())
    assert found is not None
    assert found.path.is_relative_to(fast / "opt")
