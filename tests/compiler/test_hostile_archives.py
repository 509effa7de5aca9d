"""Claims about imports: whatever an archive holds, it is imported whole or refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusewright.compiler.artifacts import disk
from fusewright.config import UserError
from fusewright.serve.cli import main
from tests.compiler.hostile import ARCHIVES, END, FOLDERS, document, sealed, sound
from tests.compiler.store_process import FILES, contents, key, own


def test_the_archive_that_all_others_are_made_from_is_sound(tmp_path: Path) -> None:
    (tmp_path / "sound.tar").write_bytes(sound(sealed(document())) + END)
    (artifact,) = own(tmp_path / "store").import_(tmp_path / "sound.tar")
    assert contents(artifact) == FILES
    assert own(tmp_path / "store").find(key()) == artifact


def make(name: str, path: Path) -> str:
    """Make an archive; returns what its refusal says."""
    made, expected = (ARCHIVES | FOLDERS)[name]
    if isinstance(made, bytes):
        path.write_bytes(made)
    else:
        made(path)
    return expected


@pytest.mark.parametrize("name", [*ARCHIVES, *FOLDERS])
def test_a_hostile_archive_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    source = tmp_path / "archive"
    expected = make(name, source)
    with pytest.raises(UserError) as caught:
        own(tmp_path / "store").import_(source)
    line = str(caught.value)
    assert line.startswith(str(source))
    assert expected in line
    assert line.isprintable()
    assert len(line) < 1500
    assert not (tmp_path / "store").exists()
    disk.remove_tree(source)
    assert not source.exists(), "what is nested too deeply for others to remove"


@pytest.mark.parametrize("name", ["2^62 bytes", "terminal escape", "a FIFO"])
def test_cache_import_ends_with_exit_code_2(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "archive"
    expected = make(name, source)
    code = main(["cache", "import", str(source), "--compile-cache-dir", str(tmp_path / "store")])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.startswith(f"error: {source}")
    assert captured.err.count("\n") == 1
    assert expected in captured.err
    assert not (tmp_path / "store").exists()
