"""The blocks of ``/v1/messages``: its conversation as messages of a chat, its output's parts."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ....engine.frontend.outputs import CompletionOutput
from ..intake.errors import ApiError
from ..intake.protocol import CountTokensRequest
from ..reasoning.output_reader import Part, Reader
from ..reasoning.thought_reader import Thought
from ..tool_calls.call_reader import Call

_BILLING = "x-anthropic-billing-header"
"""A block of a system prompt that begins so tells of the client, and changes with each request: the
prefix cache would find nothing behind it."""
_HIDDEN = ("redacted_thinking", "fallback", "compaction")
"""Blocks of which only Anthropic's servers can read something."""
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


def chat_messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    """The conversation: the system prompt first, then the text, calls and results of each message.

    Raises:
        ApiError: a message has a role or a block that is not served.
    """
    messages: list[dict[str, Any]] = []
    system = _system_parts(body.system)
    if system:
        messages.append({"role": "system", "content": system})
    for number, message in enumerate(body.messages):
        role, content = message.get("role"), message.get("content")
        where = f"messages.{number}"
        if role not in ("user", "assistant", "system"):
            raise _bad(f"{where}.role={_short(role)}: expected user or assistant")
        if not isinstance(content, str | list):
            raise _bad(f"{where}.content: expected text or a list of blocks")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif role == "assistant":
            messages.append(_assistant(where, content))
        else:
            messages += _user(where, role, content)
    return messages


def _system_parts(system: str | Sequence[Any] | None) -> list[dict[str, Any]]:
    if isinstance(system, str):
        system = [{"type": "text", "text": system}] if system else []
    parts = [_text("system", block) for block in system or ()]
    return [part for part in parts if part["text"] and not part["text"].startswith(_BILLING)]


def _user(where: str, role: str, content: Iterable[Any]) -> list[dict[str, Any]]:
    """A user's message as messages of a chat: results of calls are messages of their own."""
    messages: list[dict[str, Any]] = []
    for block in content:
        if _kind(block) == "tool_result":
            result = block.get("content")
            parts = result if isinstance(result, list) else [{"type": "text", "text": result or ""}]
            texts = [_text(where, part) for part in parts] or [{"type": "text", "text": ""}]
            call_id = _named(where, block, "tool_use_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": texts})
            continue
        if not messages or messages[-1]["role"] != role:
            messages.append({"role": role, "content": []})
        messages[-1]["content"].append(_text(where, block))
    return messages or [{"role": role, "content": ""}]


