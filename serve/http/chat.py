"""``/v1/chat/completions``: conversations, through the model's chat template."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...config import UserError
from ...engine.frontend import chat_template  # noqa: F401  # here, so that no request waits for it
from ...engine.frontend.inputs import Prompt
from ...engine.frontend.outputs import RequestOutput
from .body import read
from .call_reader import CallReader
from .completions import sampling_params
from .errors import ApiError, api_error, as_json, json_response
from .events import Delta, EventStream, chunks, head, usage, whole
from .logprobs import chat_logprobs, prompt_entries
from .protocol import ChatRequest
from .state import Job, ServerState
from .tool_calls import Tools, tools_of, with_marks

_SHORT_TEXT = 1000
"""Characters of a conversation that are rendered at once: a thread would take longer to wake up."""


async def chat_completions(request: Request) -> Response:
    """The endpoint."""
    state: ServerState = request.app.state.server
    body = await read(request, ChatRequest)
    state.check_serving()
    _check(body)
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    num_top = body.top_logprobs or 0
    tools = tools_of(body, state.tool_format)
    params = sampling_params(
        body,
        state.client.inputs.default_sampling,
        max_tokens=most,
        logprobs=num_top if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        grammar=tools.grammar,
    )
    params = with_marks(params, tools, state.client.inputs.tokenizer)
    with state.preparing(params.n):
        prompt = await render(
            state,
            body.messages,
            variables=body.chat_template_kwargs,
            tools=tools.given,
            add_generation_prompt=body.add_generation_prompt,
            add_special_tokens=body.add_special_tokens,
        )
    try:
        job = await state.submit("chatcmpl-", body, [prompt], params, request)
    except UserError as error:
        raise api_error(error, "messages") from error
    if body.stream:
        return EventStream(state, job, _stream(job, body, num_top, tools))
    (output,) = await whole(state, job, request.receive)
    return json_response(
        _answer(job, body, output, num_top, tools), headers={"x-request-id": job.name}
    )


def _check(body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")


async def render(
    state: ServerState,
    messages: Sequence[Mapping[str, Any]],
    *,
    variables: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    add_special_tokens: bool | None = None,
) -> Prompt:
    """The prompt of a conversation: the only way from messages to tokens here.

    Args:
        variables: of the template, from the client.
        tools: those that the model may call; none or an empty list: it knows of none.

    Raises:
        ApiError: a variable or a message is bad.
    """
    inputs, given = state.client.inputs, dict(variables or {})
    try:
        inputs.check_template_variables(given)
    except UserError as error:
        raise api_error(error, "chat_template_kwargs") from error
    if tools:
        given["tools"] = tools
    make = partial(
        inputs.chat_prompt,
        messages,
        add_generation_prompt=add_generation_prompt is not False,
        add_special_tokens=add_special_tokens is True,
        **given,
    )
    try:
        if sum(len(str(m.get("content"))) for m in messages) > _SHORT_TEXT:
            return await state.client.in_thread(make)
        return make()
    except UserError as error:
        raise api_error(error, "messages") from error


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
