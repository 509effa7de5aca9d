"""What the body of a completion, a chat, a response or a message asks of the engine: its prompt,
its sampling, and how its outputs are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ....config import UserError
from ....engine.frontend.chat_template import TAKEN, ChatTemplates
from ....engine.frontend.grammar import form_grammar, json_grammar
from ....engine.frontend.inputs import Prompt
from ....engine.messages.sampling_params import SamplingParams
from ..intake.errors import ApiError, api_error
from ..intake.protocol import (
    ChatRequest,
    Generation,
    MessagesRequest,
    ResponsesRequest,
    StructuredOutputs,
    Templated,
)
from ..jobs.state import ServerState
from .reading import Reading, continued_text
from .tools import Tools, tools_of

_T = TypeVar("_T")
_LITTLE = 1000
"""Characters and values that are worked on at once: a thread would take longer to wake up."""
_VALUE = 20
"""Characters that a list, an object or a number counts for."""
_GUIDED = ("json", "regex", "choice", "grammar")
"""Older vLLM has these of ``structured_outputs`` as fields, behind ``guided_``."""
_ANY_OBJECT = {"type": "object"}
_SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "max_tokens", "min_tokens", "stop"),
    *("stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
    *("bad_words", "allowed_token_ids", "truncate_prompt_tokens"),
)
"""Fields of a body that are fields of ``SamplingParams``."""


OF_CHATS = ("prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids")
"""Fields of all bodies that ask for parts which answers of completions and chats alone have."""


class Conversation(NamedTuple):
    """A chat as the engine takes it."""

    prompt: Prompt
    params: SamplingParams
    reading: Reading


def refuse(body: Generation, names: Iterable[str], why: str) -> None:
    """Raise ``ApiError`` if one of these fields is given."""
    for name in names:
        if getattr(body, name) is not None:
            raise ApiError(400, f"{name}: {why}", param=name)


async def conversation(
    state: ServerState,
    body: ChatRequest | ResponsesRequest | MessagesRequest,
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
        return params, tools

    forms = (body.response_format, body.structured_outputs, body.guided_json, body.tools)
    params, tools = await work_on(state, plan, forms)
    with state.preparing(params.n):
        prompt = await render(state, body, messages, tools.tools)
    reading = _reading(state, body, messages, prompt, tools)
    if body.thinking_token_budget not in (None, -1) and reading.parser is None:
        message = "the chat template shows no thinking; start the server with --reasoning-parser"
        raise ApiError(400, message, param="thinking_token_budget")
    return Conversation(prompt, reading.applied(params, body.thinking_token_budget), reading)


def _reading(
    state: ServerState,
    body: ChatRequest | ResponsesRequest | MessagesRequest,
    messages: Sequence[Mapping[str, Any]],
    prompt: Any,
    tools: Tools,
) -> Reading:
    """How the outputs behind a prompt are read."""
    tokenizer, parser = state.client.inputs.tokenizer, state.thinking
    if parser is None or tokenizer is None:
        return Reading(tools, tokenizer=tokenizer)
    continued = continued_text(messages[-1]) if body.continue_final_message is True else None
    opening = parser.opening(prompt["prompt"], continued)
    return Reading(tools, parser, opening, body.include_reasoning is not False, tokenizer)


async def render(
    state: ServerState,
    body: Templated,
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
    inputs, template = state.client.inputs, _template(state, body)
    variables = _variables(state, body, template)
    if template is not None:
        variables["template"] = template
    if tools:
        variables["tools"] = tools
    continues = body.continue_final_message is True
    begins = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    make = partial(
        inputs.chat_prompt,
        messages,
        add_generation_prompt=begins,
        continue_final_message=continues,
        add_special_tokens=body.add_special_tokens is True,
        **variables,
    )
    try:
        return await work_on(state, make, (messages, variables, body.chat_template))
    except UserError as error:
        raise api_error(error, "messages") from error


def _template(state: ServerState, body: Templated) -> ChatTemplates | None:
    """The chat template that a body brings, if it brings one.

    Raises:
        ApiError: the server trusts no such template, or it does not compile.
    """
    if body.chat_template is None:
        return None
    if not state.settings.trust_request_chat_template:
        raise ApiError(
            400,
            "chat_template: the template of a request is a program of its sender, and this server "
            "trusts none; start it with --trust-request-chat-template, or with --chat-template",
            param="chat_template",
        )
    try:
        return state.client.inputs.require_tokenizer().template_of(body.chat_template)
    except UserError as error:
        raise api_error(error, "chat_template") from error


def _variables(
    state: ServerState, body: Templated, template: ChatTemplates | None
) -> dict[str, Any]:
    """The variables of the chat template that a body sets; the log tells of those that the template
    does not read.

    Args:
        template: the one that the body brings, if it brings one.

    Raises:
        ApiError: the name of one is taken, or the template does not read it and the server is
            strict.
    """
    inputs, kwargs = state.client.inputs, dict(body.chat_template_kwargs or {})
    try:
        templates = template or inputs.require_tokenizer().chat_templates
        read = templates.variables
        templates.check_variables(
            name for name in kwargs if name in TAKEN or (state.fields.strict and name not in read)
        )
    except UserError as error:
        raise api_error(error, "chat_template_kwargs") from error
    asked = {f"chat_template_kwargs.{name}": {name: value} for name, value in kwargs.items()}
    asked["documents"] = {} if body.documents is None else {"documents": body.documents}
    if (effort := body.reasoning_effort) is not None:
        thinks = {"enable_thinking": effort != "none"}
        asked["reasoning_effort"] = {"reasoning_effort": effort, **thinks}
    variables: dict[str, Any] = {}
    for field, values in asked.items():
        known = {name: value for name, value in values.items() if name in read}
        if values and not known:
            state.fields.note(field, "the chat template of this model does not read it")
        variables = {**known, **variables}
    return variables


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
    ``structured_outputs`` or ``guided_json`` and the like.

    Raises:
        ApiError: it asks for two, or for a form that is unknown.
    """
    try:
        grammar = _of_format(body.response_format or {})
    except UserError as error:
        raise ApiError(400, str(error), param="response_format") from error
    forms = {} if body.structured_outputs is None else _outputs(body.structured_outputs)
    guided = {name: getattr(body, f"guided_{name}") for name in _GUIDED}
    guided = {name: value for name, value in guided.items() if value is not None}
    if not guided and body.structured_outputs is None:
        return grammar
    field = f"guided_{next(iter(guided))}" if guided else "structured_outputs"
    if grammar is not None or (guided and body.structured_outputs is not None):
        message = f"{field}, response_format and structured_outputs: expected one of them"
        raise ApiError(400, message, param=field)
    try:
        return form_grammar(**forms, **guided)
    except UserError as error:
        raise ApiError(400, str(error), param=field) from error


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


def _outputs(form: StructuredOutputs) -> dict[str, Any]:
    """``structured_outputs`` under the names of ``form_grammar``."""
    return {"json": form.json_schema, **{n: value for n, value in form if n != "json_schema"}}


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
