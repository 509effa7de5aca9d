"""``LLM`` is the engine for scripts, in one process, under vLLM's names.

``generate`` and ``chat`` check all their requests, queue them, and drive the engine until the last
one has finished.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Self, cast

from ..config import UserError, collecting_rarely, engine_options
from ..config.ports import check_call
from ..config.process.logs import write_log_by_default
from ..config.vllm import CALLS, METHODS, Port
from .beam_search import BeamSearchOutput, BeamSearchParams, search
from .frontend.check import check_start
from .frontend.driver import Inbox, driver_of
from .frontend.engine_log import log_start
from .frontend.gc_pause import gc_paused
from .frontend.generate_bar import GenerateBar
from .frontend.generation_config import describe_default_sampling
from .frontend.inputs import Prompt, plain
from .frontend.loop import CheckedRequest, EngineLoop
from .frontend.outputs import Deltas, RequestOutput
from .frontend.tokenizer import library_tokenizer
from .messages.sampling_params import RequestOutputKind, SamplingParams
from .ranks.executor import started_ranks

if TYPE_CHECKING:
    from .core.loop import EngineCore
    from .engine import Engine
    from .engine_args import EngineArgs
    from .frontend.chat_messages import Message

_log = logging.getLogger(__name__)
_LONGEST_PAUSE_S = 0.001
"""Longest time spent checking new requests between two steps, in seconds."""
_QUEUED_AT_ONCE = 32
"""Requests that are queued between two steps, which takes about a millisecond."""
_TOOLS = CALLS["tools"]
_LISTS = ("tools", "documents")
"""Variables of templates that mean nothing when they are empty."""


class EngineWrapper:
    """What ``LLM`` and ``AsyncLLM`` share: an engine, the driver of its callers, and its end."""

    def __init__(
        self, model: str = "abacus", *, disable_log_stats: bool = False, **options: Any
    ) -> None:
        self._attach(start_engine(model, options, disable_log_stats))

    @classmethod
    def from_engine(cls, engine: EngineLoop) -> Self:
        """Wrap an engine that exists; others may be wrapped around it too."""
        wrapper = cls.__new__(cls)
        wrapper._attach(engine)
        return wrapper

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """An engine of vLLM's ``EngineArgs`` or ``AsyncEngineArgs``.

        Raises:
            UserError: as the constructor does.
        """
        return cls(**vars(engine_args))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Say of vLLM's methods that are not there what to use instead."""
            method = METHODS.get(name)
            says = "" if method is None else f"{name} is not there: {method.says}"
            if method is not None and method.port is Port.OTHER:
                says = f"{name} is called {method.says}"
            raise AttributeError(f"{type(self).__name__}.{says or f'{name}: no such attribute'}")

    def _attach(self, engine: EngineLoop) -> None:
        self.engine = engine
        self._driver = driver_of(engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free what the model holds on the device.  Requests that run in other threads end with a
        ``UserError``, and so does every later call."""
        self._driver.close()

    def report(self) -> dict[str, Any]:
        """The engine's account of itself, see ``Engine.report``; plain data."""
        self.engine.check_open(f"{type(self).__name__}.report")
        return self._driver.call(self.engine.report)

    def _reset_prefix_cache(self) -> bool:
        self.engine.check_open(f"{type(self).__name__}.reset_prefix_cache")
        return self._driver.call(cast("EngineCore", self.engine.core).reset_prefix_cache)

    def _sleep(self, level: int) -> None:
        self.engine.check_open(f"{type(self).__name__}.sleep")
        self._driver.call(lambda: cast("Engine", self.engine).sleep(level))

    def _wake_up(self, tags: Sequence[str] | None) -> None:
        self.engine.check_open(f"{type(self).__name__}.wake_up")
        self._driver.call(lambda: cast("Engine", self.engine).wake_up(tags))

    def _tokenizer(self) -> Any:
        return library_tokenizer(self.engine.inputs.require_tokenizer())


class LLM(EngineWrapper):
    """A loaded model that generates.

    ``LLM("abacus").generate("12+34=")``.  Options are those of ``EngineOptions``, and those of
    vLLM, each of which says what becomes of it (``config/vllm/``).  Any number of threads may call
    one ``LLM``: their requests are batched together.  ``close``, or leaving a ``with`` block, frees
    its memory.  The log (logger ``fusewright``) goes to stderr unless the program has set up
    ``logging``.

    Args:
        disable_log_stats: no line of throughput and KV cache use in the log every ten seconds of
            generating.

    Raises:
        UserError: an option is unknown or bad, or the model cannot be loaded.
    """

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        **ported: Any,
    ) -> list[RequestOutput]:
        """Generate for every prompt, batched; the results are in the order of the prompts.

        Args:
            prompts: one or several, each text, token ids or ``{"prompt_token_ids": …}``.
            sampling_params: for all, or one for each prompt; None: those that the model's
                ``generation_config.json`` recommends.
            use_tqdm: show a progress bar on stderr.
            priority: one for each prompt, lower first; under ``scheduling_policy="priority"``.
            ported: arguments of vLLM's that ask for nothing, such as ``lora_request=None``.

        Raises:
            UserError: a prompt or its parameters are bad; nothing is generated then.
        """
        self.engine.check_open("LLM.generate")
        check_call("LLM.generate", ported)
        batch = _prompt_list(prompts)
        every = zip(
            batch,
            _params_list(sampling_params, len(batch)),
            _priority_list(priority, len(batch)),
            strict=True,
        )
        driver, inbox = self._driver, Inbox()
        checked: list[CheckedRequest] = []
        finished: dict[str, RequestOutput] = {}
        with gc_paused() as added:
            for prompt, params, request_priority in every:
                checked.append(
                    self.engine.check_request(
                        prompt, params, final_only=True, priority=request_priority
                    )
                )
                if time.perf_counter() - self.engine.stepped_s > _LONGEST_PAUSE_S:
                    driver.keep_running(inbox)
            try:
                with GenerateBar(len(checked), enabled=use_tqdm) as bar:
                    # By number, not by time: the same prompts are batched alike every time.
                    for first in range(0, len(checked), _QUEUED_AT_ONCE):
                        driver.submit(checked[first : first + _QUEUED_AT_ONCE], inbox)
                        if first + _QUEUED_AT_ONCE <= len(checked):
                            driver.keep_running(inbox)
                    added()
                    while len(finished) < len(checked):
                        output = driver.wait(inbox)
                        finished[output.request_id] = output
                        bar.advance(sum(len(c.token_ids) for c in output.outputs))
            finally:
                if len(finished) < len(checked):
                    ids = [request.request_id for request in checked]
                    driver.drop((name for name in ids if name not in finished), inbox)
        return [finished[request.request_id] for request in checked]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Yield the output so far, whenever it has grown, or what ``output_kind`` of the parameters
        says; several streams may be read in turn.

        The first item asked for queues the prompt (and raises ``UserError`` when it is bad);
        closing the iterator aborts the request.
        """
        self.engine.check_open("LLM.stream")
        kind = self.engine.output_kind(sampling_params)
        final_only = kind is RequestOutputKind.FINAL_ONLY
        request = self.engine.check_request(prompt, sampling_params, final_only=final_only)
        driver, inbox, finished, deltas = self._driver, Inbox(), False, Deltas()
        try:
            driver.submit([request], inbox)
            while not finished:
                output = driver.wait(inbox)
                finished = output.finished
                yield deltas.of(output) if kind is RequestOutputKind.DELTA else output
        finally:
            if not finished:
                driver.drop([request.request_id], inbox)

    def chat(
        self,
        messages: Iterable[Message] | Iterable[Sequence[Message]],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """``generate`` for one conversation or several, through the model's chat template.

        Args:
            continue_final_message: the model goes on with the last message; give
                ``add_generation_prompt=False`` with it.
            chat_template_kwargs: variables of the template, as others by keyword; ``tools`` and
                ``documents`` are lists of objects.

        Raises:
            UserError: the model has no chat template, it reads no such variable, or it refuses the
                messages.
        """
        self.engine.check_open("LLM.chat")
        ported = [name for name in template_variables if CALLS.get(name, _TOOLS) is not _TOOLS]
        check_call("LLM.chat", {name: template_variables.pop(name) for name in ported})
        if not isinstance(chat_template_kwargs, Mapping | None):
            raise UserError(f"chat_template_kwargs={chat_template_kwargs!r}: expected a mapping")
        inputs = self.engine.inputs
        variables = {**template_variables, **(chat_template_kwargs or {})}
        inputs.check_template_variables(
            name for name in variables if name not in _LISTS or variables[name]
        )
        variables["add_generation_prompt"] = add_generation_prompt
        variables["continue_final_message"] = continue_final_message
        prompts = [inputs.chat_prompt(talk, **variables) for talk in _conversations(messages)]
        return self.generate(prompts, sampling_params, use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of calls that give none, with what the model's ``generation_config.json``
        recommends; fields of them may be assigned."""
        return self.engine.inputs.default_params()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer: that of ``transformers`` if it is installed, else ours, which has
        ``encode``, ``decode``, ``apply_chat_template`` and may be called.

        Raises:
            UserError: the model's folder has none.
        """
        return self._tokenizer()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; requests that run go on.  Returns True."""
        return self._reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Free the device's memory but for what a start keeps of it, until ``wake_up``; requests
        are refused meanwhile.  The KV cache and all cached prefixes are dropped.

        Args:
            level: 1 keeps the weights in the host's memory; 2 drops them, and ``wake_up`` reads
                them from their files.

        Raises:
            UserError: requests run, the engine sleeps already, the level is another, or the model
                has several ranks.
        """
        self._sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """End the sleep.

        Args:
            tags: wake only "weights" or "kv_cache"; requests are taken when both are awake.

        Raises:
            UserError: a tag is neither, or the device has no room.
        """
        self._wake_up(tags)

    def beam_search(
        self, prompts: Prompt | Iterable[Prompt], params: BeamSearchParams, **ported: Any
    ) -> list[BeamSearchOutput]:
        """The likeliest outputs of every prompt that a beam finds, see ``beam_search.search``.

        Raises:
            UserError: a prompt or a parameter is bad, or ``max_logprobs`` is less than twice the
                width.
        """
        self.engine.check_open("LLM.beam_search")
        check_call("LLM.beam_search", ported)
        inputs, ends = self.engine.inputs, self.engine.eos_token_ids
        return search(inputs, ends, self.generate, _prompt_list(prompts), params)


def start_engine(model: str, options: dict[str, Any], disable_log_stats: bool) -> EngineLoop:
    """An engine from an ``LLM``'s arguments.

    Raises:
        UserError: an option is unknown or bad, or the model cannot be loaded.
    """
    write_log_by_default()
    checked = engine_options(model, options)
    check_start(checked)
    with collecting_rarely(), started_ranks(checked) as others:
        # Only now: this imports torch, which takes seconds.
        from .engine import Engine

        engine = Engine(checked, others=others)
    if disable_log_stats:
        engine.stats = None
    if said := describe_default_sampling(engine.inputs.default_sampling):
        _log.warning("%s", said)
    if _log.isEnabledFor(logging.INFO):
        log_start(engine.report())
    return engine


def _prompt_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Several prompts, whether one or more were given: a list of ints is one prompt."""
    prompts = plain(prompts)
    if isinstance(prompts, str | bytes | bytearray | memoryview | Mapping):
        return [prompts]  # bytes are refused with the others
    if not isinstance(prompts, Iterable):
        raise UserError(f"prompts={prompts!r}: expected text, token ids, or several of them")
    batch: list[Any] = list(prompts)
    return [batch] if batch and all(map(_is_integer, batch)) else batch


