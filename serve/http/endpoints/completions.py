"""``/v1/completions``: prompts of text or token ids, several at once, ``n`` outputs of each."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ....config import UserError
from ....engine.frontend.inputs import Prompt
from ....engine.frontend.outputs import RequestOutput
from ....engine.messages.sampling_params import SamplingParams
from ..intake.errors import ApiError, api_error, as_json, json_response
from ..intake.protocol import CompletionRequest
from ..jobs.state import Job, ServerState
from .body import read
from .events import Delta, EventStream, chunks, head, usage, whole
from .generation import grammar_of, sampling_params, work_on
from .logprobs import completion_logprobs, joined, prompt_completion_logprobs, prompt_entries


async def completions(request: Request) -> Response:
    state: ServerState = request.app.state.server
    body = await read(request, CompletionRequest)
    state.check_serving()
    _check(body)
    make = partial(_sampling, body, state.client.inputs.default_sampling)
    params = await work_on(state, make, (body.response_format, body.structured_outputs))
    prompts = await _prompts(state, body)
    job = await state.submit(body, prompts, params, request)
    if body.stream:
        return EventStream(state, job, _stream(state, job, body))
    outputs = await whole(state, job, request.receive)
    return json_response(_answer(state, job, body, outputs), headers={"x-request-id": job.name})


def _check(body: CompletionRequest) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, "best_of: give n alone; all n outputs come back", param="best_of")
    if body.thinking_token_budget not in (None, -1):
        message = "thinking_token_budget: thinking is told apart in chats; use /v1/chat/completions"
        raise ApiError(400, message, param="thinking_token_budget")
    if body.max_tokens == 0 and (not body.echo or body.stream):
        raise ApiError(400, "max_tokens=0: expected 1, or echo without stream", param="max_tokens")


def _sampling(body: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """``echo`` with ``logprobs`` asks for those of the prompt too.  ``max_tokens=0`` asks for no
    other; a token is generated then, and not shown."""
    of_prompt = [n for n in (body.prompt_logprobs, body.logprobs if body.echo else None) if n]
    asked = body.prompt_logprobs is not None or (body.echo and body.logprobs is not None)
    more: dict[str, Any] = {"max_tokens": 1} if body.max_tokens == 0 else {}
    return sampling_params(
        body,
        defaults,
        grammar=grammar_of(body),
        logprobs=body.logprobs,
        prompt_logprobs=max(of_prompt, default=0) if asked else None,
        **more,
    )


async def _prompts(state: ServerState, body: CompletionRequest) -> list[Prompt]:
    prompt: Any = body.prompt
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    prompts: list[Prompt] = list(prompt) if several else [prompt]
    if body.add_special_tokens is False:
        with state.preparing(len(prompts) * (body.n or 1)):
            prompts = [
                await _without_special(state, p) if isinstance(p, str) else p for p in prompts
            ]
    return prompts


async def _without_special(state: ServerState, text: str) -> Prompt:
    """A text as token ids, without those that the model expects around a prompt."""
    try:
        ids = await state.client.encode(text, add_special_tokens=False)
    except UserError as error:
        raise api_error(error, "prompt") from error
    return {"prompt": text, "prompt_token_ids": ids}


def _prompt_text(state: ServerState, job: Job, number: int) -> str:
    checked = job.requests[number]
    if checked.prompt is not None:
        return checked.prompt
    tokenizer = state.client.inputs.require_tokenizer()
    return tokenizer.decode(checked.request.prompt_token_ids, False)


def _echo_logprobs(
    state: ServerState, output: RequestOutput, echoed: str, as_ids: bool
) -> dict[str, Any]:
    """The log probabilities of the text that ``echo`` repeats."""
    return prompt_completion_logprobs(output, state.client.inputs.tokenizer, len(echoed), as_ids)


def _answer(
    state: ServerState, job: Job, body: CompletionRequest, outputs: Sequence[RequestOutput]
) -> dict[str, Any]:
    choices: list[Any] = []
    hidden, as_ids = body.max_tokens == 0, bool(body.return_tokens_as_token_ids)
    for number, output in enumerate(outputs):
        echoed = _prompt_text(state, job, number) if body.echo else ""
        for completion in output.outputs:
            choice: dict[str, Any] = {
                "index": len(choices),
                "text": echoed if hidden else echoed + completion.text,
                "logprobs": None,
                "finish_reason": "length" if hidden else completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            if completion.logprobs is not None:
                steps, offsets = completion.logprobs, completion.text_offsets
                if hidden:
                    steps, offsets = [], None
                choice["logprobs"] = completion_logprobs(steps, offsets, len(echoed), as_ids)
                if body.echo:
                    before = _echo_logprobs(state, output, echoed, as_ids)
                    choice["logprobs"] = joined(before, choice["logprobs"])
            if body.return_token_ids:
                choice["prompt_token_ids"] = output.prompt_token_ids
                choice["token_ids"] = [] if hidden else completion.token_ids
            if body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_entries(output)
            choices.append(as_json(choice))
    num_output = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    return {
        **head(job, "text_completion"),
        "choices": choices,
        "usage": usage(job.num_prompt_tokens, 0 if hidden else num_output, num_cached),
    }


def _stream(state: ServerState, job: Job, body: CompletionRequest) -> AsyncGenerator[bytes, None]:
    echoes: dict[int, int] = {}
    as_ids = bool(body.return_tokens_as_token_ids)

    def choice(delta: Delta) -> dict[str, Any] | None:
        is_first = delta.index not in echoes
        is_told = delta.text or delta.output.finish_reason is not None or (is_first and body.echo)
        if not is_told and delta.logprobs is None and not body.return_token_ids:
            return None
        echoed = _prompt_text(state, job, delta.prompt) if body.echo and is_first else ""
        before = echoes.setdefault(delta.index, len(echoed))
        logprobs = None
        if delta.logprobs is not None:
            logprobs = completion_logprobs(delta.logprobs, delta.text_offsets, before, as_ids)
            if echoed:
                logprobs = joined(_echo_logprobs(state, delta.request, echoed, as_ids), logprobs)
        return {
            "index": delta.index,
            "text": echoed + delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.output.finish_reason,
            "stop_reason": delta.output.stop_reason,
        }

    return chunks(job, body, head(job, "text_completion"), choice)
