"""How many lines each folder may have: ``tests/line_budget.toml``, which the layout test enforces.

``make lines`` sets every budget to what is there.  A folder that has grown needs a reason, which is
kept beside its budget: ``make lines REASON='attention: sinks, issue 51'``.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "line_budget.toml"
PACKAGE = (
    "config",
    "ops",
    "passes",
    "compiler",
    "graph_capture",
    "model_executor",
    "engine",
    "serve",
)
"""The folders that issue 46 counts as the package."""
BESIDE = ("bench", "benchmarks", "csrc", "tools")
_SUFFIXES = {".py", ".cu", ".cuh", ".cpp", ".h"}
_SLACK = 0.02
"""A budget may be above the count by this share, and by ``_FEW`` lines in small folders."""
_FEW = 20
_HEAD = """\
# The most lines that the sources of a folder may have, and why the budget was last raised.
# `make lines` writes this file; `make lines REASON='...'` if a folder has grown.
"""


class Budget(NamedTuple):
    lines: int
    reason: str


def count_lines() -> dict[str, int]:
    """Folder -> lines of its sources; the rooms of ``tests/`` count by themselves."""
    rooms = sorted({path.relative_to(ROOT / "tests").parts[0] for path in _sources("tests")})
    tests = [f"tests/{name}" for name in rooms if not name.endswith(".py")]
    counts = {name: _lines(_sources(name)) for name in (*PACKAGE, *BESIDE, *tests)}
    counts["tests"] = _lines([*(ROOT / "tests").glob("*.py")])
    return counts


def _sources(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*") if path.suffix in _SUFFIXES]


def _lines(paths: list[Path]) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in paths)


def read_budgets(path: Path = FILE) -> dict[str, Budget]:
    return {name: Budget(*row) for name, row in tomllib.loads(path.read_text()).items()}


def misfits(counts: Mapping[str, int], budgets: Mapping[str, Budget]) -> list[str]:
    """Returns a line for each budget that does not fit."""
    wrong = [f"{name}: has no budget" for name in counts.keys() - budgets.keys()]
    wrong += [f"{name}: has a budget, and no sources" for name in budgets.keys() - counts.keys()]
    for name in counts.keys() & budgets.keys():
        count, most = counts[name], budgets[name].lines
        if count > most:
            wrong.append(f"{name}: {count} lines, at most {most}; make lines REASON='why more'")
        elif most - count > max(_FEW, _SLACK * count):
            wrong.append(f"{name}: {count} lines, and a budget of {most}; make lines lowers it")
    return sorted(wrong)


def renewed(
    counts: Mapping[str, int], budgets: Mapping[str, Budget], reason: str
) -> dict[str, Budget]:
    """Budgets of what is there; the reason goes to the folders that have grown.

    Raises:
        ValueError: a folder has grown, and there is no reason.
    """
    new = {}
    for name, count in counts.items():
        old = budgets.get(name, Budget(0, ""))
        if count > old.lines and not reason:
            raise ValueError(f"{name} grows from {old.lines} to {count} lines: say REASON='why'")
        new[name] = Budget(count, reason if count > old.lines else old.reason)
    return new


def main() -> None:
    parser = argparse.ArgumentParser(description="Set every line budget to what is there.")
    parser.add_argument("--reason", default="", help="why folders have grown, for those that have")
    reason = parser.parse_args().reason
    counts = count_lines()
    try:
        new = renewed(counts, read_budgets(), reason.replace('"', "'"))
    except ValueError as error:
        sys.exit(f"error: {error}")
    rows = (f'"{name}" = [{each.lines}, "{each.reason}"]\n' for name, each in sorted(new.items()))
    FILE.write_text(_HEAD + "".join(rows))
    tests = sum(count for name, count in counts.items() if name.startswith("tests"))
    print(f"package {sum(counts[name] for name in PACKAGE)} lines, tests {tests}: see {FILE.name}")


if __name__ == "__main__":
    main()
