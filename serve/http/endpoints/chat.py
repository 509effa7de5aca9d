"""``/v1/chat/completions``: conversations, through the model's chat template."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ....engine.frontend import chat_template  # noqa: F401  # here, so that no request waits for it
from ....engine.frontend.outputs import RequestOutput
from ..intake.errors import ApiError, as_json, json_response
from ..intake.protocol import ChatRequest
from ..jobs.state import Job, ServerState
from ..tool_calls.call_reader import CallReader
from .body import read
from .events import Delta, EventStream, chunks, head, usage, whole
from .generation import conversation
from .logprobs import chat_logprobs, prompt_entries
from .tools import Tools


async def chat_completions(request: Request) -> Response:
    state: ServerState = request.app.state.server
    body = await read(request, ChatRequest)
    state.check_serving()
    _check(body)
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    num_top = body.top_logprobs or 0
    prompt, params, tools = await conversation(
        state,
        body,
        body.messages,
        max_tokens=most,
        logprobs=num_top if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    job = await state.submit(body, [prompt], params, request)
    if body.stream:
        return EventStream(state, job, _stream(job, body, num_top, tools))
    (output,) = await whole(state, job, request.receive)
    return json_response(
        _answer(job, body, output, num_top, tools), headers={"x-request-id": job.name}
    )


def _check(body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")


def _answer(
    job: Job, body: ChatRequest, output: RequestOutput, num_top: int, tools: Tools
) -> dict[str, Any]:
    choices = []
    for completion in output.outputs:
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        finish_reason = completion.finish_reason
        if (reader := tools.reader()) is not None:
            content, calls = reader.push(completion.text)
            rest, last = reader.finish()
            if calls := calls + last:
                message["tool_calls"] = [call.to_json() for call in calls]
            finish_reason = reader.finish_reason(finish_reason)
            message["content"] = content + rest if content + rest or not calls else None
        choice: dict[str, Any] = {
            "index": completion.index,
            "message": message,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if completion.logprobs is not None:
            choice["logprobs"] = chat_logprobs(
                completion.logprobs, num_top, body.return_tokens_as_token_ids
            )
        if body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        choices.append(as_json(choice))
    num_output = sum(len(c.token_ids) for c in output.outputs)
    answer = {
        **head(job, "chat.completion"),
        "choices": choices,
        "usage": usage(job.num_prompt_tokens, num_output, output.num_cached_tokens),
    }
    if body.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_entries(output)
    if body.return_token_ids:
        answer["prompt_token_ids"] = output.prompt_token_ids
    return answer


def _stream(job: Job, body: ChatRequest, num_top: int, tools: Tools) -> AsyncGenerator[bytes, None]:
    started: set[int] = set()
    readers: dict[int, CallReader | None] = {}

    def choice(delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"content": delta.text}
        finish_reason = delta.output.finish_reason
        if delta.index not in readers:
            readers[delta.index] = tools.reader()
        if (reader := readers[delta.index]) is not None:
            message = _read(reader, delta)
            finish_reason = reader.finish_reason(finish_reason)
        if delta.index not in started:
            started.add(delta.index)
            message = {"role": "assistant", **message}
        logprobs = None
        if delta.logprobs is not None:
            logprobs = chat_logprobs(delta.logprobs, num_top, body.return_tokens_as_token_ids)
        return {
            "index": delta.index,
            "delta": message,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": delta.output.stop_reason,
        }

    return chunks(job, body, head(job, "chat.completion.chunk"), choice)


def _read(reader: CallReader, delta: Delta) -> dict[str, Any]:
    """The content and the complete calls that a delta adds to a message."""
    first = reader.num_calls
    content, calls = reader.push(delta.text)
    if delta.output.finish_reason is not None:
        rest, last = reader.finish()
        content, calls = content + rest, calls + last
    message: dict[str, Any] = {"content": content or None}
    if calls:
        numbered = enumerate(calls, start=first)
        message["tool_calls"] = [{"index": number, **call.to_json()} for number, call in numbered]
    return message
