"""Finds the end of a JSON value in text that comes in pieces.

A value is read character by character, as RFC 8259 has it, so its end and its first mistake are
known as soon as they have come, wherever the text is cut, and no character is read twice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

MAX_DEPTH = 128
"""Objects and lists inside each other; more are a mistake, since common parsers stop there."""
MAX_SCALAR = 4300
"""Characters of a number; Python reads no longer ones."""

_BLANKS = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_SCALAR_STARTS = frozenset("-0123456789tfn")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_CLOSES = {"{": "}", "[": "]"}


class _Expect(Enum):
    """What may come next."""

    VALUE = auto()
    FIRST_ITEM = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    COMMA = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    SCALAR = auto()


class Scan:
    """Reads one value in text that comes in pieces.

    Attributes:
        is_done: its end has been read.
        is_bad: what comes next cannot stand where it stands.
    """

    def __init__(self) -> None:
        self.is_done = self.is_bad = False

    def feed(self, text: str, at: int) -> int:
        """Read on at ``text[at]``; returns where reading ended.

        That is behind the value if it is done, at the mistake if there is one, else where more
        text is needed.
        """
        more = True
        while more and not (self.is_done or self.is_bad):
            at, more = self._step(text, at)
        return at

    def _step(self, text: str, at: int) -> tuple[int, bool]:
        """Read one thing; returns where it ends, and whether what comes next can be read."""
        raise NotImplementedError

    def call(self, schemas: Mapping[str, Any]) -> tuple[str, str]:
        """Name and arguments of a call that is no JSON; ``schemas`` are those of functions.

        Raises:
            ValueError: a value cannot be told in JSON.
        """
        raise NotImplementedError


class JsonScan(Scan):
    """Reads one object or list, to the end of each piece."""

    def __init__(self) -> None:
        super().__init__()
        self._expect = _Expect.VALUE
        self._open: list[str] = []
        self._is_key = False
        self._num_hex = 0
        self._scalar = ""

    def _step(self, text: str, at: int) -> tuple[int, bool]:
        if at == len(text):
            return at, False
        match self._expect:
            case _Expect.STRING:
                at = self._string(text, at)
            case _Expect.SCALAR:
                at = self._read_scalar(text, at)
            case _Expect.ESCAPE | _Expect.HEX:
                at = self._escape(text, at)
            case _:
                at = _end(_BLANKS, text, at)
                if at < len(text):
                    at = self._structure(text, at)
        return at, True

    def _structure(self, text: str, at: int) -> int:
        char, expect = text[at], self._expect
        takes_key = expect in (_Expect.KEY, _Expect.FIRST_KEY)
        takes_value = expect in (_Expect.VALUE, _Expect.FIRST_ITEM)
        can_close = expect in (_Expect.COMMA, _Expect.FIRST_KEY, _Expect.FIRST_ITEM)
        if char == '"' and (takes_key or (takes_value and self._open)):
            self._expect, self._is_key = _Expect.STRING, takes_key
        elif char in _CLOSES and takes_value and len(self._open) < MAX_DEPTH:
            self._open.append(char)
            self._expect = _Expect.FIRST_KEY if char == "{" else _Expect.FIRST_ITEM
        elif char in _SCALAR_STARTS and takes_value and self._open:
            self._expect, self._scalar = _Expect.SCALAR, ""
            return at
        elif char == ":" and expect is _Expect.COLON:
            self._expect = _Expect.VALUE
        elif char == "," and expect is _Expect.COMMA:
            self._expect = _Expect.KEY if self._open[-1] == "{" else _Expect.VALUE
        elif can_close and char == _CLOSES[self._open[-1]]:
            self._open.pop()
            self._expect, self.is_done = _Expect.COMMA, not self._open
        else:
            return self._mistake(at)
        return at + 1

    def _string(self, text: str, at: int) -> int:
        at = _end(_PLAIN, text, at)
        if at == len(text):
            return at
        if text[at] == '"':
            self._expect = _Expect.COLON if self._is_key else _Expect.COMMA
        elif text[at] == "\\":
            self._expect = _Expect.ESCAPE
        else:
            return self._mistake(at)
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        char = text[at]
        if self._expect is _Expect.ESCAPE and char == "u":
            self._expect, self._num_hex = _Expect.HEX, 4
        elif self._expect is _Expect.ESCAPE and char in _ESCAPES:
            self._expect = _Expect.STRING
        elif self._expect is _Expect.HEX and char in _HEX_DIGITS:
            self._num_hex -= 1
            self._expect = _Expect.HEX if self._num_hex else _Expect.STRING
        else:
            return self._mistake(at)
        return at + 1

    def _read_scalar(self, text: str, at: int) -> int:
        end = min(_end(_SCALAR_RUN, text, at), at + MAX_SCALAR - len(self._scalar))
        self._scalar += text[at:end]
        if len(self._scalar) == MAX_SCALAR:
            return self._mistake(end)
        if end < len(text):
            self._expect = _Expect.COMMA
            if not _SCALAR.fullmatch(self._scalar):
                return self._mistake(end)
        return end

    def _mistake(self, at: int) -> int:
        self.is_bad = True
        return at


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at
