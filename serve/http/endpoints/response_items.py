"""The items of ``/v1/responses``: its input as messages of a chat, its output's parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..intake.errors import ApiError
from ..intake.protocol import ResponsesRequest
from ..reasoning.output_reader import Message, Part, Reader
from ..reasoning.thought_reader import Thought
from ..tool_calls.call_reader import Call

_THINKING = "reasoning_content"


def chat_messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The conversation: instructions first, then the input's messages, calls and their outputs.

    Raises:
        ApiError: an item is of another type.
    """
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for item in body.input:
        kind = item.get("type", "message")
        if kind == "message":
            content = item.get("content")
            if isinstance(content, list):
                content = [_part(part) for part in content]
            message = {"role": item.get("role"), "content": content}
            if message["role"] == "assistant" and messages and _is_thinking(messages[-1]):
                messages[-1]["content"] = content
            else:
                messages.append(message)
        elif kind == "reasoning":
            messages.append({"role": "assistant", "content": None, _THINKING: _thinking_of(item)})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(_chat_call(item))
        elif kind == "function_call_output":
            output = item.get("output")
            if isinstance(output, list):
                output = [_part(part) for part in output]
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
            )
        else:
            kind = str(kind)[:50]
            raise ApiError(400, f"input: items of type {kind!r} are not served", param="input")
    # Thinking that was cut, or whose answer was left out, is no message.
    return [each for each in messages if not _is_thinking(each)]


def _is_thinking(message: dict[str, Any]) -> bool:
    """Whether a message has thinking alone, so far."""
    return _THINKING in message and message["content"] is None and "tool_calls" not in message


def _thinking_of(item: dict[str, Any]) -> str:
    """The text of an item of thinking; its summary if it has no text."""
    texts = []
    for part in item.get("content") or item.get("summary") or []:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            message = "input: expected {'type': 'reasoning_text', 'text': …} in a reasoning item"
            raise ApiError(400, message, param="input")
        texts.append(text)
    return "\n".join(texts)


def _chat_call(item: dict[str, Any]) -> dict[str, Any]:
    name, arguments, call_id = (item.get(key) for key in ("name", "arguments", "call_id"))
    if not all(isinstance(each, str) for each in (name, arguments, call_id)):
        message = "input: expected call_id, name and arguments of a function_call, each as text"
        raise ApiError(400, message, param="input")
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _part(part: Any) -> Any:
    """A part of a message as chats have it; others are refused with the message."""
    if isinstance(part, dict) and part.get("type") in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text")}
    return part


def chat_tools(body: ResponsesRequest) -> dict[str, Any]:
    """``tools`` and ``tool_choice`` as chats have them.

    Raises:
        ApiError: a tool is no function.
    """
    tools = None if body.tools is None else [_tool(*each) for each in enumerate(body.tools)]
    choice = body.tool_choice
    if isinstance(choice, dict) and "name" in choice:
        choice = {"type": choice.get("type"), "function": {"name": choice["name"]}}
    return {"tools": tools, "tool_choice": choice}


