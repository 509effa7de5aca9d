"""``ServerState``: the engine's client, what the server was told to do, and whether it is well."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from ....config import UserError
from ....engine.frontend.inputs import Prompt
from ....engine.frontend.loop import CheckedRequest
from ....engine.messages.requests import AddRequest
from ....engine.messages.sampling_params import SamplingParams
from ....engine.process.client import EngineClient
from ....engine.process.heartbeat import Heartbeat
from ....engine.process.output_stream import OutputStream
from ..intake.answer_log import AnswerLog
from ..intake.errors import ApiError, api_error, overloaded
from ..intake.fields import FieldNotes
from ..intake.limits import Uploads
from ..intake.protocol import Generation
from ..intake.reader import BodyReader
from ..reasoning.parsers import Parser
from .metrics import TALLY, Metrics
from .room import Room
from .settings import Settings

ABORT, ALL, ADMIN = "abort", "all", "admin"
"""What an API process asks the others, the name that means every job, and the owner who may end
all of them."""
if TYPE_CHECKING:
    from .tracing import Tracing

_RETRY_AFTER_S = "1"
_BEAT_S = 0.5
"""Time between two beats of an API process, in seconds."""
_MOST_OUTPUTS = 16384
"""Most outputs of one call, over all its prompts."""
_MOST_CARRIED = 2**26
"""Most characters and token ids that all outputs of a call together have of prompts and of what is
asked of them: each output of an answer may repeat its prompt, and each has a grammar of its own."""
_MOST_LOGPROBS = 2**20
"""Most log probabilities of a call, unless one output of the longest request may have more, of
``_USUAL_LOGPROBS`` a token."""
_USUAL_LOGPROBS = 20


class Phase(StrEnum):
    """Where the server is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass
class Job:
    """A caller's request on its way: its prompts, in order, and where their outputs come.

    Attributes:
        owner: whose API key it came with, as the request's scope has it.
    """

    name: str
    owner: str
    model: str
    created: int
    requests: list[CheckedRequest]
    stream: OutputStream
    num_outputs: int
    """Outputs of each prompt."""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(each.request.prompt_token_ids) for each in self.requests)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {each.request_id: number for number, each in enumerate(self.requests)}

    def prompt_number(self, request_id: str) -> int:
        """The number of the prompt that a request of the engine is for."""
        return self._numbers[request_id]


