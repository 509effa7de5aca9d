"""A folder for results is made before the work that they come from, or refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusewright.config import UserError, folders, make_output_folder


def test_it_is_made_with_its_parents_and_left_empty(tmp_path: Path) -> None:
    folder = tmp_path / "some" / "where"
    for _ in range(2):
        make_output_folder("output", folder)
        assert [*folder.iterdir()] == []


@pytest.mark.parametrize("name", ["file", "file/x"])
def test_a_file_in_its_place_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^dump=.*/file.*: .*; give a folder to write to$"):
        make_output_folder("dump", tmp_path / name)


def test_a_folder_that_takes_no_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(dir: Path) -> None:
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr(folders, "TemporaryFile", denied)
    with pytest.raises(UserError, match=r"^output=.*: Permission denied; give a folder"):
        make_output_folder("output", tmp_path)