def _tool(number: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        expected = "{'type': 'function', 'name': …, 'parameters': …}"
        raise ApiError(400, f"tools[{number}]: expected {expected}", param="tools")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


Event = tuple[str, dict[str, Any]]


class Items:
    """The items of an output, in the order in which they begin, and the events that tell of them.

    Args:
        reader: of the output.

    Attributes:
        items: those that have begun.
        status: "in_progress", then "completed" or "incomplete".
    """

    def __init__(self, response_id: str, reader: Reader) -> None:
        self.items: list[dict[str, Any]] = []
        self.status = "in_progress"
        self._response_id, self._reader = response_id, reader
        self._texts: list[str] = []
        self._message_at = 0
        self._thoughts: list[str] = []
        """The pieces of the last item while it is one of thinking and may go on."""

    def push(self, text: str) -> list[Event]:
        """The events of a text that has come."""
        return self._add(self._reader.push(text))

    def finish(self, reason: str | None) -> list[Event]:
        """The last events, when the output ends for ``reason``."""
        events = self._add(self._reader.finish())
        reason = self._reader.finish_reason(reason)
        self.status = "incomplete" if reason == "length" else "completed"
        events += self._end_thinking(self.status)
        if not self.items:
            events += self._begin_message()
        if self._texts:
            text = "".join(self._texts)
            item = self.items[self._message_at] = _message_item(
                self._response_id, text, self.status
            )
            events += [
                ("response.output_text.done", {**self._part(), "text": text, "logprobs": []}),
                ("response.content_part.done", {**self._part(), "part": _text_part(text)}),
                ("response.output_item.done", {"output_index": self._message_at, "item": item}),
            ]
        return events

    def _add(self, parts: Sequence[Part]) -> list[Event]:
        """Add what was read; content becomes one message, which begins where the first does."""
        text = Message.of(parts).content
        events: list[Event] = []
        for part in parts:
            if isinstance(part, Thought):
                events += self._add_thought(part.text)
            elif isinstance(part, Call):
                events += self._end_thinking()
                events += self._add_call(part)
            elif text:
                events += self._end_thinking()
                events += self._begin_message() if not self._texts else []
                self._texts.append(text)
                content = {**self._part(), "delta": text, "logprobs": []}
                events.append(("response.output_text.delta", content))
                text = ""
        return events

    def _begin_message(self) -> list[Event]:
        self._message_at = len(self.items)
        self._texts.append("")
        item = _message_item(self._response_id, None, "in_progress")
        self.items.append(item)
        return [
            ("response.output_item.added", {"output_index": self._message_at, "item": item}),
            ("response.content_part.added", {**self._part(), "part": _text_part("")}),
        ]

    def _part(self) -> dict[str, Any]:
        item = self.items[self._message_at]
        return {"item_id": item["id"], "output_index": self._message_at, "content_index": 0}

    def _add_thought(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not self._thoughts:
            at = {"output_index": len(self.items)}
            item = _thinking_item(f"{self._response_id}_{len(self.items)}", None, "in_progress")
            self.items.append(item)
            part = {**self._last_part(), "part": _thinking_part("")}
            events = [
                ("response.output_item.added", {**at, "item": item}),
                ("response.content_part.added", part),
            ]
        self._thoughts.append(text)
        return [*events, ("response.reasoning_text.delta", {**self._last_part(), "delta": text})]

    def _end_thinking(self, status: str = "completed") -> list[Event]:
        if not self._thoughts:
            return []
        text = "".join(self._thoughts)
        self._thoughts.clear()
        at = self._last_part()
        item = self.items[-1] = _thinking_item(
            f"{self._response_id}_{len(self.items) - 1}", text, status
        )
        return [
            ("response.reasoning_text.done", {**at, "text": text}),
            ("response.content_part.done", {**at, "part": _thinking_part(text)}),
            ("response.output_item.done", {"output_index": at["output_index"], "item": item}),
        ]

    def _last_part(self) -> dict[str, Any]:
        at = len(self.items) - 1
        return {"item_id": self.items[at]["id"], "output_index": at, "content_index": 0}

    def _add_call(self, call: Call) -> list[Event]:
        at = {"output_index": len(self.items)}
        item = _call_item(call)
        self.items.append(item)
        begun = {**item, "arguments": "", "status": "in_progress"}
        of_item = {**at, "item_id": item["id"]}
        done = {**of_item, "name": call.name, "arguments": call.arguments}
        return [
            ("response.output_item.added", {**at, "item": begun}),
            ("response.function_call_arguments.delta", {**of_item, "delta": call.arguments}),
            ("response.function_call_arguments.done", done),
            ("response.output_item.done", {**at, "item": item}),
        ]


def _message_item(response_id: str, text: str | None, status: str) -> dict[str, Any]:
    """A message; ``text`` is None until it has any."""
    return {
        "id": f"msg_{response_id.removeprefix('resp_')}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [] if text is None else [_text_part(text)],
    }


def _thinking_item(name: str, text: str | None, status: str) -> dict[str, Any]:
    """Thinking; ``text`` is None until it has any."""
    return {
        "id": f"rs_{name.removeprefix('resp_')}",
        "type": "reasoning",
        "summary": [],
        "status": status,
        "content": [] if text is None else [_thinking_part(text)],
    }


def _thinking_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(call: Call) -> dict[str, Any]:
    """A call, which is told as a whole."""
    return {
        "id": f"fc_{call.call_id.removeprefix('call_')}",
        "type": "function_call",
        "status": "completed",
        "call_id": call.call_id,
        "name": call.name,
        "arguments": call.arguments,
    }
