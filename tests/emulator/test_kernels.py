"""csrc's kernels run on a CPU: each thread is a fiber, copies land as late as they may, and the
results are those of float64. `make test` has one case, `make emulated-test` all.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .build import Program, build, run, what_is_missing
from .cases import MISTAKES, PROGRAMS, QUICK, RACES
from .derive import DECLARATIONS, INSTRUCTIONS, MACROS, Edit, UnknownSourceError, derive

compiles = pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where programs are built; the emulated machine is compiled once."""
    return tmp_path_factory.mktemp("emulated")


@compiles
def test_decode_attention_is_that_of_float64(folder: Path) -> None:
    program, cases = QUICK
    result = run(build(program, folder), cases)
    assert result.passed, result.lines


@compiles
@pytest.mark.thorough
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_are_right_in_every_division_and_schedule(name: str, folder: Path) -> None:
    program, cases = PROGRAMS[name]
    result = run(build(program, folder), cases)
    assert result.passed, [line for line in result.lines if not line.startswith("PASS")]


@compiles
@pytest.mark.thorough
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_shows(name: str, folder: Path) -> None:
    program, cases = MISTAKES[name]
    executable = build(program, folder)
    results = [run(executable, [case]) for case in cases]
    assert not all(result.passed for result in results)


@compiles
@pytest.mark.thorough
@pytest.mark.parametrize("name", RACES)
def test_a_race_is_named_in_every_schedule(name: str, folder: Path) -> None:
    program, cases = RACES[name]
    executable = build(program, folder)
    for case in cases:
        *_, fault = run(executable, [case]).lines
        assert fault.startswith(("FAULT race at byte", "FAULT no proxy fence at byte")), fault
        assert len(re.findall(r"\(\w+\.cuh?:\d+", fault)) == 2, fault  # where both accesses are


def test_every_replacement_is_used(tmp_path: Path) -> None:
    programs: list[Program] = [program for program, _ in PROGRAMS.values()]
    used = {
        text for root in {program.root for program in programs} for text in derive(root, tmp_path)
    }
    assert used == {*INSTRUCTIONS, *MACROS, *DECLARATIONS}


def test_ptx_without_an_emulation_is_refused(tmp_path: Path) -> None:
    edit = Edit("common/device.cuh", "cp.async.commit_group;", "cp.async.commit_all;")
    with pytest.raises(
        UnknownSourceError, match=r"no emulation of the PTX 'cp\.async\.commit_all;'"
    ):
        derive("attention/decode.cuh", tmp_path, [edit])


def test_an_edit_of_what_is_not_there_is_refused(tmp_path: Path) -> None:
    edit = Edit("common/device.cuh", "cp.async.commit_all;", "")
    with pytest.raises(UnknownSourceError, match=r"has 0 times 'cp\.async\.commit_all;'"):
        derive("attention/decode.cuh", tmp_path, [edit])
