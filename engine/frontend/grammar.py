"""Grammars of structured output: ``grammar_sources`` makes them, and ``check_grammar`` tries one
without a model."""

from __future__ import annotations

from functools import cache

from ..grammar.checks import GrammarChecks
from ..grammar.wire import BYTES, Setup
from .grammar_sources import choice_grammar, form_grammar, json_grammar, regex_grammar

__all__ = ["check_grammar", "choice_grammar", "form_grammar", "json_grammar", "regex_grammar"]


@cache
def _byte_checks() -> GrammarChecks:
    return GrammarChecks(Setup(BYTES, 262, [261]))


def check_grammar(grammar: str) -> None:
    """Try a grammar with a tokenizer of single bytes, in a process of its own.

    Raises:
        UserError: it is bad, too large, or takes too long.
        MachineError: llguidance is not installed.
    """
    _byte_checks().check(grammar)
