"""``/v1/responses``: OpenAI's newer form of a chat, for text and calls of functions.

Answers are not stored, so a conversation comes whole with each call.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ....engine.frontend.outputs import RequestOutput
from ..intake.errors import ApiError, json_response
from ..intake.protocol import ResponsesRequest
from ..jobs.state import Job, ServerState
from .body import read
from .events import EventStream, deltas, named_event, whole
from .generation import OF_CHATS, conversation, refuse
from .reading import Reading
from .response_items import Items, chat_messages, chat_tools


async def responses(request: Request) -> Response:
    state: ServerState = request.app.state.server
    body = await read(request, ResponsesRequest)
    state.check_serving()
    refuse(body, OF_CHATS, "an answer here has no such part; ask /v1/chat/completions")
    refuse(body, ("max_tokens",), "it is a field of chats: use max_output_tokens")
    refuse(body, ("response_format",), "it is a field of chats: use text.format")
    asked = body.model_copy(update=_as_chat(body))
    prompt, params, reading = await conversation(
        state, asked, chat_messages(body), max_tokens=body.max_output_tokens
    )
    job = await state.submit(body, [prompt], params, request)
    if body.stream:
        return EventStream(state, job, _stream(job, body, reading), _failed, done=b"")
    (output,) = await whole(state, job, request.receive)
    (completion,) = output.outputs
    items = Items(job.name, reading.reader())
    items.push(completion.text)
    items.finish(completion.finish_reason)
    answer = _answer(job, body, items, output, reading)
    return json_response(answer, headers={"x-request-id": job.name})


def _as_chat(body: ResponsesRequest) -> dict[str, Any]:
    """The fields that have another name or form in chats."""
    changed = {"response_format": _format(body), **chat_tools(body)}
    if (effort := (body.reasoning or {}).get("effort")) is not None:
        if not isinstance(effort, str) or body.reasoning_effort is not None:
            raise ApiError(400, "reasoning.effort: expected one text", param="reasoning")
        changed["reasoning_effort"] = effort
    return changed


def _failed(error: ApiError) -> bytes:
    """The event of an error, as OpenAI's client reads it in a stream of either form."""
    body = error.body()
    told = {"code": str(body["error"]["code"]), "message": error.message, "param": error.param}
    return named_event({"type": "error", "sequence_number": 0, **told, **body})


def _format(body: ResponsesRequest) -> dict[str, Any] | None:
    """``text.format`` as ``response_format`` of chats has it."""
    form = (body.text or {}).get("format")
    if form is not None and not isinstance(form, dict):
        raise ApiError(400, "text.format: expected an object with its type", param="text")
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}


def _answer(
    job: Job,
    body: ResponsesRequest,
    items: Items,
    output: RequestOutput | None,
    reading: Reading,
) -> dict[str, Any]:
    """The response; without an output it has only begun."""
    counts = None
    if output is not None:
        num_prompt, num_output = job.num_prompt_tokens, len(output.outputs[0].token_ids)
        num_thoughts = reading.num_thoughts([output.outputs[0].token_ids])
        counts = {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": num_thoughts or 0},
            "total_tokens": num_prompt + num_output,
        }
    is_cut = items.status == "incomplete"
    return {
        "id": job.name,
        "object": "response",
        "created_at": job.created,
        "background": False,
        "status": items.status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": job.model,
        "output": [] if output is None else items.items,
        "parallel_tool_calls": bool(body.tools) and body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": body.reasoning,
        "store": False,
        "temperature": body.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or ("auto" if body.tools else "none"),
        "tools": body.tools or [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": counts,
        "metadata": body.metadata or {},
    }


async def _stream(
    job: Job, body: ResponsesRequest, reading: Reading
) -> AsyncGenerator[bytes, None]:
    number = -1

    def named(kind: str, content: dict[str, Any]) -> bytes:
        nonlocal number
        number += 1
        return named_event({"type": kind, "sequence_number": number, **content})

    items = Items(job.name, reading.reader())
    begun = {"response": _answer(job, body, items, None, reading)}
    yield named("response.created", begun) + named("response.in_progress", begun)
    last: RequestOutput | None = None
    async for gained in deltas(job):
        for delta in gained:
            last = delta.request
            events = items.push(delta.text)
            if delta.output.finish_reason is not None:
                events += items.finish(delta.output.finish_reason)
            if events:
                yield b"".join(named(*each) for each in events)
    answer = _answer(job, body, items, last, reading)
    yield named(f"response.{answer['status']}", {"response": answer})