def _is_integer(item: object) -> bool:
    return isinstance(item, int) or isinstance(item, Integral)  # noqa: SIM101  # faster


def _params_list(
    params: SamplingParams | Iterable[SamplingParams] | None, count: int
) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams | Mapping | str):
        return [params] * count  # type: ignore[list-item]  # others are refused with the request
    each = _list_of("sampling_params", params)
    if len(each) != count:
        raise UserError(f"{len(each)} sampling_params for {count} prompts: expected one for each")
    return each


def _priority_list(priority: Sequence[int] | None, count: int) -> list[int]:
    if priority is None:
        return [0] * count
    each = _list_of("priority", priority)
    if len(each) != count:
        raise UserError(f"{len(each)} priorities for {count} prompts: expected one for each")
    return each


def _list_of(name: str, value: Any) -> list[Any]:
    if not isinstance(value, Iterable):
        raise UserError(f"{name}={value!r}: expected one for each prompt")
    return list(value)


def _conversations(messages: Any) -> list[Any]:
    """Several conversations, whether one or more were given."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise UserError(
            f"messages is of type {type(messages).__name__}: expected a list of "
            "{'role': …, 'content': …}, or a list of such lists"
        )
    batch = list(messages)
    return [batch] if not batch or isinstance(batch[0], Mapping) else batch
