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
from ..reasoning.output_reader import Message, Reader
from .body import read
from .events import Delta, EventStream, chunks, head, usage, whole
from .generation import conversation
from .logprobs import chat_logprobs, prompt_entries
from .reading import Reading


async def chat_completions(request: Request) -> Response:
    state: ServerState = request.app.state.server
    body = await read(request, ChatRequest)
    state.check_serving()
    _check(body)
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    num_top = body.top_logprobs or 0
    prompt, params, reading = await conversation(
        state,
        body,
        body.messages,
        max_tokens=most,
        logprobs=num_top if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    job = await state.submit(body, [prompt], params, request)
    if body.stream:
        return EventStream(state, job, _stream(job, body, num_top, reading))
    (output,) = await whole(state, job, request.receive)
    return json_response(
        _answer(job, body, output, num_top, reading), headers={"x-request-id": job.name}
    )


def _check(body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")


def _answer(
    job: Job, body: ChatRequest, output: RequestOutput, num_top: int, reading: Reading
) -> dict[str, Any]:
    choices, echoed = [], _echoed(body)
    for completion in output.outputs:
        reader = reading.reader()
        told = Message.of([*reader.push(completion.text), *reader.finish()])
        content = echoed + told.content
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not (told.calls or told.thinking) else None,
            "refusal": None,
            **_thinking(told),
        }
        if told.calls:
            message["tool_calls"] = [call.to_json() for call in told.calls]
        choice: dict[str, Any] = {
            "index": completion.index,
            "message": message,
            "logprobs": None,
            "finish_reason": reader.finish_reason(completion.finish_reason),
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
        "usage": usage(
            job.num_prompt_tokens,
            num_output,
            output.num_cached_tokens,
            reading.num_thoughts(c.token_ids for c in output.outputs),
        ),
    }
    if body.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_entries(output)
    if body.return_token_ids:
        answer["prompt_token_ids"] = output.prompt_token_ids
    return answer


def _echoed(body: ChatRequest) -> str:
    """The text that ``echo`` repeats: of the last message, if the answer is by the same role."""
    last = body.messages[-1]
    if not body.echo or (
        last.get("role") != "assistant" and body.add_generation_prompt is not False
    ):
        return ""
    content = last.get("content")
    texts = [part.get("text") for part in content] if isinstance(content, list) else [content]
    return "\n".join(text for text in texts if isinstance(text, str))


def _thinking(told: Message) -> dict[str, str]:
    """The fields of the thinking: vLLM's older name and its newer one."""
    return {"reasoning_content": told.thinking, "reasoning": told.thinking} if told.thinking else {}


def _stream(
    job: Job, body: ChatRequest, num_top: int, reading: Reading
) -> AsyncGenerator[bytes, None]:
    started: set[int] = set()
    readers: dict[int, Reader] = {}
    echoed = _echoed(body)

    def choice(delta: Delta) -> dict[str, Any] | None:
        finish_reason = delta.output.finish_reason
        if (reader := readers.get(delta.index)) is None:
            reader = readers[delta.index] = reading.reader()
        first_call, parts = reader.num_calls, reader.push(delta.text)
        if finish_reason is not None:
            parts = [*parts, *reader.finish()]
            finish_reason = reader.finish_reason(finish_reason)
        told = Message.of(parts)
        is_first = delta.index not in started
        text = echoed + told.content if is_first else told.content
        is_told = text or told.calls or told.thinking or finish_reason is not None
        if not is_told and delta.logprobs is None and not body.return_token_ids:
            return None
        message: dict[str, Any] = {"role": "assistant"} if is_first else {}
        started.add(delta.index)
        if text or (is_first and not (told.calls or told.thinking)):
            message["content"] = text
        message |= _thinking(told)
        if told.calls:
            numbered = enumerate(told.calls, start=first_call)
            message["tool_calls"] = [{"index": n, **call.to_json()} for n, call in numbered]
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

    head_of_all = head(job, "chat.completion.chunk")
    return chunks(job, body, head_of_all, choice, reading.num_thoughts)
