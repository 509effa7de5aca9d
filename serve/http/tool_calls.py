"""Tool calls: found in what a model writes, in the formats of Hermes and Qwen, Llama 3 and Mistral.

A call is complete when its JSON is; until then its text is held back.  What turns out to be no call
is content.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...config import UserError
from ...engine.frontend.grammar import json_grammar
from ...engine.frontend.json_schema import Document
from .errors import ApiError
from .protocol import ChatRequest


@dataclass(frozen=True)
class Format:
    """How a model writes calls.

    Attributes:
        start: text before a call, or before all; "" if the output is a call or begins with none.
        end: text behind each call; "": the calls end with the output.
        skip_special_tokens: whether the marks are ordinary text.
        marks: texts in a chat template that tell of this format.
    """

    start: str
    end: str
    skip_special_tokens: bool
    marks: tuple[str, ...]


FORMATS: dict[str, Format] = {
    "hermes": Format("<tool_call>", "</tool_call>", True, ("<tool_call>",)),
    "mistral": Format("[TOOL_CALLS]", "", False, ("[TOOL_CALLS]",)),
    "llama3_json": Format("", "", False, ("<|python_tag|>", '"parameters"')),
}


def detect(template: str) -> str | None:
    """The name of the format that a chat template shows; None if it knows no tools."""
    for name, form in FORMATS.items():
        if any(mark in template for mark in form.marks):
            return name
    return None


@dataclass
class Call:
    """A call; ``arguments`` are JSON."""

    name: str
    arguments: str
    call_id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def to_json(self) -> dict[str, Any]:
        """OpenAI's form."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class CallReader:
    """Divides one output into content and calls, as it comes.

    Args:
        form: how the model writes calls; None if all of the output is one call, by a grammar.
    """

    def __init__(self, form: Format | None) -> None:
        self._form = form
        self._held = ""
        self._in_call = form is None
        self._is_begun = False
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[Call]]:
        """(content, calls) that are certain behind this text."""
        self._held += text
        form = self._form
        if form is None or (self._in_call and not form.end):
            return "", []
        if not form.start:
            return self._push_unmarked(), []
        content, calls = "", []
        while True:
            if not self._in_call:
                before, found, rest = self._held.partition(form.start)
                if not found:
                    keep = _partial(self._held, form.start)
                    content += self._held[: len(self._held) - keep]
                    self._held = self._held[len(self._held) - keep :]
                    break
                content, self._held, self._in_call = content + before, rest, True
            if not form.end:
                break
            body, found, rest = self._held.partition(form.end)
            if not found:
                break
            self._held, self._in_call = rest.lstrip("\n"), False
            parsed = _parse(body)
            calls += parsed
            content += "" if parsed else form.start + body + form.end
        self.num_calls += len(calls)
        if self.num_calls and not content.strip():
            content = ""  # what lies between calls
        return content, calls

    def _push_unmarked(self) -> str:
        """Llama's calls: an output that begins with a brace, or its mark."""
        start = self._held.lstrip()
        if not start:
            return ""
        if not self._is_begun:
            self._is_begun = True
            self._in_call = start.startswith(("{", "<"))
        if self._in_call:
            return ""
        content, self._held = self._held, ""
        return content

    def finish(self) -> tuple[str, list[Call]]:
        """The rest, when nothing more will come."""
        held, self._held = self._held, ""
        if not self._in_call:
            return held, []
        calls = _parse(held.strip().removeprefix("<|python_tag|>"))
        self.num_calls += len(calls)
        if calls:
            return "", calls
        start = self._form.start if self._form else ""
        return start + held, []


def _partial(text: str, mark: str) -> int:
    """How many characters at the end of a text may begin a mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


_NAMED = re.compile(r"\s*([\w.-]+)\s*(?=\{)")


def _parse(text: str) -> list[Call]:
    """The calls in a text of JSON objects, a list of them, or ``name{…}``; none if it is not."""
    decoder, found, at = json.JSONDecoder(), [], 0
    text = text.strip()
    while at < len(text):
        name = _NAMED.match(text, at)
        try:
            value, at = decoder.raw_decode(text, name.end() if name else at)
        except (ValueError, RecursionError):
            return []
        if name:
            value = {"name": name[1], "arguments": value}
        found += value if isinstance(value, list) else [value]
        at = len(text) - len(text[at:].lstrip(" \n\t;,"))
    calls = [call for each in found if (call := _call(each)) is not None]
    return calls if len(calls) == len(found) else []


def _call(value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return Call(value["name"], arguments)
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False))


@dataclass(frozen=True)
class Tools:
    """What a chat says of tools.

    Attributes:
        given: for the template; None if there are none to call.
        form: how calls are found in the output.
        grammar: of the output, if a call is required.
    """

    given: list[dict[str, Any]] | None = None
    form: Format | None = None
    grammar: str | None = None

    def reader(self) -> CallReader | None:
        """What finds the calls of one output; None where none are looked for."""
        if self.given is None:
            return None
        return CallReader(None if self.grammar else self.form)


def tools_of(body: ChatRequest, format_name: str | None) -> Tools:
    """The tools of a chat.

    Args:
        format_name: of the model's calls; None if it is not known.

    Raises:
        ApiError: the tools or the choice are bad, or this model calls none.
    """
    choice = body.tool_choice
    if not body.tools or choice == "none":
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice: there are no tools", param="tool_choice")
        return Tools()
    functions = [_function(number, tool) for number, tool in enumerate(body.tools)]
    if choice in (None, "auto"):
        if format_name is None:
            raise ApiError(
                400,
                "tools: the chat template shows no format of calls; start the server with "
                "--tool-call-parser, or require a call by tool_choice",
                param="tools",
            )
        return Tools(body.tools, FORMATS[format_name])
    if choice != "required":
        name = _chosen(choice)
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise ApiError(
                400,
                "tool_choice: expected none, auto, required, or the function of a tool",
                param="tool_choice",
            )
    schemas = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": Document(function.get("parameters") or {"type": "object"}),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    try:
        return Tools(body.tools, None, json_grammar({"anyOf": schemas}))
    except UserError as error:
        raise ApiError(400, str(error), param="tools") from error


def _chosen(choice: Any) -> Any:
    function = choice.get("function") if isinstance(choice, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _function(number: int, tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function") if tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(
            400,
            f"tools[{number}]: expected {{'type': 'function', 'function': {{'name': …}}}}",
            param="tools",
        )
    return function


def with_parsed_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose earlier calls have their arguments as templates read them: as objects."""
    parsed = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            message = {**message, "tool_calls": [_with_object(call) for call in calls]}
        parsed.append(dict(message))
    return parsed


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (ValueError, RecursionError):
        return call