class ServerState:
    """Takes jobs while it serves; knows those that are open."""

    def __init__(self, client: EngineClient, settings: Settings) -> None:
        self.client, self.settings = client, settings
        self.phase = Phase.STARTING
        self.started_at = int(time.time())
        self.metrics = Metrics(settings.model_names[0], client)
        self.jobs: dict[str, Job] = {}
        self.room = Room(settings.max_waiting)
        self.uploads, self.reader = Uploads(settings.max_body_bytes), BodyReader()
        self.tool_format = settings.tool_format
        self.thinking: Parser | None = None
        """Finds the model's thinking, once the tokenizer is there."""
        self.answer_log = AnswerLog(settings.log)
        self.fields = FieldNotes(settings.strict_fields)
        self._beats: list[Heartbeat] = []
        """The pages of all API processes, if there are several; steps are numbers of open jobs."""
        client.on_step = self.metrics.on_step
        self.tracing: Tracing | None = None
        if settings.otlp_endpoint is not None:
            from .tracing import Tracing

            self.tracing = Tracing(settings.otlp_endpoint)
            client.on_finished = self.tracing.end

    def watch_others(self) -> None:
        """Have the other API processes see that this one moves, and see them.  The first makes the
        pages before it starts the others."""
        seat, folder = self.client.seat, self.client.folder
        if seat.count == 1:
            return
        self._beats = [Heartbeat(folder / f"api{number}") for number in range(seat.count)]
        for page in self._beats if seat.index == 0 else ():
            page.beat(0)
        self._beat()

    def _beat(self) -> None:
        self._note_jobs()
        pause_s = min(_BEAT_S, self.settings.stall_s / 4)
        asyncio.get_running_loop().call_later(pause_s, self._beat)

    def _note_jobs(self) -> None:
        if self._beats:
            self._beats[self.client.seat.index].beat(len(self.jobs))

    @property
    def num_jobs(self) -> int:
        """Open jobs of all API processes."""
        if not self._beats:
            return len(self.jobs)
        return sum(page.read()[0] for page in self._beats)

    def answer_peer(self, what: str, names: list[str]) -> Any:
        """Answer a question of another API process."""
        if what == TALLY:
            return self.metrics.count()
        return self.abort_named(names[1:], names[0]) if what == ABORT else None

    def health(self) -> str:
        """Why no request should be sent here now; "" if it should."""
        if self.phase is not Phase.SERVING:
            return str(self.phase)
        beats = [replica.heartbeat.read() for replica in self.client.replicas]
        step, age_s = max(beats, key=lambda beat: beat[1])
        if age_s > self.settings.stall_s:
            return f"stalled: nothing moved for {age_s:.1f} s, since step {step}"
        for number, page in enumerate(self._beats):
            _, age_s = page.read()
            if age_s > self.settings.stall_s:
                return f"stalled: API process {number} has not moved for {age_s:.1f} s"
        return ""

    def check_serving(self, *, may_sleep: bool = False) -> None:
        """Raise the answer to whoever asks before the start, after the end or during a sleep."""
        if self.phase is Phase.DEAD:
            raise ApiError(500, f"the engine has ended: {self.client.dead}", code="engine_dead")
        if self.phase is not Phase.SERVING:
            raise ApiError(
                503, f"the server is {self.phase}", headers={"retry-after": _RETRY_AFTER_S}
            )
        if self.client.is_sleeping and not may_sleep:
            raise ApiError(503, "the engine sleeps; POST /wake_up ends that", code="sleeping")

    def check_model(self, name: str | None) -> str:
        """The name that an answer carries; raises a 404 for a model that is not served."""
        names = self.settings.model_names
        if name is None or name in names:
            return name or names[0]
        raise ApiError(
            404,
            f"model {name[:200]!r} is not served here; expected {', '.join(names)}",
            param="model",
            code="model_not_found",
        )

    def check_room(self, num_outputs: int) -> None:
        """Raise the answer to whoever comes while too many wait."""
        if num_outputs > _MOST_OUTPUTS:
            raise ApiError(
                400, f"{num_outputs} outputs in one call: expected {_MOST_OUTPUTS} at most"
            )
        num_open = self.room.num_counted(self.client.num_open)
        waiting = num_open * self.client.seat.count - self.client.max_num_seqs
        if waiting >= self.room.max_waiting:
            self.metrics.tally.refused += 1
            raise overloaded(f"{waiting} requests wait already; try again later")

    async def submit(
        self, body: Generation, prompts: Sequence[Prompt], params: SamplingParams, request: Request
    ) -> Job:
        """Check the prompts of a call and queue them.

        Args:
            request: the HTTP request that brought the call.

        Raises:
            ApiError: there is no room, the id is in use, or a prompt is bad.
        """
        model = self.check_model(body.model)
        _check_size(prompts, params)
        if body.stream and body.prompt_logprobs is not None:
            message = "prompt_logprobs are not in streams; leave out one of both"
            raise ApiError(400, message, param="prompt_logprobs")
        name = body.id_prefix + (body.request_id or self.metrics.new_name())
        try:
            with self.preparing(len(prompts) * params.n):
                checked = await self._check(prompts, body, params, name)
            self.check_serving()  # much may have happened while prompts were encoded
            if name in self.jobs:
                raise ApiError(400, f"request_id={name!r} is in use", param="request_id")
            now = time.monotonic()
            stream = self.client.submit(checked)
        except UserError as error:
            raise api_error(error, body.prompt_field) from error
        self.metrics.on_submit(checked, now)
        if self.tracing is not None:
            for each in checked:
                self.tracing.begin(name, model, each, request.headers)
        owner = request.scope["owner"]
        job = Job(name, owner, model, int(time.time()), checked, stream, params.n)
        self.jobs[name] = job
        self.room.open(name, stream.open, params.n)
        self._note_jobs()
        self.answer_log.write_request(name, [each.request for each in checked])
        return job

    async def _check(
        self, prompts: Sequence[Prompt], body: Generation, params: SamplingParams, name: str
    ) -> list[CheckedRequest]:
        checked: list[CheckedRequest] = []
        num_logprobs = 0
        for number, prompt in enumerate(prompts):
            if number > 0:
                await asyncio.sleep(0)  # streams go on while many prompts are encoded
            if body.cache_salt is not None:
                salted: dict[str, Any] = {"cache_salt": body.cache_salt}
                if isinstance(prompt, str):
                    prompt = {**salted, "prompt": prompt}
                elif isinstance(prompt, dict):
                    prompt = {**salted, **prompt}
                else:
                    prompt = {**salted, "prompt_token_ids": prompt}
            checked.append(
                await self.client.check(
                    prompt,
                    params,
                    final_only=not body.stream,
                    priority=body.priority or 0,
                    call=name if len(prompts) > 1 else "",
                )
            )
            _check_length(body, checked[-1], self.client.inputs.max_model_len)
            num_logprobs += _num_logprobs(checked[-1].request)
            self._check_logprobs(num_logprobs, len(prompts), params)
        return checked

    @contextmanager
    def preparing(self, num_outputs: int) -> Iterator[None]:
        """Count outputs as waiting while their prompts are made and encoded.

        Raises:
            ApiError: there is no room for them.
        """
        self.check_room(num_outputs)
        self.metrics.num_preparing += num_outputs
        try:
            with self.room.preparing(num_outputs):
                yield
        finally:
            self.metrics.num_preparing -= num_outputs

    def _check_logprobs(self, count: int, num_prompts: int, params: SamplingParams) -> None:
        """Raise the answer to a call whose prompts so far would have ``count`` log probabilities,
        if those of the longest output fit."""
        most = max(_MOST_LOGPROBS, self.client.inputs.max_model_len * (_USUAL_LOGPROBS + 1))
        if count > most:
            asked = {"logprobs": params.logprobs, "prompt_logprobs": params.prompt_logprobs}
            names = [name for name, value in asked.items() if value is not None]
            fields = ", ".join(f"{name}={asked[name]}" for name in names)
            raise ApiError(
                400,
                f"{fields}: {count} log probabilities or more in one call of "
                f"{num_prompts} prompts with n={params.n} and max_tokens={params.max_tokens}, "
                f"expected {most} at most; lower these, or send fewer prompts a call",
                param=names[0],
            )

    def abort_named(self, names: Sequence[str], owner: str) -> list[str]:
        """End jobs of an owner by name, or ``ALL``; returns the names of those that ran here."""
        wanted = list(self.jobs) if ALL in names else names
        jobs = [self.jobs[name] for name in dict.fromkeys(wanted) if name in self.jobs]
        jobs = [job for job in jobs if owner in (ADMIN, job.owner)]
        for job in jobs:
            self.abort(job, ApiError(499, "the request was aborted", code="aborted"))
        return [job.name for job in jobs]

    def close(self, job: Job) -> None:
        """Forget a job; what still runs of it is aborted."""
        self.jobs.pop(job.name, None)
        self.room.close(job.name)
        self._note_jobs()
        self.metrics.on_close(job.requests, aborted=bool(job.stream.open))
        if self.tracing is not None:
            self.tracing.forget(job.stream.open)
        if job.stream.open:
            with suppress(UserError):
                self.client.abort(job.stream)

    def abort(self, job: Job, error: Exception) -> None:
        """End a job; whoever waits for it gets ``error``."""
        self.close(job)
        job.stream.fail(error)


