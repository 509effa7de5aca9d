"""What is refused before llguidance sees it: sizes that no grammar needs, named one by one, and
schemas that nothing satisfies."""

from __future__ import annotations

import re

from ...config import UserError
from .satisfiable import check_satisfiable

_MOST_CHARACTERS = 256 * 1024
_MOST_RULES = 10_000
_MOST_REFERENCES = 10_000
_MOST_REPEATS = 100_000
_RULE = re.compile(r"(?m)^\s*[?!]?[A-Za-z_]\w*(?:\[[^\]\n]*\])?(?:\.-?\d+)?\s*:")
_REFERENCE = re.compile(r'"\$(?:ref|dynamicRef|recursiveRef)"\s*:')
_LARK_TOKEN = re.compile(
    r'"(?:\\.|[^"\\\n])*"'  # a text
    r"|/((?:\\.|[^/\\\n])+)/"  # an expression
    r"|//[^\n]*"  # a comment
    r"|(\{\s*\d[\d,\s]*\})"  # a repetition
)
_REGEX_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d+)(?:,(\d*))?\}")
_PATTERN = re.compile(r'"pattern"\s*:\s*"((?:\\.|[^"\\])*)"')


def check_bounds(text: str) -> None:
    """Refuse what is larger than any grammar needs, or satisfied by nothing.

    Raises:
        UserError: it names what is too large, and the limit.
    """
    if len(text) > _MOST_CHARACTERS:
        raise UserError(f"grammar: {len(text)} characters, expected {_MOST_CHARACTERS} at most")
    if text.lstrip().startswith("{"):
        num_references = sum(1 for _ in _REFERENCE.finditer(text))
        if num_references > _MOST_REFERENCES:
            raise UserError(
                f"grammar: {num_references} references, expected {_MOST_REFERENCES} at most"
            )
        for pattern in _PATTERN.finditer(text):
            # As JSON writes it, a backslash is two.
            _check_repeats(pattern[1].replace("\\\\", "\\"))
        if num_references and (why := check_satisfiable(text)):
            raise UserError(f"grammar: {why}")
        return
    num_rules = sum(1 for _ in _RULE.finditer(text))
    if num_rules > _MOST_RULES:
        raise UserError(f"grammar: {num_rules} rules, expected {_MOST_RULES} at most")
    for token in _LARK_TOKEN.finditer(text):
        if token[1]:
            _check_repeats(token[1])
        elif token[2]:
            _check_counts(re.findall(r"\d+", token[2]))


def _check_repeats(pattern: str) -> None:
    for token in _REGEX_TOKEN.finditer(pattern):
        if token[1]:
            _check_counts([token[1], token[2] or "0"])


def _check_counts(counts: list[str]) -> None:
    for count in counts:
        if len(count) > 9 or int(count) > _MOST_REPEATS:
            raise UserError(
                f"grammar: repeats {count[:20]} times, expected {_MOST_REPEATS} at most"
            )
