"""Answers: the outputs of a job as a whole, or as server-sent events while they grow.

A client that goes away ends its job at once: somebody always listens for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....engine.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from ..intake.answer_log import GONE, REASON
from ..intake.errors import ApiError, api_error
from ..jobs.state import Job, ServerState

DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client has closed its connection; nobody reads an answer."""


@dataclass(slots=True)
class Delta:
    """Text and tokens that an output has gained.  ``index`` counts the outputs of all prompts."""

    index: int
    prompt: int
    request: RequestOutput
    output: CompletionOutput
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    text_offsets: list[int] | None


@asynccontextmanager
async def listening(state: ServerState, job: Job, receive: Receive) -> AsyncIterator[None]:
    """Abort a job when its client goes away, or the block ends before it does."""

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        state.abort(job, ClientGone())

    listener = asyncio.ensure_future(listen())
    try:
        yield
    finally:
        listener.cancel()
        state.close(job)


async def whole(state: ServerState, job: Job, receive: Receive) -> list[RequestOutput]:
    """The finished outputs of a job's prompts, in order.

    Raises:
        ApiError: one ended with an error.
        ClientGone: nobody waits for them.
    """
    finished: dict[str, RequestOutput] = {}
    async with listening(state, job, receive):
        while not job.stream.is_done:
            for output in await job.stream.next():
                finished[output.request_id] = output
    outputs = [finished[request.request_id] for request in job.requests]
    for output in outputs:
        for completion in output.outputs:
            check_finish(completion)
    return outputs


def check_finish(completion: CompletionOutput) -> None:
    """Raise ``ApiError`` if a request failed in a step: 400 if its parameters are to blame."""
    if completion.finish_reason == "error":
        status = 400 if completion.refused else 500
        raise ApiError(status, f"generation failed: {completion.error}", code="generation_failed")


async def deltas(job: Job) -> AsyncGenerator[list[Delta], None]:
    """Yield what the outputs of a job have gained since the last time."""
    seen: dict[int, tuple[int, int]] = {}
    finished: set[int] = set()
    while not job.stream.is_done:
        gained = []
        for output in await job.stream.next():
            prompt = job.prompt_number(output.request_id)
            for completion in output.outputs:
                index = prompt * job.num_outputs + completion.index
                num_characters, num_tokens = seen.get(index, (0, 0))
                if index in finished or (
                    len(completion.token_ids) == num_tokens and completion.finish_reason is None
                ):
                    continue
                check_finish(completion)
                if completion.finish_reason is not None:
                    finished.add(index)
                logprobs, offsets = completion.logprobs, completion.text_offsets
                gained.append(
                    Delta(
                        index,
                        prompt,
                        output,
                        completion,
                        completion.text[num_characters:],
                        completion.token_ids[num_tokens:],
                        None if logprobs is None else logprobs[num_tokens:],
                        None if offsets is None else offsets[num_tokens:],
                    )
                )
                seen[index] = (len(completion.text), len(completion.token_ids))
        if gained:
            yield gained


class EventStream(Response):
    """A response of server-sent events.

    Args:
        events: what to send; several events may come as one piece.
        failed: the event that tells of an error.
        done: what ends the stream.
    """

    def __init__(
        self,
        state: ServerState,
        job: Job,
        events: AsyncGenerator[bytes, None],
        failed: Callable[[ApiError], bytes] = lambda error: event(error.body()),
        done: bytes = DONE,
    ) -> None:
        super().__init__(None, 200, media_type="text/event-stream")
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-request-id"] = job.name
        self._state, self._job, self._events = state, job, events
        self._failed, self._done = failed, done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with listening(self._state, self._job, receive):
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            try:
                async for piece in self._events:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                last = self._done
            except ClientGone:
                scope[REASON] = GONE
                return
            except Exception as error:  # the status is sent: an event has to tell
                answer = api_error(error)
                scope[REASON] = answer.message
                last = self._failed(answer) + self._done
            finally:
                await self._events.aclose()
            await send({"type": "http.response.body", "body": last, "more_body": False})


_encoder = msgspec.json.Encoder()


def event(content: Any) -> bytes:
    return b"data: " + _encoder.encode(content) + b"\n\n"


def named_event(content: dict[str, Any]) -> bytes:
    """An event with its ``type`` as its name."""
    return f"event: {content['type']}\n".encode() + event(content)


def head(job: Job, kind: str) -> dict[str, Any]:
    """OpenAI's answers and their events begin with these fields."""
    return {"id": job.name, "object": kind, "created": job.created, "model": job.model}


def usage(
    num_prompt: int, num_output: int, num_cached: int, num_thoughts: int | None = None
) -> dict[str, Any]:
    """OpenAI's count of tokens; ``num_cached`` of the prompts were in the prefix cache, and
    ``num_thoughts`` of the outputs are thinking, if that is told apart."""
    counts: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
    if num_thoughts is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": num_thoughts}
    return counts


CountThoughts = Callable[[Iterable[Sequence[int]]], int | None]
"""Number of tokens of thinking in the token ids of outputs; None if it is not told apart."""


class UsageCount:
    """Counts the tokens of a stream, and adds them to its events where they were asked for."""

    def __init__(self, job: Job, body: Any, count_thoughts: CountThoughts | None = None) -> None:
        options = body.stream_options
        self._count_thoughts, self._outputs = count_thoughts, dict[int, list[int]]()
        self.at_end = bool(options and options.include_usage)
        self._always = self.at_end and bool(options.continuous_usage_stats)
        self._num_prompt, self._num_output = job.num_prompt_tokens, 0
        self._num_cached_of: dict[int, int] = {}
        self._num_cached = 0

    def add(self, delta: Delta) -> None:
        self._num_output += len(delta.token_ids)
        self._outputs[delta.index] = delta.output.token_ids
        num_cached = delta.request.num_cached_tokens
        self._num_cached += num_cached - self._num_cached_of.get(delta.prompt, 0)
        self._num_cached_of[delta.prompt] = num_cached

    def so_far(self) -> dict[str, Any]:
        """The part of an event that the client wants to have of it."""
        if self._always:
            return {"usage": self.total()}
        return {"usage": None} if self.at_end else {}

    def total(self) -> dict[str, Any]:
        count = self._count_thoughts
        num_thoughts = None if count is None else count(self._outputs.values())
        return usage(self._num_prompt, self._num_output, self._num_cached, num_thoughts)


async def chunks(
    job: Job,
    body: Any,
    head: dict[str, Any],
    choice: Callable[[Delta], dict[str, Any] | None],
    count_thoughts: CountThoughts | None = None,
) -> AsyncGenerator[bytes, None]:
    """The events of a completion: one for each delta with its ``choice``, then the usage if the
    client wants it.  A delta of which there is nothing to tell, such as a part of a character, has
    none.  ``head`` is what all events share."""
    count = UsageCount(job, body, count_thoughts)
    async for gained in deltas(job):
        pieces = []
        for delta in gained:
            count.add(delta)
            if (choice_of_delta := choice(delta)) is None:
                continue
            if body.return_token_ids:
                choice_of_delta["token_ids"] = delta.token_ids
            pieces.append(event({**head, "choices": [choice_of_delta], **count.so_far()}))
        if pieces:
            yield b"".join(pieces)
    if count.at_end:
        yield event({**head, "choices": [], "usage": count.total()})
