"""``LLM``: the engine for scripts, in one process, under vLLM's names."""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ..config import EngineOptions, UserError
from .chat_template import Message
from .inputs import Prompt
from .loop import EngineLoop
from .outputs import RequestOutput
from .sampling_params import SamplingParams


class LLM:
    """A loaded model that generates.

    ``LLM("abacus").generate("12+34=")``.  Options are those of ``EngineOptions``.

    Raises:
        UserError: an option is unknown or bad, or the model cannot be loaded.
    """

    def __init__(self, model: str = "abacus", **options: Any) -> None:
        checked = _engine_options(model, options)
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
        ids: list[str] = []
        finished: dict[str, RequestOutput] = {}
        try:
            for prompt, params, rank in zip(
                batch,
                _params_list(sampling_params, len(batch)),
                _priority_list(priority, len(batch)),
                strict=True,
            ):
                ids.append(self._add(prompt, params, final_only=True, priority=rank))
            for output in self._finish(ids, use_tqdm):
                finished[output.request_id] = output
        finally:
            self._drop(ids)
        return [finished[request_id] for request_id in ids]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yield the output so far, whenever it has grown; several streams may be read in turn.

        The first item asked for queues the prompt (and raises ``UserError`` when it is bad);
        closing the iterator aborts the request.
        """
        request_id = self._add(prompt, sampling_params, final_only=False)
        inbox = self._inbox[request_id]
        try:
            while True:
                while not inbox:
                    self._pump()
                output = inbox.popleft()
                yield output
                if output.finished:
                    return
        finally:
            self._drop([request_id])

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

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        final_only: bool,
        priority: int = 0,
    ) -> str:
        request_id = self.engine.add_request(
            prompt, params, final_only=final_only, priority=priority
        )
        self._inbox[request_id] = deque()
        return request_id

    def _drop(self, request_ids: Sequence[str]) -> None:
        """Forget requests; those that are unfinished are aborted."""
        for request_id in request_ids:
            self._inbox.pop(request_id, None)
            self.engine.abort(request_id)

    def _pump(self) -> None:
        """Run one step and hand its outputs to those who wait for them."""
        for output in self.engine.step():
            if output.request_id in self._inbox:
                self._inbox[output.request_id].append(output)

    def _finish(self, request_ids: Sequence[str], progress: bool) -> Iterator[RequestOutput]:
        """Run until these requests are finished; yields each as it finishes."""
        with _Progress(len(request_ids), enabled=progress) as bar:
            waiting = set(request_ids)
            while waiting:
                self._pump()
                done = [i for i in waiting if self._inbox[i]]
                for request_id in done:
                    waiting.remove(request_id)
                    output = self._inbox[request_id].pop()
                    bar.advance(sum(len(c.token_ids) for c in output.outputs))
                    yield output


class _Progress:
    """Finished requests and tokens a second, on stderr."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed

        self._num_tokens = 0
        self._progress = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            Elapsed(),
            TextColumn("{task.fields[rate]}"),
            console=Console(stderr=True),
            disable=not enabled,
        )
        self._task = self._progress.add_task("generating", total=total, rate="")

    def __enter__(self) -> _Progress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        elapsed = self._progress.tasks[0].elapsed or 0.0
        rate = f"{self._num_tokens / elapsed:.0f} tokens/s" if elapsed > 0 else ""
        self._progress.update(self._task, advance=1, rate=rate)


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
