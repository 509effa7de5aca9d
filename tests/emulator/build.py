"""Builds and runs the emulator's programs: a driver, csrc's sources as derive.py leaves them, and
the emulated machine. Needs g++, CUDA's headers and an x86-64 processor; no nvcc, no GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .derive import Edit, derive

HERE = Path(__file__).resolve().parent
# -O1: a kernel runs for a second, and takes longer to compile. -w: nvcc's pragmas.
FLAGS = ("-std=c++20", "-O1", "-w", "-include", "emulator.h", f"-I{HERE}")
# g++ calls a function of races.cpp at each access; that reads who called, and who called that.
NOTED = (
    "-fsanitize=thread",
    "--param=tsan-instrument-func-entry-exit=0",
    "-fno-omit-frame-pointer",
    "-g1",
)
TIMEOUT_S = 900


class Program(NamedTuple):
    """A driver of one kernel."""

    driver: str
    root: str  # of csrc/
    macros: Mapping[str, str] = {}
    edits: tuple[Edit, ...] = ()


class Result(NamedTuple):
    """A program's lines about its cases: each begins with PASS, FAIL or FAULT."""

    lines: list[str]
    passed: bool


@functools.cache
def cuda_headers() -> Path | None:
    """A toolkit's, or those that Triton's wheel has."""
    nvcc, triton = shutil.which("nvcc"), importlib.util.find_spec("triton")
    folders = [Path("/usr/local/cuda/include")]
    if nvcc:
        folders.insert(0, Path(nvcc).resolve().parents[1] / "include")
    if home := os.environ.get("CUDA_HOME"):
        folders.insert(0, Path(home) / "include")
    if triton and triton.submodule_search_locations:
        wheel = Path(triton.submodule_search_locations[0])
        folders.append(wheel / "backends" / "nvidia" / "include")
    return next((folder for folder in folders if (folder / "cuda_fp8.h").is_file()), None)


def what_is_missing() -> str:
    """Why no program can be built here, or nothing."""
    if platform.machine() != "x86_64":
        return "the emulator switches stacks of x86-64"
    if shutil.which("g++") is None:
        return "there is no g++"
    return "" if cuda_headers() else "there are no CUDA headers"


def compile_source(source: str, target: Path, *flags: str) -> Path:
    """Compile one file of this folder."""
    command = ["g++", *FLAGS, *flags, f"-I{cuda_headers()}", "-c", HERE / source, "-o", target]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    if done.returncode:
        raise AssertionError(f"{source} does not compile:\n{done.stderr[:4000]}")
    return target


def build(program: Program, folder: Path) -> Path:
    """The program's executable, in a folder whose machine.o is kept from one to the next."""
    machine = [folder / "machine.o", folder / "races.o"]
    for target in machine:
        if not target.exists():
            compile_source(f"{target.stem}.cpp", target, "-O3")
    sources = folder / "sources"
    shutil.rmtree(sources, ignore_errors=True)
    derive(program.root, sources, program.edits)
    macros = [f"-D{name}={value}" for name, value in program.macros.items()]
    driver = compile_source(program.driver, folder / "driver.o", f"-I{sources}", *NOTED, *macros)
    executable = folder / Path(program.driver).stem
    subprocess.run(["g++", driver, *machine, "-o", executable], check=True, timeout=TIMEOUT_S)
    return executable


def run(executable: Path, cases: Sequence[str]) -> Result:
    """Run the cases in one process, which a fault ends."""
    done = subprocess.run(
        [executable],
        input="".join(f"{case}\n" for case in cases),
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    lines = done.stdout.splitlines()
    if done.returncode < 0:  # such as a read of a guarded page
        lines.append(f"FAULT signal {-done.returncode} in {cases[len(lines)]}")
    passed = sum(line.startswith("PASS") for line in lines)
    return Result(lines, done.returncode == 0 and passed == len(cases))
