"""Finds the calls of tools in what a model writes, and leaves the rest as content.

A mark opens a call and the JSON behind it is decoded as it comes; a call ends where its JSON does,
and marks inside its strings are text.  What turns out to be no call is content, unchanged.
White space belongs to content, except behind a call, and before one if nothing else is there.
"""

from __future__ import annotations

import random
import re
import string
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial as partial_of
from typing import Any

from .call_fenced import CALLS, CALLS_END, FencedScan
from .call_json import calls_of_json, strict_json
from .call_xml import GLM, QWEN, XmlScan, partial
from .json_scan import JsonScan, Scan

_BLANKS = re.compile(r"\s*")
_MAX_NAME = 512
"""Characters between a mark and the arguments, where a name may stand there."""
_NAME_RUN = re.compile(rf"[\w.:/\[\]\s-]{{0,{_MAX_NAME}}}")
_NAME = re.compile(r"([\w.:/-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\]\s*)?")


@dataclass(frozen=True)
class Syntax:
    """What stands between the marks.

    Attributes:
        scan: makes what reads one value.
        opens: characters of which one begins a value; "": any.
        again: characters of which one begins another value behind it.
        separators: characters that may stand between values.
    """

    scan: Callable[[], Scan]
    opens: str
    again: str = ""
    separators: str = ""


_JSON = Syntax(JsonScan, "[{", "[{", ";,")


@dataclass(frozen=True)
class Format:
    """How a model writes calls.

    Attributes:
        start: text before calls; "" if nothing marks them.
        end: text behind calls; "" if a call ends with its JSON.
        bare: characters with which an output may begin that is a call without a mark.
        named: whether a name may stand before the arguments: ``name{…}``, ``name[ARGS]{…}``.
        syntax: what stands between the marks.
        last: text behind all calls, if it is another one than ``end``.
        channels: whether calls are messages in channels of their own, which another reader finds.
        short_ids: whether chat templates of such models take ids of nine letters and digits alone.
        shown_by: texts in a chat template, of which one tells of this format.
    """

    start: str
    end: str = ""
    bare: str = ""
    named: bool = False
    syntax: Syntax = _JSON
    last: str = ""
    channels: bool = False
    short_ids: bool = False
    shown_by: tuple[str, ...] = ()


_BARE = Format("", bare="[{")
_CHANNELS = Format("", channels=True, shown_by=("<|channel|>",))
_DEEPSEEK = Format(
    CALLS,
    syntax=Syntax(FencedScan, "<", "<"),
    last=CALLS_END,
    shown_by=(CALLS,),
)
FORMATS: dict[str, Format] = {
    "openai": _CHANNELS,
    "gpt_oss": _CHANNELS,
    "glm45": Format(
        *("<tool_call>", "</tool_call>"),
        syntax=Syntax(partial_of(XmlScan, GLM), ""),
        shown_by=("<arg_key>",),
    ),
    "qwen3_coder": Format(
        *("<tool_call>", "</tool_call>"),
        syntax=Syntax(partial_of(XmlScan, QWEN), "<"),
        shown_by=("<function=",),
    ),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "hermes": Format("<tool_call>", "</tool_call>", shown_by=("<tool_call>",)),
    "mistral": Format("[TOOL_CALLS]", named=True, short_ids=True, shown_by=("[TOOL_CALLS]",)),
    "llama3_json": Format("<|python_tag|>", bare="{", shown_by=("<|python_tag|>", '"parameters"')),
    "xlam": _BARE,
}
"""Formats by the names of vLLM's ``--tool-call-parser``, in the order of detection."""


def detect(template: str) -> str | None:
    """The name of the format that a chat template shows; None if it knows no tools."""
    for name, form in FORMATS.items():
        if any(text in template for text in form.shown_by):
            return name
    return None


@dataclass
class Call:
    """A call; ``arguments`` are JSON."""

    name: str
    arguments: str
    call_id: str

    def to_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


def new_call(name: str, arguments: str, *, has_short_id: bool = False) -> Call:
    """A call with an id of its own."""
    if has_short_id:
        call_id = "".join(random.choices(string.ascii_letters + string.digits, k=9))
    else:
        call_id = f"call_{uuid.uuid4().hex[:24]}"
    return Call(name, arguments, call_id)


