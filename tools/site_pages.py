"""What ``mkdocs.yml`` calls to take the four documents of the root into the site.

README.md becomes the first page, the others pages beside those of
``docs/``; links between the root and ``docs/`` are turned round, so that each document is written
once and its links work on GitHub and on the site alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def on_files(files: Any, config: Any) -> Any:
    """Add the root's documents, with their links as they are inside of ``docs/``."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text().replace("](docs/", "](")
        for name, target in PAGES.items():
            text = text.replace(f"]({name}", f"]({target}")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead the links of a page of ``docs/`` to those documents."""
    for source, page in PAGES.items():
        markdown = markdown.replace(f"](../{source}", f"]({page}")
        markdown = markdown.replace(f"](../../{source}", f"](../{page}")
    return markdown
