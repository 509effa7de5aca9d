"""Draws one-token edits of the sources and runs the tests that cover them: `make mutants`.

An edit that all tests survive is a line that no test holds, or one that changes nothing.  What
draws inputs of tests is not edited: functions that return a `Case`, and files of cases.  Sources
are edited in temporary copies of the checkout, one a job, and never in the checkout itself.  Edits
and their order follow from the seed.  `tests/mutants.toml` says which tests cover which source.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from itertools import islice, pairwise, zip_longest
from pathlib import Path
from queue import SimpleQueue

from rich.progress import Progress

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = ("build", ".git", ".venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache")
_OPERATORS = {
    "<": ("<=",), "<=": ("<",), ">": (">=",), ">=": (">",), "==": ("!=",), "!=": ("==",),
    "is": ("is not",), "is not": ("is",), "in": ("not in",), "not in": ("in",),
    "+": ("-",), "-": ("+",), "*": ("/",), "/": ("*",), "//": ("*",), "%": ("//",), "**": ("*",),
    "|": ("&",), "&": ("|",), "<<": (">>",), ">>": ("<<",), "and": ("or",), "or": ("and",),
}  # fmt: skip
_SYMBOL = re.compile(r"is\s+not\b|not\s+in\b|(?:is|in|and|or)\b|<<|>>|\*\*|//|[<>=!]=|[-<>+*/%|&]")
_SAID, _TOLD = "build/said.txt", ("result", "test", "seconds")
_LEAST_SECONDS, _TIMES_BASELINE = 60.0, 3.0


@dataclass(frozen=True)
class Edit:
    """One edit of a file: ``before``, at these offsets in its bytes, becomes ``after``."""

    file: str
    line: int
    start: int
    stop: int
    before: str
    after: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.stop :]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before} -> {self.after or '(nothing)'}"


@dataclass(frozen=True)
class Outcome:
    """What became of an edit: "killed", by ``test``, "timeout" or "survived"."""

    edit: Edit
    result: str
    test: str
    seconds: float


class _Finder:
    """Lists the edits of one file, in the order of its syntax tree."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source = file, source
        lengths = [len(line) for line in source.splitlines(keepends=True)]
        self.starts = [sum(lengths[:n]) for n in range(len(lengths) + 1)]

    def span(self, node: ast.AST) -> tuple[int, int]:
        first = self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        last = self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return first, last

    def text(self, node: ast.AST) -> str:
        first, last = self.span(node)
        return self.source[first:last].decode()

    def edit(self, line: int, start: int, stop: int, after: str) -> Edit:
        before = self.source[start:stop].decode()
        return Edit(self.file, line, start, stop, before, after)

    def whole(self, node: ast.expr, after: str) -> Edit:
        return self.edit(node.lineno, *self.span(node), after)

    def visit(self, node: ast.AST) -> Iterator[Edit]:
        """The edits in a node.  Annotations, messages, texts, cases and guards decide nothing."""
        match node:
            case ast.JoinedStr() | ast.Raise() | ast.Assert():
                return
            case ast.keyword(arg="strict", value=ast.Constant(value=True)):
                return
            case ast.FunctionDef(returns=ast.expr() as made) if "Case" in self.text(made):
                return
        yield from self.of(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self.visit(child)

    def of(self, node: ast.AST) -> Iterator[Edit]:
        match node:
            case ast.Compare(left=left, comparators=others):
                yield from self.between([left, *others])
            case ast.BoolOp(values=values):
                yield from self.between(values)
            case ast.BinOp(left=left, right=right):
                kinds = {type(getattr(v, "value", v)) for v in (left, right)}
                if not kinds & {ast.JoinedStr, ast.List, str, bytes}:
                    yield from self.between([left, right])
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                yield self.whole(node, self.text(operand))
            case ast.Constant(value=bool(value)):
                yield self.whole(node, str(not value))
            case ast.Constant(value=int(value)):
                yield self.whole(node, str(value + 1))
                yield self.whole(node, str(value - 1))
            case ast.Constant(value=float(value)) if value:
                yield self.whole(node, repr(value * 10))
            case ast.Call():
                yield from self.of_call(node)
            case ast.IfExp(body=body, orelse=other):
                if self.text(body) != self.text(other):
                    test = self.text(node.test)
                    yield self.whole(node, f"{self.text(other)} if {test} else {self.text(body)}")

    def between(self, operands: Sequence[ast.expr]) -> Iterator[Edit]:
        """Other operators between operands that follow one another."""
        for left, right in pairwise(operands):
            start, stop = self.span(left)[1], self.span(right)[0]
            found = _SYMBOL.search(self.source[start:stop].decode())
            if found is None:
                continue
            symbol = " ".join(found[0].split())
            at = start + found.start()
            line = left.end_lineno or left.lineno
            for other in _OPERATORS.get(symbol, ()):
                yield self.edit(line, at, at + len(found[0]), other)

    def of_call(self, call: ast.Call) -> Iterator[Edit]:
        """The first two arguments in turn, and each keyword left out."""
        plain = [arg for arg in call.args if not isinstance(arg, ast.Starred)]
        one, other = map(self.text, plain[:2]) if len(plain) > 1 else ("", "")
        symmetric = self.text(call.func).rpartition(".")[2] in ("max", "min", "transpose")
        if plain == call.args and one != other and not symmetric:
            start, stop = self.span(plain[0])[0], self.span(plain[1])[1]
            yield self.edit(plain[0].lineno, start, stop, f"{other}, {one}")
        for keyword in call.keywords:
            if keyword.arg in (None, "strict") or self.text(call.func) in ("dataclass", "field"):
                continue
            start, stop = self.span(keyword)
            comma = re.match(rb"\s*,\s*", self.source[stop:])
            yield self.edit(keyword.lineno, start, stop + (comma.end() if comma else 0), "")


def edits_of(file: str, source: bytes) -> list[Edit]:
    """Every edit of a file; a few do not parse."""
    return list(_Finder(file, source).visit(ast.parse(source)))


def _parsing(edits: Sequence[Edit], sources: Mapping[str, bytes]) -> Iterator[Edit]:
    for edit in edits:
        with suppress(SyntaxError):
            ast.parse(edit.apply(sources[edit.file]))
            yield edit


def draw(root: Path, paths: Sequence[str], count: int, seed: int) -> list[Edit]:
    """``count`` edits of the files at or below ``paths``: of each path the same share, in which
    every edit is as likely as any other.  Paths take turns, so that any first part is even too."""
    shares: list[Iterator[Edit]] = []
    for path in paths:
        files = [root / path] if path.endswith(".py") else sorted((root / path).rglob("*.py"))
        edited = (file for file in files if not file.stem.endswith("_cases"))
        sources = {str(file.relative_to(root)): file.read_bytes() for file in edited}
        found = [edit for file, source in sources.items() for edit in edits_of(file, source)]
        random.Random(f"{seed} {path}").shuffle(found)
        shares.append(_parsing(found, sources))
    turns = (edit for turn in zip_longest(*shares) for edit in turn if edit is not None)
    return list(islice(turns, count))


@dataclass(frozen=True)
class Covers:
    """Which tests cover which source; see ``tests/mutants.toml``."""

    preload: tuple[str, ...]
    options: tuple[str, ...]
    table: tuple[tuple[str, tuple[str, ...]], ...]

    @staticmethod
    def read(path: Path) -> Covers:
        data = tomllib.loads(path.read_text())
        rows = tuple((pattern, tuple(tests)) for pattern, tests in data["covers"].items())
        return Covers(tuple(data["preload"]), tuple(data["options"]), rows)

    def tests(self, file: str) -> tuple[str, ...]:
        """The tests of a file, quickest first: those of every pattern that it fits, in which
        ``{stem}`` is the name of the file.

        Raises:
            SystemExit: there are none.
        """
        rows = (tests for pattern, tests in self.table if fnmatch(file, pattern))
        found = [test.replace("{stem}", Path(file).stem) for tests in rows for test in tests]
        if not found:
            raise SystemExit(f"{file}: no pattern in tests/mutants.toml names its tests; add one")
        return tuple(dict.fromkeys(found))


class Copy:
    """A copy of the checkout, which wins over an editable install; one edit at a time is in it."""

    def __init__(self, root: Path, folder: Path, covers: Covers) -> None:
        self.folder, self.options = folder / root.name, covers.options
        shutil.copytree(root, self.folder, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        package = self.folder / "build" / "pkgroot"
        package.mkdir(parents=True)
        (package / "fusewright").symlink_to(self.folder)
        kept = "[each for each in sys.meta_path if '_editable_' not in type(each).__module__]"
        (package / "sitecustomize.py").write_text(f"import sys\nsys.meta_path[:] = {kept}\n")
        own = {"PYTHONPATH": str(package), "TMPDIR": str(folder), "PYTHONSAFEPATH": "1"}
        caches = {name: str(folder / name) for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR")}
        env = {**os.environ, **own, **caches, "OMP_NUM_THREADS": "1"}
        server = [sys.executable, str(Path(__file__).resolve()), "--serve", *covers.preload]
        self.process = subprocess.Popen(
            server, cwd=self.folder, env=env, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.changes = 0

    def close(self) -> None:
        self.process.communicate()

    def run(self, tests: Sequence[str], limit: float) -> tuple[str, str]:
        """Run tests until the first failure; returns the result and what failed."""
        assert self.process.stdin and self.process.stdout
        command = ["-x", "-q", "-p", "no:cacheprovider", *self.options, *tests]
        print(json.dumps([command, limit]), file=self.process.stdin, flush=True)
        status = int(self.process.stdout.readline())
        if status == 0:
            return "survived", ""
        if status in (-signal.SIGXCPU, -signal.SIGKILL, -signal.SIGALRM):
            return "timeout", f"more than {limit:.0f} s"
        said = (self.folder / _SAID).read_text(errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
        return "killed", failed[1] if failed else said.strip()[-300:]

    def test(self, edit: Edit, tests: Sequence[str], limit: float) -> Outcome:
        start = time.monotonic()
        path = self.folder / edit.file
        source = path.read_bytes()
        try:
            self._write(path, edit.apply(source))
            result, test = self.run(tests, limit)
        finally:
            self._write(path, source)
        return Outcome(edit, result, test, round(time.monotonic() - start, 1))

    def _write(self, path: Path, source: bytes) -> None:
        """Write a source as of a second of its own, so that no compiled file is taken for it."""
        path.write_bytes(source)
        self.changes += 1
        os.utime(path, (self.changes, self.changes))


def serve(preload: Sequence[str]) -> None:
    """Run pytest in forks of this process, which has imported what takes long: one for each line of
    standard input, with its arguments and the seconds of processor time that it may take."""
    os.environ["TRITON_INTERPRET"] = "1"  # as tests/conftest.py; Triton reads it when imported
    for module in ("pytest", *preload):
        importlib.import_module(module)
    for line in sys.stdin:
        arguments, limit = json.loads(line)
        pid = os.fork()
        if pid == 0:
            seconds = math.ceil(limit)
            signal.alarm(20 * seconds)  # if it waits and computes nothing
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
            output = os.open(_SAID, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for number in (1, 2):
                os.dup2(output, number)
            sys.path = [os.environ["PYTHONPATH"], *(p for p in sys.path if "tools" not in p)]
            os._exit(int(importlib.import_module("pytest").main(arguments)))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def run(
    root: Path, edits: Sequence[Edit], covers: Covers, jobs: int, limit: float | None = None
) -> Iterator[Outcome]:
    """Test the edits, several at once; outcomes come in the order of the edits.

    Args:
        limit: seconds of processor time that the tests of an edit may take.  None: a few times
            the seconds that they take without any edit, which is tried first.

    Raises:
        SystemExit: tests fail without any edit.
    """
    wanted = dict.fromkeys(covers.tests(edit.file) for edit in edits)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for job in range(jobs):
            copies.put(Copy(root, Path(folder) / str(job), covers))

        def baseline(tests: tuple[str, ...]) -> float:
            copy, start = copies.get(), time.monotonic()
            try:
                result, failed = copy.run(tests, 3600.0)
            finally:
                copies.put(copy)
            if result != "survived":
                raise SystemExit(f"without any edit, {failed} fails in: {shlex.join(tests)}")
            return max(_LEAST_SECONDS, _TIMES_BASELINE * (time.monotonic() - start))

        limits = dict.fromkeys(wanted, limit or 0.0)
        if limit is None:
            limits = dict(zip(wanted, pool.map(baseline, wanted), strict=True))

        def one(edit: Edit) -> Outcome:
            tests, copy = covers.tests(edit.file), copies.get()
            try:
                return copy.test(edit, tests, limits[tests])
            finally:
                copies.put(copy)

        yield from pool.map(one, edits)
        for _ in range(jobs):
            copies.get().close()


def table(outcomes: Sequence[Outcome]) -> str:
    """The counts, and a line for each survivor."""
    survivors = [outcome for outcome in outcomes if outcome.result == "survived"]
    killed = len(outcomes) - len(survivors)
    lines = [f"{len(outcomes)} edits: {killed} killed, {len(survivors)} survived"]
    return "\n".join([*lines, *(f"  {outcome.edit}" for outcome in survivors)])


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 1 if an edit survived."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    folders = ["passes", "compiler/lowering", "compiler/capture", "ops", "graph_capture"]
    parser.add_argument("--paths", nargs="+", default=folders, help="files and folders to edit")
    parser.add_argument("--count", type=int, default=200, help="edits to draw")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--first", type=int, default=0, help="skip this many of the draw")
    parser.add_argument("--jobs", type=int, default=2, help="tests to run at once")
    parser.add_argument("--limit", type=float, help="seconds an edit; without: tests run first")
    parser.add_argument("--serve", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "mutants.json")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout")
    options = parser.parse_args(argv)
    if options.serve is not None:
        serve(options.serve)
        return 0
    edits = draw(options.root, options.paths, options.count, options.seed)[options.first :]
    covers = Covers.read(options.root / "tests" / "mutants.toml")
    outcomes: list[Outcome] = []
    with Progress() as progress:
        tested = run(options.root, edits, covers, options.jobs, options.limit)
        for outcome in progress.track(tested, len(edits), description="edits"):
            outcomes.append(outcome)
            if outcome.result == "survived":
                progress.console.print(f"survived: {outcome.edit}", highlight=False)
            _save(options, outcomes)
    print(table(outcomes), f"details: {options.output}", sep="\n")
    return int(any(outcome.result == "survived" for outcome in outcomes))


def _save(options: argparse.Namespace, outcomes: Sequence[Outcome]) -> None:
    """Written after each edit: a run that is cut short has its part."""
    options.output.parent.mkdir(parents=True, exist_ok=True)
    facts = {name: getattr(options, name) for name in ("seed", "count", "paths")}
    rows = [{**asdict(one.edit), **{n: getattr(one, n) for n in _TOLD}} for one in outcomes]
    options.output.write_text(json.dumps({**facts, "edits": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
