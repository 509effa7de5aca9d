"""The documents lead where they say: every relative link is a file, every named result is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
RESULT = re.compile(r"bench/results/[\w./-]+\.jsonl?")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_results_of_a_page_are_there(page: Path) -> None:
    text = page.read_text()
    missing = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    missing += [name for name in RESULT.findall(text) if not (ROOT / name).exists()]
    assert not missing


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(LINK.findall((ROOT / "README.md").read_text()))
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= linked
