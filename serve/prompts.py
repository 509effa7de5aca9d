"""Prompts from flags and files: text, or token ids, in the order given."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import UserError

TextOrIds = str | list[int]


def read_prompts(texts: Sequence[str], file: str | None) -> list[TextOrIds]:
    """Those of ``-p`` first, then those of ``--prompts-file``.

    Raises:
        UserError: there is none, or the file cannot be read as prompts.
    """
    prompts: list[TextOrIds] = list(texts)
    if file is not None:
        prompts += _from_file(file)
    if not prompts:
        raise UserError("no prompt: give -p TEXT, or --prompts-file FILE with one prompt a line")
    return prompts


def _from_file(file: str) -> list[TextOrIds]:
    """Blank lines separate nothing and are skipped; ``-`` is standard input."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"--prompts-file {file}: {reason}; give a readable text file") from None
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if file.endswith(".jsonl"):
        return [_from_json(f"{file}:{n}", line) for n, line in lines]
    return [line.removesuffix("\r") for _, line in lines]


def _from_json(where: str, line: str) -> TextOrIds:
    expected = 'expected {"prompt": "text"} or {"prompt_token_ids": [1, 2]}'
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg}); {expected}") from None
    given = set(record) & {"prompt", "prompt_token_ids"} if isinstance(record, dict) else set()
    if len(given) != 1:
        raise UserError(f"{where}: {expected}")
    prompt = record[given.pop()]
    # bool is an int to isinstance, but true is no token.
    if "prompt" in record and isinstance(prompt, str):
        return prompt
    if "prompt" not in record and isinstance(prompt, list) and all(type(t) is int for t in prompt):
        return prompt
    raise UserError(f"{where}: {expected}")
