"""Renders the measured tables of the documents from the result files, in place.

``python -m fusewright.benchmarks.report [--check] [--pictures] [--kernels PAGE] [--results DIR]``

A table stands between ``<!-- bench:TABLE RESULT ... -->`` and ``<!-- /bench -->``: TABLE is a key
of ``TABLES``, each RESULT a file of the results folder without its suffix. Every figure comes from
these files, and the line below a table says of which commit and day they are. Our own figures in a
table are all of one commit: those of an older one are left out until they are measured again.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ..bench import plots
from ..bench.charts import Picture, save
from ..bench.environment import ENGINE, ROOT, changed_since
from ..bench.result_file import Record, read_results
from ..config import UserError
from ..serve.console.table import table
from .evidence import ON_REQUEST, RESULTS, SUITES
from .kernel_page import load_all, markdown, picture
from .tables import TABLES, Result, latest

H200 = RESULTS / "h200"
PAGES = (
    "README.md",
    "docs/performance.md",
    "docs/passes.md",
    "docs/determinism.md",
    "docs/kernels.md",
)
KERNEL_RESULTS = ("kernels", "kernels-inductor")
PICTURES = {
    "tpot.png": ("latency-llama3-8b-bf16", "latency-llama3-8b-fp8", "latency-llama3.2-1b"),
    "growth.png": ("growth-llama3.2-1b",),
}
_MARKED = re.compile(r"(<!-- bench:([^\n]*?) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def load(path: Path) -> Result:
    """A result file.

    Raises:
        UserError: it cannot be read, or does not say where and when it was measured.
    """

    def checked(records: list[Record]) -> Result:
        full = path.resolve()
        shown = full.relative_to(ROOT).as_posix() if full.is_relative_to(ROOT) else path.name
        result = Result(shown, records)
        for name in ("device", "commit", "date"):
            result.newest[name]
        return result

    return read_results(path, "bench …", checked)


def render(text: str, results: Path, *, commits: bool = True) -> str:
    """A page with every marked table made anew.

    Args:
        commits: captions name the commit, as developers want it.

    Raises:
        UserError: a marker names a table or a result that is not there, or has no end.
    """
    if text.count("<!-- bench:") != len(_MARKED.findall(text)):
        raise UserError("a marker <!-- bench:… --> has no <!-- /bench --> behind it")

    def made(found: re.Match[str]) -> str:
        kind, *names = found[2].split()
        if kind not in TABLES:
            raise UserError(
                f"<!-- bench:{found[2]} -->: no table {kind}; known: {', '.join(TABLES)}"
            )
        chosen = _of_one_commit([load(_file(results, name)) for name in names])
        return f"{found[1]}\n{TABLES[kind](chosen)}\n\n{_caption(chosen, commits)}\n\n{found[3]}"

    return _MARKED.sub(made, text)


def _file(results: Path, name: str) -> Path:
    for path in (results / f"{name}.json", results / f"{name}.jsonl"):
        if path.is_file():
            return path
    raise UserError(f"{results} has no {name}.json or {name}.jsonl, which a page shows")


def _of_one_commit(results: Sequence[Result]) -> list[Result]:
    """The results that have our figures of the newest commit, or none of ours."""
    with_ours = [r for r in results if not all(f.get("library") for f in r.records[1:] or [{}])]
    newest = max((r.newest for r in with_ours), key=lambda e: str(e["date"]))["commit"]
    return [r for r in results if r not in with_ours or r.newest["commit"] == newest]


def _caption(results: Sequence[Result], commits: bool) -> str:
    """Device, commit, day, and repeats where they were recorded."""
    runs: dict[str, list[str]] = {}
    for result in results:
        e = result.newest
        versions = f", torch {e['torch']}, Triton {e['triton']}" if "torch" in e else ""
        commit = f"commit {e['commit']}, " if commits else ""
        about = f"{e['device']}{versions}; {commit}{e['date'][:10]}"
        runs.setdefault(about, []).append(f"`{result.path}`")
    said = "; ".join(f"{about}: {', '.join(files)}" for about, files in runs.items())
    rows = [row for r in results for record in r.records for row in record.get("rows", [record])]
    repeated = [row for row in rows if "n" in row and "spread" in row]
    if not repeated:
        return f"{said}."
    counts = "/".join(str(n) for n in sorted({row["n"] for row in repeated}))
    return f"{said}; n = {counts}, spread up to {max(r['spread'] for r in repeated):.1%}."


def freshness(results: Path) -> list[list[str]]:
    """File, commit, day and what of its sources has changed since, for every result."""
    rows = []
    for path in sorted(results.glob("*.json*")):
        result = load(path)
        suite = {**SUITES, **ON_REQUEST}.get(path.name)
        e = result.newest
        sources = suite.sources if suite else ENGINE
        changed = changed_since(e, sources)
        state = "unknown: no digests, and no such commit in git"
        if changed is not None:
            names = "all of them" if changed == [*sources] else ", ".join(changed)
            state = f"older than {names}" if changed else "as measured"
        rows.append([path.name, str(e["commit"]), str(e["date"])[:10], state])
    return rows


def rendered(results: Path = H200) -> dict[Path, str]:
    """The pages of the documents with their tables made from ``results``.

    Raises:
        UserError: as ``render``; or this is no checkout.
    """
    paths = [ROOT / page for page in PAGES]
    if not paths[0].is_file():
        raise UserError(f"{ROOT} has no README.md: run it from a checkout")
    return {
        path: render(path.read_text(), results, commits=path.name != "README.md") for path in paths
    }


def pictures(results: Path) -> dict[str, Picture]:
    """The pictures that the pages show, by their names in ``docs/``.

    Raises:
        UserError: a result is missing.
    """
    drawn = {
        "throughput.png": plots.picture(latest([load(_file(results, "peers"))], ["llama3-8b"]))
    }
    for name, files in PICTURES.items():
        records = {file.partition("-")[2]: load(_file(results, file)).records[0] for file in files}
        drawn[name] = plots.picture(records)
    kernels = load_all([_file(results, name) for name in KERNEL_RESULTS])[1]
    return {**drawn, "kernels.png": picture(kernels)}


def write_kernels(results: Path, page: Path) -> None:
    """Write every figure of every kernel to a page, with a plot beside it.

    Raises:
        UserError: a result is missing, or they are of different machines.
    """
    environment, found = load_all([_file(results, name) for name in KERNEL_RESULTS])
    beside = page.with_suffix(".png")
    page.write_text(markdown(environment, found, beside.name))
    save(picture(found), beside)


def main(argv: Sequence[str] | None = None) -> int:
    """Render the pages and list which results are old; 1 if ``--check`` finds an old page."""
    parser = argparse.ArgumentParser(prog="python -m fusewright.benchmarks.report")
    parser.add_argument("--results", type=Path, default=H200, help="folder of one GPU's results")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page is old")
    parser.add_argument("--pictures", action="store_true", help="draw docs/*.png too")
    parser.add_argument("--kernels", type=Path, metavar="PAGE", help="only write all figures there")
    options = parser.parse_args(argv)
    if options.kernels is not None:
        write_kernels(options.results, options.kernels)
        return 0
    rows = [["result", "commit", "measured", "its sources"], *freshness(options.results)]
    print(table(rows) + "\n")
    pages = rendered(options.results)
    if options.pictures and not options.check:
        for name, each in pictures(options.results).items():
            save(each, ROOT / "docs" / name)
    changed = [path for path, text in pages.items() if path.read_text() != text]
    for path in () if options.check else changed:
        path.write_text(pages[path])
    names = ", ".join(path.name for path in changed)
    verb = "not as rendered" if options.check else "wrote"
    print(f"{verb}: {names}" if names else "no page changed")
    return int(options.check and bool(changed))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
