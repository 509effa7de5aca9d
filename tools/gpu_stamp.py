"""The stamp that `make gpu-test` leaves: what passed on which GPU, and over which sources.

`run` runs `pytest -m gpu` and writes bench/results/gpu-tests.json; `check` names the sources that
changed since, for `make check`. Tests that want the whole GPU are a round of their own. A machine
that is lent for less than both take runs one with `--round 1` or `--round 2`, and the stamp says
which it has. A round that was cut off goes on where it was, if build/gpu-tests has what it left
there and in $OUT. Standard library only at import, so that `check` needs no torch.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = ROOT / "bench" / "results" / "gpu-tests.json"
LIBRARY = ROOT / "ops" / "_fw_cuda.so"
BUILT = ROOT / "build" / "csrc" / "built.json"  # left by tools/build_csrc.sh
RESULTS = ROOT / "build" / "gpu-tests"  # of rounds, as far as they came

# What the GPU tests exercise: the package below serve/ and bench/, its kernels and their tests.
COVERED_FOLDERS = (
    "config",
    "csrc",
    "ops",
    "passes",
    "compiler",
    "graph_capture",
    "model_executor",
    "engine",
    "tests",
)
COVERED_SUFFIXES = {".py", ".cu", ".cuh", ".cpp", ".h"}
# Tests that share the GPU run side by side: most of their time is the compiling of kernels.
# An engine takes up to 0.9 of a GPU, less what others hold: nine workers on an H100, with 8 GiB
# each, left it nothing now and then.
BYTES_A_WORKER = 11 << 30
ROUNDS = {1: "gpu and whole_gpu", 2: "gpu and not whole_gpu"}

_RAN = (0, 1)  # pytest's exit codes when it ran all tests
_NOTHING_LEFT = 5

NOT_COVERED = ("tests/serve/", "tests/bench/", "tests/tools/", "tests/test_layout.py")


def covered_files(root: Path = ROOT) -> list[str]:
    """Covered sources as sorted POSIX paths; the file system, because a GPU machine has no git."""
    found = (
        path.relative_to(root).as_posix()
        for folder in COVERED_FOLDERS
        for path in (root / folder).rglob("*")
        if path.suffix in COVERED_SUFFIXES and "__pycache__" not in path.parts
    )
    return sorted(name for name in found if not name.startswith(NOT_COVERED))


def source_digests(root: Path = ROOT) -> dict[str, str]:
    return {
        name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in covered_files(root)
    }


def combined_digest(digests: dict[str, str]) -> str:
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def changed_sources(stamped: dict[str, str], present: dict[str, str]) -> list[str]:
    """Names added, removed or altered between two digest tables."""
    return sorted(
        name for name in stamped.keys() | present.keys() if stamped.get(name) != present.get(name)
    )


def notice(stamp: Path = STAMP, root: Path = ROOT) -> str:
    """One line for `make check`: whether the stamp still covers the sources."""
    if not stamp.is_file():
        return "notice: no gpu-tests.json yet; run `make gpu-test` on a GPU machine"
    record = json.loads(stamp.read_text())
    changed = changed_sources(record["sources"], source_digests(root))
    if changed:
        first = ", ".join(changed[:3]) + (", ..." if len(changed) > 3 else "")
        return f"notice: gpu-tests.json covers other sources; {len(changed)} changed: {first}"
    if missing := [n for n, marks in ROUNDS.items() if marks not in record.get("rounds", {})]:
        return f"notice: gpu-tests.json lacks a round; run tools/gpu.sh test --round {missing[0]}"
    return f"gpu-tests.json covers these sources: {record['passed']} passed on {record['gpu']}"


def outcomes(results: Path) -> dict[str, str]:
    """The outcome of each test that has ended, by its id; the last one of several counts."""
    lines = results.read_text().splitlines() if results.is_file() else []
    found = [json.loads(line) for line in lines if line.endswith("]")]  # else cut off, or a header
    return dict(found)


def counts(results: Path) -> dict[str, int]:
    """The numbers of tests that passed, failed and were skipped."""
    found = Counter(outcomes(results).values())
    return {name: found[name] for name in ("passed", "failed", "skipped")}


def begun(number: int, about: dict[str, object], results: Path = RESULTS) -> Path:
    """The file of a round's outcomes: as a run about the same left it, else a new one. It begins
    with a line that says what it is about."""
    path = results / f"round-{number}.jsonl"
    header = json.dumps(about, sort_keys=True) + "\n"
    if not (path.is_file() and path.read_text().startswith(header)):
        results.mkdir(parents=True, exist_ok=True)
        path.write_text(header)
    return path


def run_round(number: int, path: Path, pytest_arguments: list[str]) -> int:
    """Run the tests of a round that have no outcome in the file; returns pytest's exit code."""
    files = [path]
    if "OUT" in os.environ:  # what comes back from a lent machine, also when its time is up
        files.append(Path(shutil.copy(path, os.environ["OUT"])))
    beside = ["-n", str(num_workers()), "--dist", "worksteal"] if number > 1 else []
    command = [sys.executable, "-m", "pytest", "-m", ROUNDS[number], *beside, "-p", "gpu_results"]
    command += [*(f"--results={file}" for file in files), *pytest_arguments]
    paths = [str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    code = subprocess.run(command, cwd=ROOT, check=False, env=environment).returncode
    return 0 if code == _NOTHING_LEFT and outcomes(path) else code


def machine() -> dict[str, str | None]:
    import torch
    import triton

    if not torch.cuda.is_available():
        raise SystemExit(
            "gpu-test: torch sees no CUDA GPU; run on a GPU machine or use `make test`"
        )
    return {
        "gpu": torch.cuda.get_device_name(0),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def library_built_here(library: Path = LIBRARY, built: Path = BUILT) -> dict[str, object]:
    """With what the library of csrc/ was built from source on this machine, and in what time."""
    record: dict[str, object] = json.loads(built.read_text()) if built.is_file() else {}
    there = library.is_file() and hashlib.sha256(library.read_bytes()).hexdigest()
    if not there or record.get("sha256") != there:
        raise SystemExit(
            f"gpu-test: {library} was not built here from source; run tools/gpu.sh test"
        )
    return record


def num_workers() -> int:
    """Processes that run tests beside each other, by the memory of all GPUs."""
    import torch

    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return sum(max(1, gpu.total_memory // BYTES_A_WORKER) for gpu in gpus)


def rounds_so_far(about: dict[str, object]) -> dict[str, dict[str, int]]:
    """Counts of the rounds that the stamp has, if it is about the same: sources, such a machine,
    and arguments, which may leave tests out."""
    record = json.loads(STAMP.read_text()) if STAMP.is_file() else {}
    same = all(record.get(name) == value for name, value in about.items())
    rounds: dict[str, dict[str, int]] = record.get("rounds", {}) if same else {}
    return rounds


def run(numbers: list[int], pytest_arguments: list[str]) -> int:
    """Run these rounds of the GPU tests, write the stamp, return the larger of pytest's exit
    codes. A round that did not come to its end leaves no stamp."""
    versions = machine()
    built = library_built_here()
    digests = source_digests()
    about = {**versions, "arguments": pytest_arguments, "digest": combined_digest(digests)}
    rounds, codes = rounds_so_far(about), []
    for number in numbers:
        path = begun(number, about)
        codes.append(run_round(number, path, pytest_arguments))
        if codes[-1] not in _RAN:
            return codes[-1]
        rounds[ROUNDS[number]] = counts(path)
    total: Counter[str] = Counter()
    for found in rounds.values():
        total.update(found)
    record = {
        **total,
        **about,
        "csrc_built_from_source": built,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "rounds": rounds,
        "sources": digests,
    }
    STAMP.parent.mkdir(parents=True, exist_ok=True)
    draft = STAMP.with_suffix(".tmp")
    draft.write_text(json.dumps(record, indent=1) + "\n")
    draft.replace(STAMP)
    print(f"wrote {STAMP.relative_to(ROOT)}: {total}")
    return max(codes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["run", "check"])
    parser.add_argument("--round", type=int, choices=ROUNDS, help="one round only")
    arguments, pytest_arguments = parser.parse_known_args()
    if arguments.command == "run":
        numbers = [arguments.round] if arguments.round else list(ROUNDS)
        raise SystemExit(run(numbers, pytest_arguments))
    print(notice())


if __name__ == "__main__":
    main()
