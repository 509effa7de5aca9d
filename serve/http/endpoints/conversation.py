"""Turns a chat or a response into what the engine takes: the prompt of its conversation and its
sampling; and finds the tools that it may call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ....config import UserError
from ....engine.frontend.inputs import Prompt
from ....engine.messages.sampling_params import SamplingParams
from ..intake.errors import api_error
from ..intake.protocol import ChatRequest, ResponsesRequest, TokenizeRequest
from ..jobs.state import ServerState
from .sampling import sampling_params
from .tools import Tools, tools_of, with_marks

_T = TypeVar("_T")
_LITTLE = 1000
"""Characters and values that are worked on at once: a thread would take longer to wake up."""
_VALUE = 20
"""Characters that a list, an object or a number counts for."""


class Conversation(NamedTuple):
    """A chat as the engine takes it."""

    prompt: Prompt
    params: SamplingParams
    tools: Tools


async def conversation(
    state: ServerState,
    body: ChatRequest | ResponsesRequest,
    messages: Sequence[Mapping[str, Any]],
    **asked: Any,
) -> Conversation:
    """Read the tools and the sampling of a body in the form of chats, and make its prompt.

    Args:
        asked: fields of ``SamplingParams`` that have another name in the body.

    Raises:
        ApiError: a field is bad, or too many requests wait.
        UserError: a parameter is out of range.
    """
    inputs = state.client.inputs

    def plan() -> tuple[SamplingParams, Tools]:
        tools = tools_of(body, state.tool_format)
        defaults = inputs.default_sampling
        params = sampling_params(body, defaults, grammar=tools.grammar, **asked)
        return with_marks(params, tools, inputs.tokenizer), tools

    forms = (body.response_format, body.structured_outputs, body.tools)
    params, tools = await work_on(state, plan, forms)
    with state.preparing(params.n):
        prompt = await render(state, body, messages, tools.given)
    return Conversation(prompt, params, tools)


async def render(
    state: ServerState,
    body: ChatRequest | ResponsesRequest | TokenizeRequest,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
) -> Prompt:
    """The prompt of a conversation: the only way from messages to tokens here.

    Args:
        body: says how the template is to be used.
        tools: those that the model may call; none or an empty list: it knows of none.

    Raises:
        ApiError: a variable or a message is bad.
    """
    inputs, given = state.client.inputs, dict(body.chat_template_kwargs or {})
    try:
        inputs.check_template_variables(given)
    except UserError as error:
        raise api_error(error, "chat_template_kwargs") from error
    if tools:
        given["tools"] = tools
    make = partial(
        inputs.chat_prompt,
        messages,
        add_generation_prompt=getattr(body, "add_generation_prompt", None) is not False,
        add_special_tokens=body.add_special_tokens is True,
        **given,
    )
    try:
        return await work_on(state, make, (messages, given))
    except UserError as error:
        raise api_error(error, "messages") from error


async def work_on(state: ServerState, work: Callable[[], _T], values: Any) -> _T:
    """Do work on values of JSON: at once if they are small, else in a thread, so that the streams
    of others go on."""
    return work() if is_little(values) else await state.client.in_thread(work)


def is_little(values: Any) -> bool:
    """Whether values of JSON are small; looks at few of them to know."""
    left, rest = _LITTLE, [values]
    while rest and left > 0:
        value = rest.pop()
        left -= len(value) if isinstance(value, str) else _VALUE
        inner: Iterable[Any] = ()
        if isinstance(value, Mapping):
            inner = (*value.keys(), *value.values()) if len(value) < _LITTLE else ("x" * _LITTLE,)
        elif isinstance(value, list | tuple):
            inner = value if len(value) < _LITTLE else ("x" * _LITTLE,)
        elif hasattr(value, "model_dump"):
            inner = value.__dict__.values()
        rest.extend(inner)
    return left > 0
