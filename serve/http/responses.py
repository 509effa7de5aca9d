"""``/v1/responses``: OpenAI's newer form of a chat, for text.

Answers are not stored, so a conversation comes whole with each call.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...config import UserError
from ...engine.frontend.outputs import RequestOutput
from .body import read
from .chat import render
from .completions import sampling_params
from .errors import ApiError, api_error, json_response
from .events import EventStream, deltas, event, whole
from .protocol import ResponsesRequest
from .state import Job, ServerState


async def responses(request: Request) -> Response:
    """The endpoint."""
    state: ServerState = request.app.state.server
    body = await read(request, ResponsesRequest)
    state.check_serving()
    if body.previous_response_id is not None:
        message = "previous_response_id: answers are not stored; send the conversation"
        raise ApiError(400, message, param="previous_response_id")
    for name, own in (("max_tokens", "max_output_tokens"), ("response_format", "text.format")):
        if getattr(body, name) is not None:
            raise ApiError(400, f"{name} is a field of chats: use {own}", param=name)
    body = body.model_copy(update={"response_format": _format(body)})
    params = sampling_params(body, max_tokens=body.max_output_tokens)
    messages = _messages(body)
    with state.preparing(params.n):
        prompt = await render(state, messages, True, body.chat_template_kwargs)
    try:
        job = await state.submit("resp_", body, [prompt], params, request.headers)
    except UserError as error:
        raise api_error(error, "input") from error
    if body.stream:
        return EventStream(state, job, _stream(job, body), done=b"")
    (output,) = await whole(state, job, request.receive)
    answer = _answer(job, body, output)
    return json_response(answer, headers={"x-request-id": job.name})


def _format(body: ResponsesRequest) -> dict[str, Any] | None:
    """``text.format`` as ``response_format`` of chats has it.

    Raises:
        ApiError: it is no object.
    """
    form = (body.text or {}).get("format")
    if form is not None and not isinstance(form, dict):
        raise ApiError(400, "text.format: expected an object with its type", param="text")
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The conversation: instructions first, then the input's messages with their text."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for item in body.input:
        if item.get("type", "message") != "message":
            kind = str(item.get("type"))[:50]
            raise ApiError(400, f"input: items of type {kind!r} are not served", param="input")
        content = item.get("content")
        if isinstance(content, list):
            content = [_part(part) for part in content]
        messages.append({"role": item.get("role"), "content": content})
    return messages


def _part(part: Any) -> Any:
    """A part of a message as chats have it; others are refused with the message."""
    if isinstance(part, dict) and part.get("type") in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text")}
    return part


def _answer(job: Job, body: ResponsesRequest, output: RequestOutput | None) -> dict[str, Any]:
    """The response; without an output it has only begun."""
    text, is_cut, counts = None, False, None
    if output is not None:
        (completion,) = output.outputs
        text, is_cut = completion.text, completion.finish_reason == "length"
        num_prompt, num_output = job.num_prompt_tokens, len(completion.token_ids)
        counts = {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_output,
        }
    status = "in_progress" if text is None else "incomplete" if is_cut else "completed"
    return {
        "id": job.name,
        "object": "response",
        "created_at": job.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": job.model,
        "output": [] if text is None else [_item(job, text, status)],
        "parallel_tool_calls": False,
        "previous_response_id": None,
        "store": False,
        "temperature": body.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": "none",
        "tools": [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": counts,
        "metadata": body.metadata or {},
    }


def _item(job: Job, text: str | None, status: str) -> dict[str, Any]:
    return {
        "id": f"msg_{job.name.removeprefix('resp_')}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [] if text is None else [_text(text)],
    }


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def _stream(job: Job, body: ResponsesRequest) -> AsyncGenerator[bytes, None]:
    number = -1

    def named(kind: str, **content: Any) -> bytes:
        nonlocal number
        number += 1
        data = event({"type": kind, "sequence_number": number, **content})
        return f"event: {kind}\n".encode() + data

    item = _item(job, None, "in_progress")
    at = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    begun = _answer(job, body, None)
    yield b"".join(
        (
            named("response.created", response=begun),
            named("response.in_progress", response=begun),
            named("response.output_item.added", output_index=0, item=item),
            named("response.content_part.added", **at, part=_text("")),
        )
    )
    last: RequestOutput | None = None
    async for gained in deltas(job):
        for delta in gained:
            last = delta.request
            if delta.text:
                yield named("response.output_text.delta", **at, delta=delta.text, logprobs=[])
    answer = _answer(job, body, last)
    (part,) = answer["output"][0]["content"]
    yield b"".join(
        (
            named("response.output_text.done", **at, text=part["text"], logprobs=[]),
            named("response.content_part.done", **at, part=part),
            named("response.output_item.done", output_index=0, item=answer["output"][0]),
            named(f"response.{answer['status']}", response=answer),
        )
    )
