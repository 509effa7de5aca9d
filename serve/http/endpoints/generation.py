"""What the body of a completion, a chat or a response asks of the engine: its prompt, its sampling
and the tools that it may call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ....config import UserError
from ....engine.frontend.grammar import form_grammar, json_grammar
from ....engine.frontend.inputs import Prompt
from ....engine.messages.sampling_params import SamplingParams
from ..intake.errors import ApiError, api_error
from ..intake.protocol import (
    ChatRequest,
    Generation,
    ResponsesRequest,
    StructuredOutputs,
    TokenizeRequest,
)
from ..jobs.state import ServerState
from .tools import Tools, tools_of, with_marks

_T = TypeVar("_T")
_LITTLE = 1000
"""Characters and values that are worked on at once: a thread would take longer to wake up."""
_VALUE = 20
"""Characters that a list, an object or a number counts for."""
_ANY_OBJECT = {"type": "object"}
_SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "max_tokens", "min_tokens", "stop"),
    *("stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
    "bad_words",
)
"""Fields of a body that are fields of ``SamplingParams``."""


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
        tools, grammar = tools_of(body, state.tool_format), grammar_of(body)
        if tools.grammar is not None and grammar is not None:
            raise ApiError(400, "tool_choice: not beside a form of the output", param="tool_choice")
        asked["grammar"] = tools.grammar or grammar
        params = sampling_params(body, inputs.default_sampling, **asked)
        return with_marks(params, tools, inputs.tokenizer), tools

    forms = (body.response_format, body.structured_outputs, body.tools)
    params, tools = await work_on(state, plan, forms)
    with state.preparing(params.n):
        prompt = await render(state, body, messages, tools.tools)
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
    inputs, variables = state.client.inputs, dict(body.chat_template_kwargs or {})
    try:
        inputs.check_template_variables(variables)
    except UserError as error:
        raise api_error(error, "chat_template_kwargs") from error
    if tools:
        variables["tools"] = tools
    make = partial(
        inputs.chat_prompt,
        messages,
        add_generation_prompt=getattr(body, "add_generation_prompt", None) is not False,
        add_special_tokens=body.add_special_tokens is True,
        **variables,
    )
    try:
        return await work_on(state, make, (messages, variables))
    except UserError as error:
        raise api_error(error, "messages") from error


def sampling_params(body: Generation, defaults: Mapping[str, Any], **more: Any) -> SamplingParams:
    """The sampling that a body asks for; ``more`` wins.

    Args:
        defaults: values of the fields that the body leaves out, see ``default_sampling``.  One
            of them wins over a ``max_tokens`` of None, which is without a limit.
        more: fields that are read elsewhere, ``grammar`` among them.

    Raises:
        UserError: a value is out of range.
    """
    if "max_tokens" in more and more["max_tokens"] is None and "max_tokens" in defaults:
        del more["max_tokens"]
    more["logit_bias"] = _bias(body.logit_bias)
    asked = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    return SamplingParams(**{**defaults, **asked, **more})


def _bias(logit_bias: dict[str, float] | None) -> dict[int, float] | None:
    """``logit_bias``, whose keys are token ids as JSON has them: text."""
    try:
        return {int(name): bias for name, bias in logit_bias.items()} if logit_bias else None
    except ValueError:
        message = "logit_bias: expected token ids as keys"
        raise ApiError(400, message, param="logit_bias") from None


def grammar_of(body: Generation) -> str | None:
    """The grammar that a body asks for: by OpenAI's ``response_format``, or by vLLM's
    ``structured_outputs``.

    Raises:
        ApiError: it asks for two, or for a form that is unknown.
    """
    try:
        grammar = _of_format(body.response_format or {})
    except UserError as error:
        raise ApiError(400, str(error), param="response_format") from error
    if body.structured_outputs is None:
        return grammar
    if grammar is not None:
        message = "structured_outputs and response_format: expected one of them"
        raise ApiError(400, message, param="structured_outputs")
    try:
        return _of_outputs(body.structured_outputs)
    except UserError as error:
        raise ApiError(400, str(error), param="structured_outputs") from error


def _of_format(response_format: dict[str, Any]) -> str | None:
    kind = response_format.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return json_grammar(_ANY_OBJECT)
    if kind == "json_schema":
        described = response_format.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, dict):
            raise UserError("response_format.json_schema.schema: expected a JSON schema")
        return json_grammar(schema)
    raise UserError(
        f"response_format.type={str(kind)[:50]!r}: expected text, json_object or json_schema"
    )


def _of_outputs(form: StructuredOutputs) -> str:
    forms = {name: value for name, value in form if name != "json_schema"}
    return form_grammar(json=form.json_schema, **forms)


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
