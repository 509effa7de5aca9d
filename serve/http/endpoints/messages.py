"""``/v1/messages``: Anthropic's form of a chat, which coding agents speak."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ....engine.frontend.outputs import RequestOutput
from ..intake.errors import ApiError, in_anthropic_form, json_response
from ..intake.protocol import CountTokensRequest, MessagesRequest
from ..jobs.state import Job, ServerState
from .body import read
from .events import EventStream, deltas, named_event, whole
from .generation import OF_CHATS, conversation, refuse, render
from .message_blocks import Blocks, chat_messages, chat_tools
from .reading import Reading

_EFFORTS = ("low", "medium", "high", "xhigh", "max")


async def messages(request: Request) -> Response:
    state: ServerState = request.app.state.server
    body = await read(request, MessagesRequest)
    state.check_serving()
    refuse(body, OF_CHATS, "an answer here has no such part; ask /v1/chat/completions")
    asked = body.model_copy(
        update={**_as_chat(body), **_sampling(body), **_budget(body, state.thinking is not None)}
    )
    talk = chat_messages(body)
    prompt, params, reading = await conversation(state, asked, talk, max_tokens=body.max_tokens)
    job = await state.submit(body, [prompt], params, request)
    if body.stream:
        return EventStream(state, job, _stream(job, reading, body.max_tokens), _failed, done=b"")
    (output,) = await whole(state, job, request.receive)
    (completion,) = output.outputs
    blocks = Blocks(reading.reader())
    blocks.push(completion.text)
    blocks.finish(completion, body.max_tokens)
    answer = _message(job, blocks, _usage(job, output))
    return json_response(answer, headers={"x-request-id": job.name, "request-id": job.name})


async def count_tokens(request: Request) -> Response:
    """``POST /v1/messages/count_tokens``: how many tokens a conversation has."""
    state: ServerState = request.app.state.server
    body = await read(request, CountTokensRequest)
    state.check_serving()
    state.check_model(body.model)
    changed = _as_chat(body)
    asked = body.model_copy(update=changed)
    tools = None if changed["tool_choice"] == "none" else changed["tools"]
    prompt: Any = await render(state, asked, chat_messages(body), tools)
    return json_response({"input_tokens": len(prompt["prompt_token_ids"])})


def _as_chat(body: CountTokensRequest) -> dict[str, Any]:
    """The fields from which a prompt is made, as chats have them."""
    changed = chat_tools(body)
    last = body.messages[-1] if body.messages else {}
    if last.get("role") == "assistant" and body.continue_final_message is None:
        changed["continue_final_message"] = True  # the model goes on with what is there of it
    thinks = (body.thinking or {}).get("type")
    if thinks not in (None, "enabled", "disabled", "adaptive"):
        raise ApiError(
            400, "thinking.type: expected enabled, disabled or adaptive", param="thinking"
        )
    effort = (body.output_config or {}).get("effort")
    if effort is not None and effort not in _EFFORTS:
        expected = ", ".join(_EFFORTS)
        raise ApiError(400, f"output_config.effort: expected {expected}", param="output_config")
    if thinks == "disabled":
        effort = "none"
        changed["include_reasoning"] = False
    elif thinks == "enabled":
        effort = effort or "high"
    if effort is not None and body.reasoning_effort is None:
        changed["reasoning_effort"] = effort
    return changed


def _budget(body: MessagesRequest, thinks: bool) -> dict[str, Any]:
    """``thinking.budget_tokens`` as ``thinking_token_budget``; nothing for a model that does not
    think, which agents ask too."""
    budget = (body.thinking or {}).get("budget_tokens")
    if budget is None:
        return {}
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        raise ApiError(400, "thinking.budget_tokens: expected 1 or more", param="thinking")
    if not thinks or body.thinking_token_budget is not None:
        return {}
    return {"thinking_token_budget": budget}


def _sampling(body: MessagesRequest) -> dict[str, Any]:
    """The fields of sampling that have another name in chats."""
    changed: dict[str, Any] = {}
    if body.stop_sequences is not None:
        refuse(body, ("stop",), "beside stop_sequences; give one of them")
        changed["stop"] = body.stop_sequences
    form = body.output_format or (body.output_config or {}).get("format")
    if form is not None:
        refuse(body, ("response_format",), "beside output_config.format; give one of them")
        schema = form.get("schema") if isinstance(form, dict) else None
        if not isinstance(schema, dict) or form.get("type") != "json_schema":
            message = "output_config.format: expected {'type': 'json_schema', 'schema': {…}}"
            raise ApiError(400, message, param="output_config")
        changed["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    return changed


def _message(job: Job, blocks: Blocks, counts: dict[str, int]) -> dict[str, Any]:
    return {
        "id": job.name,
        "type": "message",
        "role": "assistant",
        "model": job.model,
        "content": blocks.blocks,
        "stop_reason": blocks.stop_reason,
        "stop_sequence": blocks.stop_sequence,
        "usage": counts,
    }


def _usage(job: Job, output: RequestOutput | None) -> dict[str, int]:
    """Anthropic's count of tokens: those of the prompt that were cached are counted apart."""
    num_cached = 0 if output is None else output.num_cached_tokens
    return {
        "input_tokens": job.num_prompt_tokens - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": 0 if output is None else len(output.outputs[0].token_ids),
    }


async def _stream(job: Job, reading: Reading, max_tokens: int) -> AsyncGenerator[bytes, None]:
    blocks = Blocks(reading.reader())
    begun = _message(job, blocks, _usage(job, None))
    yield named_event({"type": "message_start", "message": begun})
    last: RequestOutput | None = None
    async for gained in deltas(job):
        events = []
        for delta in gained:
            last = delta.request
            events += blocks.push(delta.text)
            if delta.output.finish_reason is not None:
                events += blocks.finish(delta.output, max_tokens)
        if events:
            yield b"".join(map(named_event, events))
    stop = {"stop_reason": blocks.stop_reason, "stop_sequence": blocks.stop_sequence}
    ended = {"type": "message_delta", "delta": stop, "usage": _usage(job, last)}
    yield named_event(ended) + named_event({"type": "message_stop"})


def _failed(error: ApiError) -> bytes:
    return named_event(in_anthropic_form(error))
