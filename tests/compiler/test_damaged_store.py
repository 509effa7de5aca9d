"""Claims about a store that was damaged by hand: one bad artifact costs that artifact alone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusewright.compiler.artifacts import disk
from fusewright.compiler.artifacts.store import Store
from fusewright.compiler.artifacts.store_folder import StoreError
from fusewright.config import UserError
from fusewright.serve.cli import main
from tests.compiler.hostile import nest, sealed, zeros
from tests.compiler.store_process import FILES, contents, key, own, publish

SOUND = (0, 1)


def wrong(name: str, value: Any) -> Callable[[Path], None]:
    """A manifest that is sound but for one field's value."""

    def change(path: Path) -> None:
        document = json.loads((path / "manifest.json").read_bytes())
        del document["sha256"]
        (path / "manifest.json").write_bytes(sealed({**document, name: value}))

    return change


def manifest(data: bytes) -> Callable[[Path], object]:
    return lambda path: (path / "manifest.json").write_bytes(data)


def _large_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()
    zeros(200 * 2**20)(path / "manifest.json")


def _many_files(path: Path) -> None:
    for number in range(2 * disk.MAX_FILES + 1):
        os.mknod(path / str(number))


def _file_for_a_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"")


def _link_for_a_folder(target: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        shutil.rmtree(path)
        path.symlink_to(target)

    return change


def _becomes(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


# What was done to an artifact -> how; none of them may be used any more.
DAMAGE: dict[str, Callable[[Path], object]] = {
    "1,200 folders": nest,
    "too many files": _many_files,
    "a manifest of 200 MB": _large_manifest,
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "an empty manifest": manifest(b""),
    "half a manifest": lambda path: manifest((path / "manifest.json").read_bytes()[:200])(path),
    "a manifest of no JSON": manifest(b"{key: 1}"),
    "a manifest of no text": manifest(bytes(range(256))),
    "a manifest of an array": manifest(b"[]"),
    "a manifest of nothing": manifest(b"null"),
    "a nested manifest": manifest(b"[" * 10**5),
    "a manifest folder": lambda path: _becomes(path / "manifest.json", Path.mkdir),
    "a manifest FIFO": lambda path: _becomes(path / "manifest.json", os.mkfifo),
    "a dangling manifest": lambda path: _becomes(
        path / "manifest.json", lambda link: link.symlink_to("absent")
    ),
    "a manifest of /dev/zero": lambda path: _becomes(
        path / "manifest.json", lambda link: link.symlink_to("/dev/zero")
    ),
    **{
        f"{name} of {type(value).__name__}": wrong(name, value)
        for name, value in [
            ("created", 5),
            ("factors", []),
            ("factors", {"a": 1}),
            ("files", "plan.json"),
            ("files", {"plan.json": 1}),
            ("format", "1"),
            ("key", None),
            ("label", ["a"]),
            ("producer", {}),
            ("report", 1.5),
            ("report", {"passes": {}}),
            ("label", "a\x1b[2J\x07b"),
        ]
    },
    "another artifact's manifest": lambda path: shutil.copy(
        path.parent / key(0).digest / "manifest.json", path
    ),
    "a file for a folder": _file_for_a_folder,
    "a dangling link for a folder": _link_for_a_folder("absent"),
    "a link to itself": lambda path: _link_for_a_folder(path.name)(path),
    "a link to another artifact": _link_for_a_folder(key(0).digest),
    "a missing file": lambda path: (path / "plan.json").unlink(),
    "an escape for a name": lambda path: (path / "a\x1b[2J\nb").touch(),
    "a name that is no text": lambda path: (path / os.fsdecode(b"\xff")).touch(),
    "an extra socket": lambda path: os.mknod(path / "fifo", 0o600 | 0o010000),
    "a signature folder": lambda path: (path / "signature.json").mkdir(),
}


def test_there_are_thirty_kinds() -> None:
    assert len(DAMAGE) >= 30


class Cli:
    """Runs ``fusewright cache`` over one store."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self._capsys = root, capsys

    def __call__(self, *args: str, code: int = 0) -> str:
        assert main(["cache", *args, "--compile-cache-dir", str(self.root)]) == code
        captured = self._capsys.readouterr()
        lines = (captured.out + captured.err).split("\n")
        assert all(line.isprintable() for line in lines), lines
        assert captured.err.count("\n") == (code != 0)
        return captured.out + captured.err


def test_a_damaged_store_is_listed_verified_and_pruned_and_its_sound_artifacts_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSEWRIGHT_BAKED_DIR", str(tmp_path / "baked"))
    root, cli = tmp_path / "store", Cli(tmp_path / "store", capsys)
    store = own(root)
    numbers = range(len(SOUND), len(SOUND) + len(DAMAGE))
    for number in (*SOUND, *numbers):
        publish(store, number)
    for number, damage in zip(numbers, DAMAGE.values(), strict=True):
        damage(root / "artifacts" / key(number).digest)
    (root / "locks" / f"{key(2).digest}.lock").mkdir()
    (root / "locks" / f"{key(3).digest}.lock").symlink_to("absent")
    (root / "used" / key(4).digest).unlink()
    (root / "used" / key(4).digest).mkdir()
    (root / "artifacts" / "no key").mkdir()
    (root / "tmp" / "x.lock").mkdir()

    listed = json.loads(cli("ls", "--json"))
    assert {entry["key"] for entry in listed} == {key(n).digest for n in (*SOUND, *numbers)}
    assert sum(entry["problem"] is not None for entry in listed) >= 25
    assert cli("ls").count("\n") == 2 + len(listed)

    # Every one is refused, with its path and a reason, and the sound ones are not.
    checked = {entry["path"]: entry["problem"] for entry in _verify(cli)}
    for number in SOUND:
        assert checked.pop(str(root / "artifacts" / key(number).digest)) is None
    for (name, _), number in zip(DAMAGE.items(), numbers, strict=True):
        path = str(root / "artifacts" / key(number).digest)
        assert checked[path].startswith(path), name
    assert "artifacts would be refused" in cli("verify", code=2)

    one, two = (key(number).digest for number in SOUND)
    assert "sample 0" in cli("show", one)
    assert cli("diff", one, two).startswith("factor ")
    cli("export", one, str(tmp_path / "out.tar"))
    cli("export", key(2).digest, str(tmp_path / "2.tar"), code=2)
    for number in numbers:
        with pytest.raises(UserError):
            store.export(key(number).digest, tmp_path / f"{number}.tar")

    # A start finds what is sound, misses what is not, and can write in its place.
    for number in numbers:
        fresh = own(root)
        assert fresh.find(key(number)) is None, list(DAMAGE)[number - len(SOUND)]
        assert len(fresh.refusals) == 1
    assert len(str(own(root).missing(key(numbers[0])))) < 2000
    for number in (*SOUND, *numbers[:3]):
        with store.lock(key(number)):
            assert contents(publish(store, number)) == FILES

    removed = json.loads(cli("prune", "--all", "--json"))
    assert set(removed) == {key(n).digest for n in (*SOUND, *numbers)}
    assert [path.name for path in (root / "artifacts").iterdir()] == ["no key"]
    assert list((root / "tmp").iterdir()) == []


def _verify(cli: Cli) -> list[dict[str, str]]:
    text = cli("verify", "--json", code=2)
    found: list[dict[str, str]] = json.loads(text.partition("\n")[0])
    return found


@pytest.mark.parametrize("place", ["artifacts", "locks", "used", "tmp"])
def test_a_store_with_a_file_for_a_folder_is_one_error(place: str, tmp_path: Path) -> None:
    store = own(tmp_path / "store")
    publish(store)
    shutil.rmtree(tmp_path / "store" / place)
    (tmp_path / "store" / place).write_bytes(b"")
    listed = [entry.problem for entry in store.ls()]
    assert listed == ([] if place == "artifacts" else [None])
    with pytest.raises(StoreError, match=f"/{place}: is a file, expected a folder; delete it"):
        publish(store, 1)


def test_a_file_named_as_a_store_is_not_to_be_deleted(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(b"")
    file.chmod(0o600)
    with pytest.raises(StoreError, match=f"{file}: is a file, expected a folder; name a folder"):
        publish(own(file))


def test_the_sound_artifact_of_a_later_store_is_shown_for_a_broken_one(tmp_path: Path) -> None:
    broken, sound = publish(own(tmp_path / "one")), publish(own(tmp_path / "two"))
    (broken.path / "manifest.json").write_bytes(b"{")
    store = Store([tmp_path / "one", tmp_path / "two"])
    assert store.get(key().digest) == sound


def test_no_more_is_published_than_a_start_accepts(tmp_path: Path) -> None:
    store = own(tmp_path / "store")
    many = {f"pieces/{number}": b"" for number in range(disk.MAX_FILES + 1)}
    for files, label, reason in [
        (many, "", f"more than {disk.MAX_FILES} files"),
        ({"a/" * 9 + "a": b""}, "", "folders deep"),
        ({"a": b"", "A": b""}, "", "is taken"),
        (FILES, "a\nb", "printable"),
    ]:
        with pytest.raises(ValueError, match=reason):
            store.publish(key(), files, {}, label)
    assert not (tmp_path / "store").exists()