def divided(parts: Iterable[str | Call]) -> tuple[str, list[Call]]:
    """(content, calls) of what a reader has found."""
    content, calls = [], []
    for part in parts:
        if isinstance(part, str):
            content.append(part)
        else:
            calls.append(part)
    return "".join(content), calls


class CallReader:
    """Divides one output into content and calls, as it comes.

    Args:
        form: how the model writes calls; None if it is not known.
        is_call: whether all of the output is a call in JSON or a list of calls, by a grammar.
        max_calls: calls behind these are left out; None keeps all.
        schemas: function name -> JSON schema of its parameters, from which the values of XML
            elements have their types.

    Attributes:
        max_calls: as it was made with.
        num_calls: calls so far.
    """

    def __init__(
        self,
        form: Format | None,
        *,
        is_call: bool = False,
        max_calls: int | None = None,
        schemas: Mapping[str, Any] | None = None,
    ) -> None:
        self._has_short_ids = form is not None and form.short_ids
        self._form = _BARE if is_call or form is None else form
        self.max_calls, self._schemas = max_calls, schemas or {}
        self._may_be_list = is_call  # then each call of it comes as soon as it ends
        self.num_calls = 0
        self._text, self._at = "", 0
        self._held: list[str] = []
        """Text since a start mark.  It becomes content if no call follows."""
        self._value_at = 0
        self._name: str | None = None
        self._scan: Scan = JsonScan()
        self._is_bare = False
        self._open: list[tuple[str, str]] = []
        """Name and arguments of calls whose end mark has not come."""
        self._blanks: list[str] = []
        """White space with which the content begins, unless it is nothing else and a call comes."""
        self._has_content = self._ends_with_call = False
        self._parts: list[str | Call] = []
        self._read: Callable[[], bool] = self._read_start if self._form.bare else self._read_text

    def push(self, text: str) -> list[str | Call]:
        """The content and the calls that are certain behind this text, in their order."""
        self._text, self._at = self._text[self._at :] + text, 0
        while self._read():
            pass
        return self._certain()

    def finish(self) -> list[str | Call]:
        """The rest, when nothing more will come."""
        rest = self._text[self._at :]
        if self._read == self._read_behind:
            if self._open and self._form.end.startswith(rest):
                rest = ""  # the end mark, cut
            self._confirm()
        self._text, self._at = "", 0
        self._emit("".join(self._held) + rest)
        if not self.num_calls:
            self._parts += self._blanks
        return self._certain()

    def finish_reason(self, reason: str | None) -> str | None:
        """The reason to give for an output that ended for ``reason``, once it is finished.

        Calls are the reason, unless the output was cut behind the last of them.
        """
        is_whole = reason == "stop" or (reason == "length" and self._ends_with_call)
        return "tool_calls" if self.num_calls and is_whole else reason

    def _certain(self) -> list[str | Call]:
        parts, self._parts = self._parts, []
        return parts

    # Each of these reads one thing at self._at, and returns False if it needs more text.

    def _read_start(self) -> bool:
        """The beginning of an output, which may be a call without a mark."""
        if not self._skip_blanks():
            return False
        if self._text[self._at] not in self._form.bare:
            return self._fail()
        self._is_bare = True
        if self._may_be_list and self._text[self._at] == "[":
            self._take(self._at + 1)
            self._read = self._read_next
            return True
        return self._begin_value()

    def _read_text(self) -> bool:
        """Content, as far as a mark."""
        start = self._form.start
        at = self._text.find(start, self._at) if start else -1
        if at >= 0:
            self._emit(self._text[self._at : at])
            self._at = at
            self._take(at + len(start))
            self._is_bare, self._read = False, self._read_marked
            return True
        end = len(self._text) - partial(self._text, self._at, start)
        self._emit(self._text[self._at : end])
        self._at = end
        return False

    def _read_marked(self) -> bool:
        """Between a mark and a value."""
        if not self._skip_blanks():
            return False
        opens = self._form.syntax.opens
        if not opens or self._text[self._at] in opens:
            return self._begin_value()
        return self._read_name() if self._form.named else self._fail()

    def _read_name(self) -> bool:
        run = _NAME_RUN.match(self._text, self._at)
        end = run.end() if run else self._at
        if end == len(self._text) and end - self._at < _MAX_NAME:
            return False
        name = _NAME.fullmatch(self._text, self._at, end)
        if not name or not self._text.startswith("{", end):
            return self._fail()
        self._take(end)
        return self._begin_value(name[1])

    def _read_next(self) -> bool:
        """Read on after a separator: blanks, then the next value."""
        if not self._skip_blanks():
            return False
        return self._begin_value() if self._text[self._at] in "[{" else self._fail()

    def _begin_value(self, name: str | None = None) -> bool:
        self._value_at, self._name = len(self._held), name
        self._scan = self._form.syntax.scan()
        self._read = self._read_value
        return True

    def _read_value(self) -> bool:
        self._take(self._scan.feed(self._text, self._at))
        if self._scan.is_bad:
            return self._fail()
        if not self._scan.is_done:
            return False
        calls = self._called("".join(self._held[self._value_at :]))
        if not calls:
            return self._fail()
        self._open += calls
        if not self._form.end:
            self._confirm()
        self._read = self._read_behind
        return True

    def _called(self, value: str) -> list[tuple[str, str]]:
        """Name and arguments of the calls in a complete value; none if it is something else."""
        try:
            if not isinstance(self._scan, JsonScan):
                return [self._scan.call(self._schemas)]
            if self._name is not None:
                return [(self._name, strict_json(value))]
            return calls_of_json(value, needs_arguments=self._is_bare)
        except (ValueError, RecursionError):
            return []

    def _read_behind(self) -> bool:
        """Read on after a value: an end mark, another value, or text outside of calls."""
        form = self._form
        if not self._skip_blanks():
            return False
        if self._open:
            if self._text.startswith(form.end, self._at):
                self._confirm()
                self._at += len(form.end)
                return True
            if self._may_become(form.end):
                return False
        else:
            self._held.clear()
        if form.start and self._text.startswith(form.start, self._at):
            self._confirm()
            self._read = self._read_text
            return True
        if self._may_become(form.start):
            return False
        if form.last and self._text.startswith(form.last, self._at):
            self._at += len(form.last)
            return True
        if self._may_become(form.last):
            return False
        char = self._text[self._at]
        if self._may_be_list and char == "]":
            self._at += 1
            self._read = self._read_text
            return True
        goes_on, syntax = bool(self._open) or not form.end, form.syntax
        if goes_on and char in syntax.again:
            return self._begin_value()
        if goes_on and char in syntax.separators:
            self._take(self._at + 1)
            self._read = self._read_next
            return True
        return self._fail()

    def _may_become(self, mark: str) -> bool:
        """Whether the text ends in the middle of a mark."""
        rest = self._text[self._at : self._at + len(mark)]
        return len(rest) < len(mark) and mark.startswith(rest)

    def _skip_blanks(self) -> bool:
        blanks = _BLANKS.match(self._text, self._at)
        self._take(blanks.end() if blanks else self._at)
        return self._at < len(self._text)

    def _take(self, end: int) -> None:
        self._held.append(self._text[self._at : end])
        self._at = end

    def _fail(self) -> bool:
        """Give out the held text as content, because it is no call."""
        self._emit("".join(self._held))
        self._held.clear()
        self._open.clear()
        self._read = self._read_text
        return True

    def _confirm(self) -> None:
        """Hand on the open calls, and drop the held text from which they were read."""
        self._held.clear()
        if not self._open:
            return
        if not self._has_content:
            self._blanks.clear()
        room = None if self.max_calls is None else self.max_calls - self.num_calls
        kept = self._open[:room]
        short = self._has_short_ids
        self._parts += [new_call(*each, has_short_id=short) for each in kept]
        self.num_calls += len(kept)
        self._open = []
        self._ends_with_call = True

    def _emit(self, text: str) -> None:
        if not text:
            return
        if not self._has_content and text.isspace():
            self._blanks.append(text)
            return
        if not self._has_content:
            self._parts += self._blanks
            self._blanks.clear()
            self._has_content = True
        self._ends_with_call = self._ends_with_call and text.isspace()
        self._parts.append(text)