def _check_length(body: Generation, checked: CheckedRequest, most: int) -> None:
    """Raise the answer to a call for more tokens than fit behind its prompt."""
    names = ("max_completion_tokens", "max_output_tokens", "max_tokens")
    asked = {name: getattr(body, name, None) for name in names}
    name, wanted = next(((n, each) for n, each in asked.items() if each is not None), ("", 0))
    length = len(checked.request.prompt_token_ids)
    if length + wanted > most and not body.is_cut:
        raise ApiError(
            400,
            f"{name}={wanted}: the prompt of {length} tokens leaves room for {most - length} of "
            f"max_model_len={most}; lower {name}, or leave it out",
            param=name,
        )


def _check_size(prompts: Sequence[Prompt], params: SamplingParams) -> None:
    """Raise the answer to a call whose many outputs would each carry much."""
    texts_or_ids = (
        prompt["prompt_token_ids"] if isinstance(prompt, Mapping) else prompt for prompt in prompts
    )
    texts = (*params.stop_strings, *params.bad_texts, params.grammar or "")
    ids = len(params.logit_bias or ()) + len(params.allowed_token_ids or ())
    beside = ids + sum(map(len, texts))
    carried = params.n * (sum(map(len, texts_or_ids)) + len(prompts) * beside)
    if carried > _MOST_CARRIED:
        raise ApiError(
            400,
            f"n={params.n}: the outputs carry {carried} tokens and characters of prompts, stops, "
            f"bad_words and grammars together, expected {_MOST_CARRIED} at most; lower n",
            param="n",
        )


def _num_logprobs(request: AddRequest) -> int:
    """The most log probabilities that the outputs of a request and its prompt have: of each token,
    its own and those of the likeliest."""
    params, num_prompt = request.sampling_params, len(request.prompt_token_ids)
    count = 0
    if params.logprobs is not None:
        num_tokens = params.n * (request.max_total_tokens - num_prompt)
        count += num_tokens * (params.logprobs + 1)
    if params.prompt_logprobs is not None:
        count += num_prompt * (params.prompt_logprobs + 1)
    return count
