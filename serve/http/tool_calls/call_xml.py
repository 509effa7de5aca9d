"""Calls as XML elements, in the dialects of Qwen3-Coder and GLM-4.5.

Values are not escaped, so one ends at the end tag behind which a parameter or the end of the
function follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from .call_json import strict_json
from .json_scan import Scan

_MAX_TAG = 300
_BLANKS = re.compile(r"\s*")
_PYTHON = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True)
class Dialect:
    """How functions and parameters are written.

    Attributes:
        tag: what comes between values, with the groups name (of the function), key (of a parameter,
            whose value follows) and end.
        no_function: what begins no function, however it goes on.
        follows: how the tags begin of which one is behind a value.
        value_end: the tag behind a value.
    """

    tag: re.Pattern[str]
    no_function: re.Pattern[str]
    follows: tuple[str, ...]
    value_end: str


_NAME = r"[^<>\n]{1,256}"
QWEN = Dialect(
    re.compile(rf"<function=(?P<name>{_NAME})>|<parameter=(?P<key>{_NAME})>|(?P<end></function>)"),
    re.compile(r"[^<]|<[^<>\n]*[<>\n]"),
    ("<parameter=", "</function>"),
    "</parameter>",
)
"""``<function=NAME> <parameter=KEY> VALUE </parameter> … </function>``."""
GLM = Dialect(
    re.compile(
        rf"(?P<name>[\w.:/-]{{1,256}})\s*(?=<arg_key>|</tool_call>)"
        rf"|<arg_key>(?P<key>{_NAME})</arg_key>\s*<arg_value>|(?P<end>(?=</tool_call>))"
    ),
    re.compile(r"[{\[]"),
    ("<arg_key>", "</tool_call>"),
    "</arg_value>",
)
"""``NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> …``, to the mark behind the call."""


class _Expect(Enum):
    """What may come next."""

    FUNCTION = auto()
    PARAMETER = auto()
    VALUE = auto()
    VALUE_OR_NEXT = auto()


class XmlScan(Scan):
    """Reads one function, to the end of each piece or to a tag that is cut there."""

    def __init__(self, dialect: Dialect = QWEN) -> None:
        super().__init__()
        self._dialect = dialect
        self._expect = _Expect.FUNCTION
        self._name = self._key = ""
        self._parameters: dict[str, list[str]] = {}
        self._ended = ""
        """Text that ends a value, if no more of it comes."""

    def _step(self, text: str, at: int) -> tuple[int, bool]:
        read = self._read_value if self._expect is _Expect.VALUE else self._read_tag
        return read(text, at)

    def _read_value(self, text: str, at: int) -> tuple[int, bool]:
        value_end = self._dialect.value_end
        end = text.find(value_end, at)
        is_ended = end >= 0
        if not is_ended:
            end = len(text) - partial(text, at, value_end)
        self._parameters[self._key].append(text[at:end])
        if is_ended:
            self._ended, self._expect = value_end, _Expect.VALUE_OR_NEXT
            end += len(value_end)
        return end, is_ended

    def _read_tag(self, text: str, at: int) -> tuple[int, bool]:
        blanks = _BLANKS.match(text, at)
        end = blanks.end() if blanks else at
        self._ended += text[at:end]
        if end == len(text):
            return end, False
        dialect = self._dialect
        tag = dialect.tag.match(text, end)
        if tag is None and len(text) - end < _MAX_TAG and self._may_be_tag(text, end):
            return end, False
        name, key, ended = tag.group("name", "key", "end") if tag else (None, None, None)
        if name and name.strip() and self._expect is _Expect.FUNCTION:
            self._name, self._expect = name.strip(), _Expect.PARAMETER
        elif key and self._expect is not _Expect.FUNCTION:
            self._key, self._expect = key.strip(), _Expect.VALUE
            self._parameters[self._key] = []
        elif ended is not None and self._expect is not _Expect.FUNCTION:
            self.is_done = True
        elif self._expect is _Expect.VALUE_OR_NEXT:
            self._parameters[self._key].append(self._ended)
            self._expect = _Expect.VALUE
            return end, True
        else:
            self.is_bad = True
            return end, False
        return tag.end() if tag else end, True

    def _may_be_tag(self, text: str, at: int) -> bool:
        """Whether a text that is no tag may become one when more of it comes."""
        if self._expect is _Expect.FUNCTION:
            return not self._dialect.no_function.match(text, at)
        rest = text[at:]
        return any(rest.startswith(tag) or tag.startswith(rest) for tag in self._dialect.follows)

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
