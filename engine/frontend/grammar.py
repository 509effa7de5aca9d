"""Checks grammars of structured output before anything is queued; ``grammar_sources`` has them."""

from __future__ import annotations

from ...config import MachineError, UserError
from .grammar_sources import choice_grammar, json_grammar, regex_grammar

__all__ = ["check_grammar", "choice_grammar", "json_grammar", "regex_grammar"]

_MOST_CHARACTERS = 256 * 1024


def check_grammar(grammar: str) -> None:
    """Compile a grammar without a tokenizer; the work is limited.

    Raises:
        UserError: it is bad, or too large.
        MachineError: llguidance is not installed.
    """
    if len(grammar) > _MOST_CHARACTERS:
        raise UserError(f"grammar: {len(grammar)} characters, expected {_MOST_CHARACTERS} at most")
    try:
        from llguidance import LLMatcher
    except ModuleNotFoundError as error:
        raise MachineError(
            "a grammar needs the package llguidance: pip install 'fusewright[serve]'"
        ) from error
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise UserError(f"grammar: {' '.join(messages[0].split())[:500]}")
