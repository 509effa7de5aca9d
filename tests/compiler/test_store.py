"""Claims about stores: search, publishing, locks, pruning, listing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import pytest

from fusewright.compiler.artifacts import disk, paths
from fusewright.compiler.artifacts.store import Store, open_store
from fusewright.compiler.artifacts.store_folder import StoreError, staging
from fusewright.config import UserError
from tests.compiler import store_process
from tests.compiler.store_process import FILES, REPORT, contents, key, names_below, own, publish

_LONG_S = 300.0
"""Longest time for what takes none, in seconds: it bounds what hangs, and nothing else."""


def keys_in(root: Path) -> set[str]:
    return {path.name for path in (root / "artifacts").iterdir()}


# Search


def test_what_is_published_is_found(tmp_path: Path) -> None:
    published = publish(own(tmp_path / "new" / "store"))
    store = Store([tmp_path / "absent", tmp_path / "new" / "store"])
    found = store.find(key())
    assert found == published
    assert contents(found) == FILES
    assert found.manifest.report == REPORT
    assert (store.find(key(1)), store.refusals) == (None, [])


def test_stores_are_searched_in_order(tmp_path: Path) -> None:
    for name in ("first", "second"):
        publish(own(tmp_path / name))
    publish(own(tmp_path / "second"), 1)
    store = Store([tmp_path / "first", tmp_path / "second"])
    for number, expected in [(0, "first"), (1, "second")]:
        found = store.find(key(number))
        assert found is not None
        assert found.path.parent.parent == tmp_path / expected


def test_a_refused_artifact_gives_way_to_the_next_store(tmp_path: Path) -> None:
    broken = publish(own(tmp_path / "first"))
    sound = publish(own(tmp_path / "second"))
    (broken.path / "plan.json").write_bytes(b"")
    store = Store([tmp_path / "first", tmp_path / "second"])
    assert store.find(key()) == sound
    assert [refusal.path for refusal in store.refusals] == [broken.path / "plan.json"]


def test_a_store_may_be_reached_by_a_link(tmp_path: Path) -> None:
    publish(own(tmp_path / "store"))
    (tmp_path / "link").symlink_to(tmp_path / "store")
    assert Store([tmp_path / "link"]).find(key()) is not None


def test_a_miss_names_each_factor_of_the_nearest(tmp_path: Path) -> None:
    store = own(tmp_path / "store")
    assert store.explain_miss(key()) == f"no artifacts in {tmp_path}/store (no such folder)"
    (tmp_path / "store").mkdir()
    assert store.explain_miss(key()) == f"no artifacts in {tmp_path}/store"
    far, near = key(1, other="x"), key(2, passes="cleanup")
    for stored in (far, near):
        store.publish(stored, FILES, REPORT, "stored")
    wanted = key(2, passes="cleanup,fuse_act", torch="2.11")
    assert store.find(wanted) is None
    assert store.explain_miss(wanted) == (
        f"the nearest in {tmp_path}/store is {near.digest} (stored), which differs "
        "(there -> wanted) in passes: cleanup -> cleanup,fuse_act, torch: (none) -> 2.11"
    )


def test_a_miss_names_what_was_refused(tmp_path: Path) -> None:
    store = own(tmp_path / "store")
    artifact = publish(store)
    (artifact.path / "plan.json").unlink()
    assert store.find(key()) is None
    message = str(store.missing(key()))
    assert f"refused {artifact.path}/plan.json: is missing; delete" in message
    assert "nearest" not in message
    assert key().digest in message


def test_search_paths_begin_with_the_baked_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FUSEWRIGHT_BAKED_DIR", "FUSEWRIGHT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/x")
    baked = Path("/opt/fusewright/artifacts")
    assert paths.default_search_paths() == (baked, Path("/home/x/.cache/fusewright"))
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert paths.search_paths() == (
        (baked, Path("/scratch/fusewright")),
        Path("/scratch/fusewright"),
    )
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", "/mine")
    monkeypatch.setenv("FUSEWRIGHT_BAKED_DIR", "/image")
    assert paths.search_paths() == ((Path("/image"), Path("/mine")), Path("/mine"))
    given = (Path("/image"), Path("/a"), Path("/b"), Path("/home/x/c"))
    assert paths.search_paths(["/a:/b", "~/c"]) == (given, Path("/a"))
    assert open_store(["/a:/b"]).write_to == Path("/a")


def test_a_store_without_a_folder_to_write_finds_and_publishes_nothing(tmp_path: Path) -> None:
    publish(own(tmp_path / "store"))
    store = Store([tmp_path / "store"])
    with store.lock(key()):
        assert store.find(key()) is not None
    with pytest.raises(StoreError, match="no folder to keep artifacts in"):
        publish(store, 1)
    assert store.prune(max_bytes=0) == []


# Publishing


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_modes_do_not_depend_on_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        with own(tmp_path / "store").lock(key()):
            artifact = publish(own(tmp_path / "store"))
    finally:
        os.umask(before)
    for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
        if path.parent.name not in ("locks", "used"):
            assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path
    assert own(tmp_path / "store").find(key()) == artifact


def test_a_sound_artifact_stays_when_it_is_published_again(tmp_path: Path) -> None:
    store = own(tmp_path / "store")
    first = store.publish(key(), FILES, {"by": 1}, "first")
    again = store.publish(key(), FILES, {"by": 2}, "second")
    assert again == first
    assert again.manifest.label == "first"


def test_a_broken_artifact_is_replaced(tmp_path: Path) -> None:
    store = own(tmp_path / "store")
    first = publish(store)
    for spoil in SPOILERS:
        spoil(first.path)
        assert own(tmp_path / "store").find(key()) is None
        publish(store)
        found = store.find(key())
        assert found is not None
        assert contents(found) == FILES
        assert names_below(tmp_path / "store" / "tmp") == set()


def _becomes_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _becomes_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"")


def _is_empty(path: Path) -> None:
    for file in path.rglob("*.*"):
        file.unlink()


SPOILERS: list[Callable[[Path], object]] = [
    lambda path: (path / "plan.json").write_bytes(b"spoilt"),
    lambda path: (path / "manifest.json").unlink(),
    lambda path: (path / "extra").mkdir(),
    _becomes_a_link,
    _becomes_a_file,
    _is_empty,
]


def test_a_file_spoilt_in_place_costs_its_artifact_alone(tmp_path: Path) -> None:
    store = own(tmp_path / "store")
    spoilt, sound = publish(store, 0), publish(store, 1)
    for name in FILES:
        (spoilt.path / name).write_bytes(b"spoilt")
    assert store.find(key(0)) is None
    assert store.find(key(1)) == sound
    assert contents(publish(store, 2)) == FILES


def test_names_that_leave_the_folder_are_not_published(tmp_path: Path) -> None:
    store = own(tmp_path / "store")
    with pytest.raises(ValueError, match="not a plain relative path"):
        publish(store, files={"../escaped": b""})
    assert names_below(tmp_path) == set()


def test_what_a_killed_writer_left_is_removed_and_a_live_one_kept(tmp_path: Path) -> None:
    store = own(tmp_path / "store")
    publish(store)
    tmp = tmp_path / "store" / "tmp"
    (tmp / "dead").mkdir()
    (tmp / "dead" / "half").write_bytes(b"x")
    (tmp / "dead.lock").write_bytes(b"")
    with staging(tmp_path / "store") as live:
        (live / "half").write_bytes(b"x")
        publish(store, 1)
        assert names_below(tmp) == {f"{live.name}/half", f"{live.name}.lock"}
    assert list(tmp.iterdir()) == []


# Locks


def start_holder(root: Path) -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        [sys.executable, store_process.__file__, "hold", str(root)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == '"held"\n'
    return holder


def test_a_lock_is_waited_for_until_its_holder_dies(tmp_path: Path) -> None:
    holder = start_holder(tmp_path / "store")
    waited: list[bool] = []

    def on_wait() -> None:
        assert holder.poll() is None
        waited.append(True)
        holder.send_signal(signal.SIGKILL)

    with own(tmp_path / "store").lock(key(1)):
        assert not waited
    with own(tmp_path / "store").lock(key(), on_wait=on_wait):
        assert holder.wait(_LONG_S) == -signal.SIGKILL
    assert len(waited) == 1


def test_a_held_lock_protects_from_pruning(tmp_path: Path) -> None:
    store = own(tmp_path / "store")
    publish(store, 0)
    publish(store, 1)
    holder = start_holder(tmp_path / "store")
    try:
        assert store.prune(max_bytes=0) == [key(1).digest]
        assert keys_in(tmp_path / "store") == {key(0).digest}
    finally:
        holder.kill()
        holder.wait()
    assert store.prune(max_bytes=0) == [key(0).digest]


def test_a_lock_whose_file_is_deleted_while_it_is_waited_for_still_excludes(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    waiting, locked, done = Event(), Event(), Event()

    def work() -> None:
        with disk.held(path, on_wait=waiting.set):
            locked.set()
            assert done.wait(_LONG_S)

    thread = Thread(target=work)
    with disk.held(path) as held:
        assert held
        thread.start()
        assert waiting.wait(_LONG_S)
        path.unlink()
    assert locked.wait(_LONG_S)
    with disk.held(path) as free:
        assert not free
    done.set()
    thread.join()
    with disk.held(path) as free:
        assert free


# Pruning


def use_at(root: Path, number: int, unix_time_s: float) -> None:
    os.utime(root / "used" / key(number).digest, (unix_time_s, unix_time_s))


def distinct_files(number: int) -> dict[str, bytes]:
    return {"plan.json": f"{number}\n".encode() * 5000}


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = own(root)
    for number in range(4):
        publish(store, number, distinct_files(number))
        use_at(root, number, 1000 + number)
    assert store.find(key(0)) is not None  # used now
    assert store.prune(max_bytes=25_000) == [key(1).digest, key(2).digest]
    assert keys_in(root) == {key(0).digest, key(3).digest}
    assert len(names_below(root / "used")) == 2


def test_publishing_keeps_the_store_within_its_limit(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = own(root, size_limit_bytes=25_000)
    for number in range(4):
        publish(store, number, distinct_files(number))
        use_at(root, number, 1000 + number)
    assert keys_in(root) == {key(2).digest, key(3).digest}
    publish(own(root, size_limit_bytes=1), 4, distinct_files(4))
    assert keys_in(root) == {key(4).digest}


def test_pruning_by_age(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = own(root)
    for number in range(3):
        publish(store, number)
        use_at(root, number, 1000 * (number + 1))
    assert store.prune(unused_since=2500) == [key(0).digest, key(1).digest]
    assert keys_in(root) == {key(2).digest}


# Listing


def test_ls_lists_sound_and_unreadable_artifacts(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = own(root)
    for number in range(2):
        publish(store, number)
        use_at(root, number, 1000 + number)
    (root / "artifacts" / key(0).digest / "manifest.json").write_bytes(b"{")
    one, zero = store.ls()
    assert one.manifest is not None
    assert (one.manifest.label, one.used, one.problem) == ("sample 1", 1001, None)
    assert one.num_bytes == sum(map(len, FILES.values())) + len(one.manifest.encode())
    assert zero.manifest is None
    assert str(root / "artifacts" / key(0).digest) in str(zero.problem)


def test_get_takes_an_unambiguous_prefix(tmp_path: Path) -> None:
    store = own(tmp_path / "store")
    artifacts = [publish(store, number) for number in range(17)]
    assert store.get(key(3).digest[:8]) == artifacts[3]
    with pytest.raises(UserError, match=r"begins several keys: \w+, .*; give more digits"):
        store.get("")  # 17 keys share at least this
    with pytest.raises(UserError, match=f"begins with 'xyz' in {tmp_path}/store"):
        store.get("xyz")
