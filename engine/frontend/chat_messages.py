"""The messages of a conversation as chat templates read them.

Clients send what they got: null for what is not there, empty lists of calls, arguments as text.
Templates were written for fields that are there or not, and for arguments as objects.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ...config import UserError

Message: TypeAlias = Mapping[str, Any]
_MESSAGE = "{'role': …, 'content': …}"
_PART = "{'type': 'text', 'text': …}"
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the same field; templates read the first, some the second."""
_MOST_DEPTH = 200
_SCALARS = frozenset((str, int, float, bool, type(None)))


def plain_data(name: str, value: Any, depth: int = _MOST_DEPTH) -> Any:
    """A copy of what JSON can hold: nothing that a template sees has methods of other kinds.

    Raises:
        UserError: it holds something else, or is nested too deeply.
    """
    if type(value) in _SCALARS:
        return value
    if depth == 0:
        raise UserError(f"{name} is nested too deeply: expected {_MOST_DEPTH} levels at most")
    if isinstance(value, Mapping):
        below = depth - 1
        return {  # most items of most messages are text: no call for these
            k if type(k) is str else plain_data(name, k, below): (
                v if type(v) in _SCALARS else plain_data(name, v, below)
            )
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain_data(name, item, depth - 1) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):  # enums, and numbers of numpy
            return kind(value) if kind is not str else str.__str__(value)
    if callable(dump := getattr(value, "model_dump", None)):  # what clients of OpenAI return
        return plain_data(name, dump(), depth - 1)
    raise UserError(f"{name} has a {type(value).__name__}: expected what JSON can hold")


def checked(number: int, message: Any, template: str) -> dict[str, Any]:
    """A message as plain data: without nulls and empty lists of calls, with the arguments of calls
    as objects, and with its reasoning under the names that templates read.

    Args:
        number: its place in the conversation.
        template: the Jinja text, which may know roles of its own, such as 'ipython'.

    Raises:
        UserError: it has no role or content, or one that is unknown.
    """
    data = plain_data(f"message {number}", message)
    if not isinstance(data, dict) or "role" not in data:
        raise UserError(f"message {str(message)[:200]!r}: expected {_MESSAGE}")
    role = data["role"]
    if role not in _ROLES and not any(f"{quote}{role}{quote}" in template for quote in "'\""):
        raise UserError(f"message {number}: role {role!r}: expected {', '.join(_ROLES)}")
    content, calls = data.get("content"), data.get("tool_calls")
    if None in data.values():
        data = {name: value for name, value in data.items() if value is not None}
    if calls == []:
        del data["tool_calls"]
    elif isinstance(calls, list):
        data["tool_calls"] = [_with_object(call) for call in calls]
    if thoughts := [data[name] for name in _REASONING if name in data]:
        thought = thoughts[0]
        data = {"thinking": thought, **data, "reasoning_content": thought}
    if content == [] and role == "assistant":
        del data["content"]
    elif isinstance(content, list) and content:
        data["content"] = [_part(number, part) for part in content]
    elif not isinstance(content, str) and not (content is None and role == "assistant"):
        shown = "no content" if content is None else f"content={content!r}"
        raise UserError(
            f"message {number} ({role}) has {shown}: expected text, or a list of {_PART}"
        )
    return data


def _with_object(call: Any) -> Any:
    """A call whose arguments are an object if they are the JSON of something, or nothing."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):  # as a model wrote it; the template may take it so
            return call
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _part(number: int, part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind == "text" and isinstance(part.get("text"), str):
        return part
    what = f"a part of type {kind!r}" if kind not in (None, "text") else f"the part {part!r}"
    raise UserError(
        f"message {number} has {what}: models here read text alone, as {_PART}; a vision or audio "
        "tower that a model's folder has is not served"
    )


def with_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its parts joined as lines of one text."""
    return {**message, "content": "\n".join(part["text"] for part in message["content"])}


def with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text as the only part."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def probes(role: str, content: Any) -> list[dict[str, Any]]:
    """A short conversation that has a message of this role and content."""
    message = {"role": role, "content": content}
    if role == "user":
        return [message]
    question = {"role": "user", "content": "?"}
    if role in ("system", "developer"):
        return [message, question]
    if role == "assistant":
        return [question, message]
    call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {}}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [question, asked, {**message, "name": "f", "tool_call_id": "call00000"}]


def _text_arguments(messages: Sequence[Message]) -> list[Message] | None:
    """The conversation with the arguments of calls as JSON text; None if there are no calls."""
    if not any("tool_calls" in message for message in messages):
        return None
    changed: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            message = {**message, "tool_calls": [_with_text(call) for call in calls]}
        changed.append(message)
    return changed


def _with_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    arguments = json.dumps(function.get("arguments"), ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _empty_content(messages: Sequence[Message]) -> list[Message] | None:
    """The conversation with "" for absent content; None if there is none absent."""
    if all("content" in message for message in messages):
        return None
    return [{"content": "", **message} for message in messages]


def without_preambles(messages: Sequence[Message]) -> list[Message] | None:
    """The conversation without the text of messages that have calls and thinking too, for templates
    that take one of both; None if there are none."""
    changed = [
        {name: value for name, value in message.items() if name != "content"}
        if message.get("content") and message.get("thinking") and message.get("tool_calls")
        else message
        for message in messages
    ]
    return None if changed == [*messages] else changed


def _both(messages: Sequence[Message]) -> list[Message] | None:
    changed = _text_arguments(messages)
    return None if changed is None else _empty_content(changed)


CHANGES: tuple[Callable[[Sequence[Message]], list[Message] | None], ...] = (
    _empty_content,
    _text_arguments,
    _both,
)
"""Other shapes of a conversation, which are tried where a template fails; each gives None where it
changes nothing."""