def _assistant(where: str, content: Iterable[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    for block in content:
        kind = _kind(block)
        if kind == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise _bad(f"{where}: input of a tool_use: expected an object")
            function = {"name": _named(where, block, "name"), "arguments": arguments}
            call = {"id": _named(where, block, "id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif kind == "thinking":
            thought = _named(where, block, "thinking")
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
        elif kind not in _HIDDEN:
            message.setdefault("content", []).append(_text(where, block))
    if "content" not in message and "tool_calls" not in message:
        message["content"] = ""
    return message


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _text(where: str, block: Any) -> dict[str, Any]:
    """A block as a part of a chat's message."""
    kind = _kind(block)
    if kind != "text":
        raise _bad(
            f"{where}: a block of type {_short(kind)} is not served; models here read text: give "
            "blocks of type text, tool_use and tool_result"
        )
    return {"type": "text", "text": _named(where, block, "text")}


def _named(where: str, block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _bad(f"{where}: {name} of a {block['type']} block: expected text")
    return value


def _bad(message: str, param: str = "messages") -> ApiError:
    return ApiError(400, message, param=param)


def _short(value: Any) -> str:
    return repr(value)[:50] if isinstance(value, str) else type(value).__name__


def chat_tools(body: CountTokensRequest) -> dict[str, Any]:
    """``tools`` and ``tool_choice`` as chats have them.

    Raises:
        ApiError: a tool is none that the client runs, or the choice is unknown.
    """
    tools = None if body.tools is None else [_tool(*each) for each in enumerate(body.tools)]
    choice = body.tool_choice
    if choice is None or not tools:
        return {"tools": tools, "tool_choice": None}
    kinds: dict[Any, Any] = {"auto": "auto", "any": "required", "none": "none"}
    kind, name = choice.get("type"), choice.get("name")
    if kind == "tool" and isinstance(name, str):
        chosen: Any = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in kinds:
        chosen = kinds[kind]
    else:
        raise _bad("tool_choice: expected type auto, any, none, or tool with a name", "tool_choice")
    more = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    return {"tools": tools, "tool_choice": chosen, **more}


def _tool(number: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    name, schema = tool.get("name"), tool.get("input_schema")
    if tool.get("type") not in (None, "custom"):
        raise _bad(
            f"tools.{number}: type {_short(tool['type'])} is not served, as no tool runs here; "
            "give a function that the client runs, with name and input_schema",
            "tools",
        )
    if not isinstance(name, str) or not name or not isinstance(schema, dict):
        raise _bad(f"tools.{number}: expected a name and an input_schema, an object", "tools")
    function: dict[str, Any] = {"name": name, "parameters": {"type": "object", **schema}}
    if isinstance(description := tool.get("description"), str):
        function["description"] = description
    return {"type": "function", "function": function}


class Blocks:
    """The blocks of an output, in their order, and the events that tell of them.

    Args:
        reader: of the output.

    Attributes:
        blocks: those that have begun.
        stop_reason: why the output ended; None before that.
        stop_sequence: the stop string that ended it, if one did.
    """

    def __init__(self, reader: Reader) -> None:
        self.blocks: list[dict[str, Any]] = []
        self.stop_reason: str | None = None
        self.stop_sequence: str | None = None
        self._reader, self._kind, self._texts = reader, "", list[str]()
        """The kind of the last block, text or thinking, and its pieces while it may go on."""

    def push(self, text: str) -> list[dict[str, Any]]:
        """The events of a text that has come."""
        return self._add(self._reader.push(text))

    def finish(self, output: CompletionOutput, max_tokens: int) -> list[dict[str, Any]]:
        """The last events of blocks, when the output has ended, which could have ``max_tokens``."""
        reason, stop = output.finish_reason, output.stop_reason
        events = self._add(self._reader.finish())
        reason = self._reader.finish_reason(reason)
        self.stop_reason = _STOP_REASONS.get(reason or "", "end_turn")
        if self.stop_reason == "max_tokens" and len(output.token_ids) < max_tokens:
            self.stop_reason = "model_context_window_exceeded"
        if isinstance(stop, str) and self.stop_reason == "end_turn":
            self.stop_reason, self.stop_sequence = "stop_sequence", stop
        return events + self._end_text()

    def _add(self, parts: Iterable[Part]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, Call):
                events += self._add_call(part)
            elif isinstance(part, Thought):
                events += self._add_text("thinking", part.text)
            else:
                events += self._add_text("text", part)
        return events

    def _add_text(self, kind: str, text: str) -> list[dict[str, Any]]:
        if not text:
            return []
        events = []
        if kind != self._kind:
            events = self._end_text()
            more = {"signature": ""} if kind == "thinking" else {}
            events += self._begin({"type": kind, kind: "", **more})
            self._kind = kind
        self._texts.append(text)
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _add_call(self, call: Call) -> list[dict[str, Any]]:
        events = self._end_text()
        block = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
        events += self._begin(block)
        events.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        self.blocks[-1] = {**block, "input": json.loads(call.arguments)}
        return [*events, {"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        self.blocks.append(block)
        at = len(self.blocks) - 1
        return [{"type": "content_block_start", "index": at, "content_block": block}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def _end_text(self) -> list[dict[str, Any]]:
        kind, events = self._kind, list[dict[str, Any]]()
        if not kind:
            return []
        self.blocks[-1] = {"type": kind, kind: "".join(self._texts)}
        if kind == "thinking":
            # Clients send no thinking back that is not signed.
            signed = {"signature": uuid.uuid4().hex}
            self.blocks[-1] |= signed
            events.append(self._delta({"type": "signature_delta", **signed}))
        self._kind = ""
        self._texts.clear()
        return [*events, {"type": "content_block_stop", "index": len(self.blocks) - 1}]
