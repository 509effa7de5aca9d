"""``LLM``: the engine for scripts, in one process, under vLLM's names."""

from __future__ import annotations

import difflib
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ..config import EngineOptions, UserError
from .chat_template import Message
from .check import check_start
from .collector import collector_at_rest
from .inputs import Prompt
from .loop import CheckedRequest, EngineLoop
from .outputs import RequestOutput
from .sampling_params import SamplingParams

_LONGEST_PAUSE_S = 0.001
"""Of checking requests between two steps."""
_QUEUED_AT_ONCE = 32
"""Requests between two steps: about a millisecond."""


class LLM:
    """A loaded model that generates.

    ``LLM("abacus").generate("12+34=")``.  Options are those of ``EngineOptions``.

    Raises:
        UserError: an option is unknown or bad, or the model cannot be loaded.
    """

    def __init__(self, model: str = "abacus", **options: Any) -> None:
        checked = _engine_options(model, options)
        check_start(checked)
        # Only now: this imports torch, which takes seconds.
        from .engine import Engine

        self._attach(Engine(checked))

    @classmethod
    def from_engine(cls, engine: EngineLoop) -> LLM:
        """Wrap an engine that exists."""
        llm = cls.__new__(cls)
        llm._attach(engine)
        return llm

    def _attach(self, engine: EngineLoop) -> None:
        self.engine = engine
        # One engine may serve a generate() while streams are read in turn.
        self._inbox: dict[str, deque[RequestOutput]] = {}
        self._stepped_s = 0.0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt, batched; the results are in the order of the prompts.

        Args:
            prompts: one or several, each text, token ids or ``{"prompt_token_ids": …}``.
            sampling_params: for all, or one for each prompt.
            use_tqdm: show a progress bar on stderr.
            priority: one for each prompt, lower first; under ``scheduling_policy="priority"``.

        Raises:
            UserError: a prompt or its parameters are bad; nothing is generated then.
        """
        batch = _prompt_list(prompts)
        every = zip(
            batch,
            _params_list(sampling_params, len(batch)),
            _priority_list(priority, len(batch)),
            strict=True,
        )
        checked: list[CheckedRequest] = []
        inbox: deque[RequestOutput] = deque()
        finished: dict[str, RequestOutput] = {}
        with collector_at_rest() as added:
            for prompt, params, rank in every:
                checked.append(
                    self.engine.check_request(prompt, params, final_only=True, priority=rank)
                )
                if time.perf_counter() - self._stepped_s > _LONGEST_PAUSE_S:
                    self._keep_running()
            try:
                with _Progress(len(checked), enabled=use_tqdm) as bar:
                    for number, request in enumerate(checked, start=1):
                        self._queue(request, inbox)
                        # By number, not by time: the same prompts are batched alike every time.
                        if number % _QUEUED_AT_ONCE == 0:
                            self._keep_running()
                            _take_all(inbox, finished, bar)
                    added()
                    while len(finished) < len(checked):
                        self._pump()
                        _take_all(inbox, finished, bar)
            finally:
                for request in checked:
                    self._drop(request.request_id)
        return [finished[request.request_id] for request in checked]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yield the output so far, whenever it has grown; several streams may be read in turn.

        The first item asked for queues the prompt (and raises ``UserError`` when it is bad);
        closing the iterator aborts the request.
        """
        request = self.engine.check_request(prompt, sampling_params)
        inbox: deque[RequestOutput] = deque()
        self._queue(request, inbox)
        try:
            while True:
                while not inbox:
                    self._pump()
                output = inbox.popleft()
                yield output
                if output.finished:
                    return
        finally:
            self._drop(request.request_id)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """``generate`` for one conversation or several, through the model's chat template.

        Raises:
            UserError: the model has no chat template, or the template refuses the messages.
        """
        one = not messages or isinstance(messages[0], Mapping)
        conversations: Any = [messages] if one else messages
        prompts = [
            self.engine.inputs.chat_prompt(
                c, add_generation_prompt=add_generation_prompt, **template_variables
            )
            for c in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def report(self) -> dict[str, Any]:
        """The engine's account of itself, see ``Engine.report``; plain data."""
        return self.engine.report()

    def _queue(self, request: CheckedRequest, inbox: deque[RequestOutput]) -> None:
        self.engine.queue(request)
        self._inbox[request.request_id] = inbox

    def _drop(self, request_id: str) -> None:
        """Forget a request; one that is unfinished is aborted."""
        if self._inbox.pop(request_id, None) is not None:
            self.engine.abort(request_id)

    def _keep_running(self) -> None:
        """While requests are added: run the next step, so that those before them need not wait.
        An engine at rest starts once all its seats are taken."""
        scheduler = self.engine.scheduler
        if scheduler.running or scheduler.num_unfinished >= scheduler.max_num_seqs:
            self._pump()

    def _pump(self) -> None:
        """Run one step and hand its outputs to those who wait for them."""
        for output in self.engine.step():
            if output.request_id in self._inbox:
                self._inbox[output.request_id].append(output)
        self._stepped_s = time.perf_counter()


class _Progress:
    """Finished requests and tokens a second, on stderr.  Importing what draws it takes 15 ms, in
    which no step would run: without a bar nothing is imported."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._num_tokens = 0
        self._progress: Any = None
        if not enabled:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed

        self._progress = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            Elapsed(),
            TextColumn("{task.fields[rate]}"),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("generating", total=total, rate="")

    def __enter__(self) -> _Progress:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def advance(self, num_tokens: int) -> None:
        if self._progress is None:
            return
        self._num_tokens += num_tokens
        elapsed = self._progress.tasks[0].elapsed or 0.0
        rate = f"{self._num_tokens / elapsed:.0f} tokens/s" if elapsed > 0 else ""
        self._progress.update(self._task, advance=1, rate=rate)


def _take_all(
    inbox: deque[RequestOutput], finished: dict[str, RequestOutput], bar: _Progress
) -> None:
    while inbox:
        output = inbox.popleft()
        finished[output.request_id] = output
        bar.advance(sum(len(c.token_ids) for c in output.outputs))


def _engine_options(model: str, options: dict[str, Any]) -> EngineOptions:
    known = [f.name for f in fields(EngineOptions)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else "see EngineOptions"
            raise UserError(f"unknown option {name!r}: {hint}")
    return EngineOptions(model=model, **options)


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Several prompts, whether one or more were given: a list of ints is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if len(prompts) > 0 and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _params_list(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise UserError(f"{len(params)} sampling_params for {count} prompts: expected one for each")
    return list(params)


def _priority_list(priority: Sequence[int] | None, count: int) -> list[int]:
    if priority is None:
        return [0] * count
    if len(priority) != count:
        raise UserError(f"{len(priority)} priorities for {count} prompts: expected one for each")
    return list(priority)
