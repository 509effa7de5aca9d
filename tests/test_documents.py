"""Claims about the documents: links lead somewhere, names are there, and commands can be typed.

Commands in fenced ``sh`` and ``bash`` blocks are given to the parser that would read them; nothing
of them runs, since many need a GPU or a model.  ``tests/container/test_baking.py`` runs the recipe
of ``docs/baking.md``.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from fusewright.serve.cli import app
from fusewright.serve.commands.explain import levels_table

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ROOT_PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
PAGES = [*ROOT_PAGES, *sorted(DOCS.rglob("*.md"))]
PRESENT = [page for page in PAGES if page.parent.name not in {"decisions", "lab"}]
"""Pages that describe the code as it is.  Decisions and lab notes name what was there then."""
LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]*))?\)")
RESULT = re.compile(r"(?<!:)bench/results/[\w./-]+\.jsonl?")  # not COMMIT:bench/results/…
BLOCK = re.compile(r"^```(?:sh|bash)\n(.*?)^```", re.M | re.S)
FILE = re.compile(r"`([\w/.-]+/[\w.-]+\.(?:py|cuh|cpp|cu|md|json|sh))`")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    plain = (re.sub(r"[^\w\s-]", "", title.lower()).strip() for title in titles)
    return {re.sub(r"\s+", "-", title) for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_results_of_a_page_are_there(page: Path) -> None:
    text = page.read_text()
    missing = [name for name in RESULT.findall(text) if not (ROOT / name).exists()]
    for link, anchor in LINK.findall(text):
        target = page.parent / link if link else page
        if not target.exists():
            missing.append(link)
        elif anchor and anchor not in anchors(target):
            missing.append(f"{link}#{anchor}")
    assert not missing


@pytest.mark.parametrize("page", PRESENT, ids=name_of)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    folders = (ROOT, ROOT / "model_executor", ROOT / "engine")
    missing = [
        name
        for name in FILE.findall(page.read_text())
        if not (name.endswith("/x.py") or any((folder / name).exists() for folder in folders))
    ]
    assert not missing


def test_the_picture_of_the_line_names_folders_that_are_there() -> None:
    named = re.findall(r">([\w/]+(?:/|\.py))<", (DOCS / "line.svg").read_text())
    assert len(named) >= 10
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    written = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert listed == written | {"index.md", "architecture.md", "contributing.md"}


def test_the_pages_of_the_root_stay_short() -> None:
    lines = {page.name: len(page.read_text().splitlines()) for page in ROOT_PAGES}
    assert lines["README.md"] <= 130
    assert lines["ARCHITECTURE.md"] <= 190
    assert lines["CONTRIBUTING.md"] <= 80


RECORDS = sorted(set((DOCS / "decisions").glob("*.md")) - {DOCS / "decisions" / "index.md"})


@pytest.mark.parametrize("record", RECORDS, ids=name_of)
def test_a_decision_is_a_screen_with_status_context_decision_and_evidence(record: Path) -> None:
    text = record.read_text()
    parts = re.findall(r"^\*\*(\w+)\.\*\*", text, re.M)
    assert parts == ["Status", "Context", "Decision", "Evidence"]
    assert len(text.splitlines()) <= 45
    title = text.splitlines()[0].removeprefix("# ")
    assert f"[{title}]({record.name})" in (record.parent / "index.md").read_text()


def test_the_levels_are_shown_as_the_command_prints_them() -> None:
    assert levels_table().strip() in (DOCS / "levels-and-fusions.md").read_text()


@pytest.mark.slow
def test_the_ten_lines_of_python_in_the_readme_run(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGES[0].read_text(), re.M | re.S)
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "37+58= 95 stop\nsort 5 3 9 1= 1 3 5 9 stop\n" in done.stdout


# Commands


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command in the page's fenced blocks, without what the shell adds."""
    for block in BLOCK.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(re.sub(r"^\w+=\$\((.*)\)$", r"\1", line), comments=True)
            if words:
                yield words[: words.index(">")] if ">" in words else words


SHOWN = [(page, words) for page in PAGES for words in commands(page)]


def parse_fusewright(arguments: list[str]) -> None:
    """Give the command line's own parser all words; it raises at what it does not know."""
    command: Any = typer.main.get_command(app)
    context, name = None, "fusewright"
    while True:
        parsed = command.make_context(name, list(arguments), parent=context, obj={"debug": False})
        if not hasattr(command, "resolve_command"):
            return
        rest = [*parsed._protected_args, *parsed.args]
        name, command, arguments = command.resolve_command(parsed, rest)
        context = parsed


def check_module(name: str, arguments: list[str]) -> None:
    """Whether ``python -m name`` is there and knows the flags; importing it would bring torch."""
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None, name
    path = Path(found.origin)
    source = (path.with_name("__main__.py") if path.name == "__init__.py" else path).read_text()
    for word in arguments:
        assert not word.startswith("-") or f'"{word}"' in source, word


def check_make(arguments: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    for word in arguments:
        assert "=" in word or word in targets, word


def check_pip(arguments: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert arguments[0] == "install"
    for word in arguments:
        for extra in re.findall(r"\[(.*)\]", word):
            assert set(extra.split(",")) <= set(extras), word


@pytest.mark.parametrize(
    ("page", "words"), SHOWN, ids=lambda value: value.name if isinstance(value, Path) else ""
)
def test_a_command_that_a_page_shows_can_be_typed(
    page: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if words[0] in {"podman", "torchrun"} and "fusewright" in words:
        words = words[words.index("fusewright") :]
    (program, *arguments) = words
    if program == "fusewright":
        for name in arguments:
            if re.fullmatch(r"[\w/-]+\.(jsonl?|txt|pem)", name):
                Path(name).touch()
        parse_fusewright(arguments)
    elif program == "python":
        assert arguments[0] == "-m"
        check_module(arguments[1], arguments[2:])
    elif program == "make":
        check_make(arguments)
    elif program == "pip":
        check_pip(arguments)
    else:
        assert program in {
            "curl",
            "git",
            "podman",
            "openssl",
            "python3",
            "mkdir",
            "tar",
            "mv",
            "chmod",
            "lm-eval",
            "guidellm",
            "ray",
        } or ((ROOT / program).exists()), program


def test_an_unknown_flag_of_a_shown_command_is_found() -> None:
    with pytest.raises(Exception, match="--no-such-flag"):
        parse_fusewright(["run", "FOLDER", "--no-such-flag"])
