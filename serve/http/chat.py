"""``/v1/chat/completions``: conversations, through the model's chat template."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...config import UserError
from ...engine.frontend import chat_template  # noqa: F401  # here, so that no request waits for it
from ...engine.frontend.inputs import Prompt
from ...engine.frontend.outputs import RequestOutput
from .body import read
from .completions import sampling_params
from .errors import ApiError, api_error, as_json, json_response
from .events import Delta, EventStream, chunks, head, usage, whole
from .form import grammar_of
from .logprobs import chat_logprobs, prompt_entries
from .protocol import ChatRequest
from .state import Job, ServerState
from .tool_calls import CallReader, Tools, tools_of, with_parsed_arguments

_OWN_VARIABLES = ("messages", "add_generation_prompt", "self")
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
    if tools.grammar is not None and grammar_of(body) is not None:
        raise ApiError(400, "tool_choice: not beside a form of the output", param="tool_choice")
    params = sampling_params(
        body,
        max_tokens=most,
        logprobs=num_top if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        grammar=tools.grammar,
    )
    if tools.form is not None and not tools.form.skip_special_tokens:
        params = replace(params, skip_special_tokens=False)
    more = {} if tools.given is None else {"tools": tools.given}
    with state.preparing(params.n):
        prompt = await render(
            state,
            with_parsed_arguments(body.messages),
            body.add_generation_prompt,
            body.chat_template_kwargs,
            **more,
        )
    try:
        job = await state.submit("chatcmpl-", body, [prompt], params, request.headers)
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
    add_generation_prompt: bool | None,
    variables: Mapping[str, Any] | None,
    **more: Any,
) -> Prompt:
    """The prompt of a conversation.

    Args:
        variables: of the template, from the client.
        more: of the template, from us.

    Raises:
        ApiError: a variable or a message is bad.
    """
    given = dict(variables or {})
    for name in _OWN_VARIABLES:
        if name in given:
            raise ApiError(
                400, f"chat_template_kwargs.{name}: this name is taken; leave it out",
                param="chat_template_kwargs",
            )  # fmt: skip
    make = partial(
        state.client.inputs.chat_prompt,
        messages,
        add_generation_prompt=add_generation_prompt is not False,
        **{**given, **more},
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
                finish_reason = "tool_calls"
                message["tool_calls"] = [call.to_json() for call in calls]
            message["content"] = content + rest if content + rest or not calls else None
        choice: dict[str, Any] = {
            "index": completion.index,
            "message": message,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if completion.logprobs is not None:
            choice["logprobs"] = chat_logprobs(completion.logprobs, num_top)
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
            if reader.num_calls and finish_reason is not None:
                finish_reason = "tool_calls"
        if delta.index not in started:
            started.add(delta.index)
            message = {"role": "assistant", **message}
        logprobs = None if delta.logprobs is None else chat_logprobs(delta.logprobs, num_top)
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
