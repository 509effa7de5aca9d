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
import yaml

from fusewright import __version__
from fusewright.serve.cli import app
from fusewright.serve.commands.explain import levels_table

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ROOT_NAMES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
ROOT_PAGES = [ROOT / name for name in ROOT_NAMES]
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
    of_the_root = {"index.md", *(name.lower() for name in ROOT_NAMES[1:])}
    assert listed == written | of_the_root


def test_the_pages_of_the_root_stay_short() -> None:
    lines = {page.name: len(page.read_text().splitlines()) for page in ROOT_PAGES}
    assert lines["README.md"] <= 130
    assert lines["ARCHITECTURE.md"] <= 190
    assert lines["CONTRIBUTING.md"] <= 80
    assert lines["CHANGELOG.md"] <= 200


def user_pages() -> Iterator[Path]:
    """README, the changelog, and what the navigation lists under "Use it"."""
    yield from (ROOT_PAGES[0], ROOT_PAGES[-1])
    text = (
        (ROOT / "mkdocs.yml").read_text().partition("- Use it:")[2].partition("- How it works:")[0]
    )
    for name in re.findall(r": ([\w-]+\.md)$", text, re.M):
        if (DOCS / name).exists():
            yield DOCS / name


COMMIT = re.compile(r"\b(?!ed25519)(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{7,40}\b")
ISSUE = re.compile(r"(?<![\w&/])#\d+|\bissues? \d+", re.I)
SOURCE = re.compile(
    r"\b(?:bench|benchmarks|compiler|config|csrc|engine|graph_capture|model_executor|ops|passes|serve"
    r"|tests|tools)/[\w/.-]+\.(?:py|cuh?|cpp)\b"
)


@pytest.mark.parametrize("page", [*user_pages()], ids=name_of)
def test_a_page_for_users_names_no_commit_no_issue_and_no_source_file(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)  # a log has ids
    assert not [*COMMIT.findall(text), *ISSUE.findall(text), *SOURCE.findall(text)]


def test_commits_issues_and_source_files_are_found() -> None:
    assert COMMIT.findall("at 782041b, 1a60b2aef0, ed25519, 4096 and facade") == [
        *("782041b", "1a60b2aef0")
    ]
    assert ISSUE.findall("see #12, issue 48, [x](a.md#3)") == ["#12", "issue 48"]
    assert SOURCE.findall("`ops/linear/linear.py`, examples/a.py") == ["ops/linear/linear.py"]


def test_the_workflow_runs_what_ci_is() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert ".ci/run" in [step.get("run") for step in steps]
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())


@pytest.mark.parametrize("name", ["bug", "feature", "model"])
def test_an_issue_template_asks_for_what_is_needed(name: str) -> None:
    form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
    assert {"name", "description", "body"} <= set(form)
    assert any(field["validations"]["required"] for field in form["body"] if "validations" in field)
    labels = " ".join(
        f"{field['attributes']['label']} {field['attributes'].get('description', '')}"
        for field in form["body"]
    )
    for command in re.findall(r"`fusewright (.*?)`", labels):
        parse_fusewright(shlex.split(command))


def test_the_version_is_one_and_the_changelog_has_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", ROOT_PAGES[-1].read_text(), re.M)
    assert versions[0] == __version__


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
@pytest.mark.usefixtures("warm")
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
    if words[0] in {"docker", "torchrun"} and "fusewright" in words:
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
            "docker",
            "openssl",
            "python3",
            "mkdir",
            "tar",
            "mv",
            "chmod",
            "lm-eval",
            "guidellm",
            "ray",
            "hf",
        } or ((ROOT / program).exists()), program


def test_an_unknown_flag_of_a_shown_command_is_found() -> None:
    with pytest.raises(Exception, match="--no-such-flag"):
        parse_fusewright(["run", "FOLDER", "--no-such-flag"])
