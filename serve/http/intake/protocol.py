"""The bodies of requests: OpenAI's fields, and vLLM's beside them.

A field that is not listed is refused: a misspelled one would be ignored.  Those of OpenAI that
change nothing here (who asks, how the answer is stored or billed) are taken and not read.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ....engine.messages.sampling_params import MAX_BAD_WORDS, MAX_BIASES

MOST_STOPS = 64
MOST_STOP_CHARACTERS = 1024
MOST_PROMPTS = 4096
MOST_TOOLS = 512

# Lists end at their first bad item: an error for each of millions would take gigabytes.
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
_Object = dict[str, Any]
_Messages = Annotated[list[_Object], Field(fail_fast=True, max_length=MOST_PROMPTS)]
_Tools = Annotated[list[_Object], Field(fail_fast=True, max_length=MOST_TOOLS)]
_Stop = Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]


def _few_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"expected {MAX_BIASES} token ids at most")
    return value


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class StreamOptions(_Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class _Unread(_Body):
    """Fields that change nothing here."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class StructuredOutputs(_Body):
    """vLLM's field for output that keeps to a form; one of these."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True, max_length=MOST_PROMPTS)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Generation(_Unread):
    """Fields of completions and chats.

    Attributes:
        id_prefix: how the ids of the answers begin.
        prompt_field: the field from which prompts are made.
    """

    id_prefix: ClassVar[str]
    prompt_field: ClassVar[str]

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: Annotated[str, Field(max_length=256, pattern="^[!-~]+$")] | None = None
    """Visible ASCII, since a header of the answer has it."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: _Stop | Annotated[list[_Stop], Field(fail_fast=True, max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[Ids, Field(max_length=MOST_STOPS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    logit_bias: Annotated[dict[str, float], BeforeValidator(_few_biases)] | None = None
    bad_words: Annotated[list[_Stop], Field(fail_fast=True, max_length=MAX_BAD_WORDS)] | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: dict[str, Any] | None = None

    priority: int | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None


class CompletionRequest(Generation):
    """``POST /v1/completions``."""

    id_prefix, prompt_field = "cmpl-", "prompt"
    prompt: (
        str
        | Ids
        | Annotated[list[str], Field(fail_fast=True, max_length=MOST_PROMPTS)]
        | Annotated[list[Ids], Field(fail_fast=True, max_length=MOST_PROMPTS)]
    )
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


class ChatRequest(Generation):
    """``POST /v1/chat/completions``."""

    id_prefix, prompt_field = "chatcmpl-", "messages"
    messages: _Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    response_format: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: _Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class ResponsesRequest(Generation):
    """``POST /v1/responses``."""

    id_prefix, prompt_field = "resp_", "input"
    n: Literal[1] | None = None
    input: str | _Messages
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    previous_response_id: str | None = None
    tools: _Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None


class TokenizeRequest(_Body):
    """``POST /tokenize``: of a prompt or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: _Tools | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Ids


class AbortRequest(_Body):
    """``POST /abort_requests``: the ids that answers carry."""

    request_ids: (
        Annotated[list[str], Field(fail_fast=True, max_length=MOST_PROMPTS)] | Literal["all"]
    )
