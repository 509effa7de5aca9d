"""Calls as XML elements, as Qwen3-Coder writes them.

``<function=NAME> <parameter=KEY> VALUE </parameter> … </function>``.  Values are not escaped, so
one ends at the ``</parameter>`` behind which a parameter or the end of the function follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from .call_json import strict_json
from .json_scan import Scan

_MAX_TAG = 300
_BLANKS = re.compile(r"\s*")
_TAG = re.compile(
    r"<function=([^<>\n]{1,256})>|<parameter=([^<>\n]{1,256})>|</parameter>|</function>"
)
_NO_TAG = re.compile(r"[^<]|<[^<>\n]*[<>\n]")
_VALUE_END = "</parameter>"
_END = "</function>"
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class _Expect(Enum):
    """What may come next."""

    FUNCTION = auto()
    PARAMETER = auto()
    VALUE = auto()
    VALUE_OR_NEXT = auto()


class XmlScan(Scan):
    """Reads one function, to the end of each piece or to a tag that is cut there."""

    def __init__(self) -> None:
        super().__init__()
        self._expect = _Expect.FUNCTION
        self._name = self._key = ""
        self._parameters: dict[str, list[str]] = {}
        self._ended = ""
        """Text that ends a value, if no more of it comes."""

    def _step(self, text: str, at: int) -> tuple[int, bool]:
        read = self._read_value if self._expect is _Expect.VALUE else self._read_tag
        return read(text, at)

    def _read_value(self, text: str, at: int) -> tuple[int, bool]:
        end = text.find(_VALUE_END, at)
        is_ended = end >= 0
        if not is_ended:
            end = len(text) - partial(text, at, _VALUE_END)
        self._parameters[self._key].append(text[at:end])
        if is_ended:
            self._ended, self._expect = _VALUE_END, _Expect.VALUE_OR_NEXT
            end += len(_VALUE_END)
        return end, is_ended

    def _read_tag(self, text: str, at: int) -> tuple[int, bool]:
        blanks = _BLANKS.match(text, at)
        end = blanks.end() if blanks else at
        self._ended += text[at:end]
        if end == len(text):
            return end, False
        tag = _TAG.match(text, end)
        if tag is None and len(text) - end < _MAX_TAG and not _NO_TAG.match(text, end):
            return end, False
        if tag and (tag[1] or "").strip() and self._expect is _Expect.FUNCTION:
            self._name, self._expect = tag[1].strip(), _Expect.PARAMETER
        elif tag and tag[2] and self._expect is not _Expect.FUNCTION:
            self._key, self._expect = tag[2].strip(), _Expect.VALUE
            self._parameters[self._key] = []
        elif tag and tag[0] == _END and self._expect is not _Expect.FUNCTION:
            self.is_done = True
        elif self._expect is _Expect.VALUE_OR_NEXT:
            self._parameters[self._key].append(self._ended)
            self._expect = _Expect.VALUE
            return end, True
        else:
            self.is_bad = True
            return end, False
        return tag.end(), True

    def call(self, schemas: Mapping[str, Any]) -> tuple[str, str]:
        """Name and arguments, whose values have the types of the function's schema in ``schemas``.

        Raises:
            ValueError: a value cannot be told in JSON.
        """
        schema = schemas.get(self._name)
        known = schema.get("properties") if isinstance(schema, Mapping) else None
        members = [
            f"{json.dumps(key)}: {_value(''.join(pieces), known, key)}"
            for key, pieces in self._parameters.items()
        ]
        return self._name, strict_json("{" + ", ".join(members) + "}")


def _value(text: str, known: Any, key: str) -> str:
    """A value as JSON: text, unless its property is known and not of type string."""
    text = text.removeprefix("\n").removesuffix("\n")
    schema = known.get(key) if isinstance(known, Mapping) else None
    if isinstance(schema, Mapping) and schema.get("type") != "string":
        bare = text.strip()
        try:
            return strict_json(_PYTHON.get(bare, bare))
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def partial(text: str, at: int, mark: str) -> int:
    """How many characters at the end of ``text[at:]`` may begin a mark."""
    for length in range(min(len(mark) - 1, len(text) - at), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0
