"""Calls as DeepSeek writes them: a name and JSON between marks.

V3 and R1 write ``CALL function SEP NAME``, a fence of JSON and ``CALL_END``; V3.1 writes
``CALL NAME SEP {…} CALL_END``.  ``CALLS`` and ``CALLS_END`` are around all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .call_json import strict_json
from .json_scan import JsonScan, Scan


def _mark(words: str) -> str:
    """A mark of DeepSeek's, which has a bar and blanks of its own."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


CALLS, CALLS_END = _mark("tool calls begin"), _mark("tool calls end")
_CALL, _CALL_END, _SEP = _mark("tool call begin"), _mark("tool call end"), _mark("tool sep")
_FENCED = rf"function{_SEP}(?P<fenced>[^\n<]+)\n\s*```(?:json)?\s*"
_PLAIN = rf"(?P<plain>[^\n<]+){_SEP}\s*"
_HEAD = re.compile(rf"{_CALL}\s*(?:{_FENCED}|{_PLAIN})(?=\{{)")
_TAIL = re.compile(rf"\s*(?:```)?\s*{_CALL_END}")
_MOST_HEAD, _MOST_TAIL = 400, 60
"""Characters within which a head or a tail is complete."""


class FencedScan(Scan):
    """Reads one call, from mark to mark."""

    def __init__(self) -> None:
        super().__init__()
        self._name = ""
        self._json = JsonScan()
        self._arguments: list[str] = []

    def _step(self, text: str, at: int) -> tuple[int, bool]:
        if self._json.is_done:
            return self._between(_TAIL, _MOST_TAIL, text, at)
        if not self._name:
            return self._between(_HEAD, _MOST_HEAD, text, at)
        end = self._json.feed(text, at)
        self._arguments.append(text[at:end])
        self.is_bad = self._json.is_bad
        return end, self._json.is_done

    def _between(self, pattern: re.Pattern[str], most: int, text: str, at: int) -> tuple[int, bool]:
        match = pattern.match(text, at)
        if match is None:
            self.is_bad = len(text) - at > most
            return at, False
        if pattern is _TAIL:
            self.is_done = True
        else:
            self._name = (match["fenced"] or match["plain"]).strip()
        return match.end(), True

    def call(self, schemas: Mapping[str, Any]) -> tuple[str, str]:
        """Name and arguments.

        Raises:
            ValueError: they are no JSON that all parsers read.
        """
        return self._name, strict_json("".join(self._arguments))
