"""The bodies of requests: OpenAI's and Anthropic's fields, and vLLM's beside them.

Other fields are kept unread; ``fields.py`` decides about them by the tables of ``config/vllm/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ....config.vllm import Argument
from ....config.vllm.requests import COMPLETIONS, GENERATION, MESSAGES, RESPONSES, TOKENIZE
from ....engine.messages.sampling_params import MAX_BAD_WORDS, MAX_BIASES

MOST_STOPS = 64
MOST_STOP_CHARACTERS = 1024
MOST_PROMPTS = 4096
MOST_TOOLS = 512

# Lists end at their first bad item: an error for each of millions would take gigabytes.
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
_Object = dict[str, Any]
_Messages = Annotated[list[_Object], Field(fail_fast=True, max_length=MOST_PROMPTS)]
_Documents = Annotated[list[_Object], Field(fail_fast=True, max_length=MOST_PROMPTS)]
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


class Fields(_Body):
    """A body that keeps fields which are not declared, for ``table`` to say what they do."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())
    table: ClassVar[Mapping[str, Argument]]


class StructuredOutputs(_Body):
    """vLLM's field for output that keeps to a form; one of these."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True, max_length=MOST_PROMPTS)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Generation(Fields):
    """Fields of completions and chats.

    Attributes:
        id_prefix: how the ids of the answers begin.
        prompt_field: the field from which prompts are made.
        is_cut: an output ends where the context does, if it may have more tokens than fit.
    """

    id_prefix: ClassVar[str]
    is_cut: ClassVar[bool] = False
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
    allowed_token_ids: Ids | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True, max_length=MOST_PROMPTS)] | None = (
        None
    )
    guided_grammar: str | None = None
    response_format: dict[str, Any] | None = None

    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None
    include_reasoning: bool | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None


class CompletionRequest(Generation):
    """``POST /v1/completions``."""

    id_prefix, prompt_field, table = "cmpl-", "prompt", {**GENERATION, **COMPLETIONS}
    prompt: (
        str
        | Ids
        | Annotated[list[str], Field(fail_fast=True, max_length=MOST_PROMPTS)]
        | Annotated[list[Ids], Field(fail_fast=True, max_length=MOST_PROMPTS)]
    )
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class Templated(Fields):
    """Fields of what goes through the model's chat template."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: _Documents | None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    tools: _Tools | None = None
    add_special_tokens: bool | None = None


class ChatRequest(Generation, Templated):
    """``POST /v1/chat/completions``."""

    id_prefix, prompt_field, table = "chatcmpl-", "messages", {**GENERATION, **COMPLETIONS}
    messages: _Messages
    echo: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class ResponsesRequest(Generation, Templated):
    """``POST /v1/responses``."""

    id_prefix, prompt_field, table = "resp_", "input", {**GENERATION, **RESPONSES}
    n: Literal[1] | None = None
    input: str | _Messages
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class CountTokensRequest(Templated):
    """``POST /v1/messages/count_tokens``: the conversation of Anthropic's form."""

    table = {**GENERATION, **MESSAGES}
    model: str | None = None
    messages: _Messages
    system: str | _Messages | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    add_special_tokens: bool | None = None


class MessagesRequest(Generation, CountTokensRequest):
    """``POST /v1/messages``."""

    id_prefix, prompt_field, is_cut = "msg_", "messages", True
    n: Literal[1] | None = None
    max_tokens: int
    stop_sequences: Annotated[list[_Stop], Field(fail_fast=True, max_length=MOST_STOPS)] | None = (
        None
    )
    parallel_tool_calls: bool | None = None
    output_format: dict[str, Any] | None = None


class TokenizeRequest(Templated):
    """``POST /tokenize``: of a prompt or of a conversation."""

    table = TOKENIZE
    model: str | None = None
    prompt: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Fields):
    """``POST /detokenize``."""

    table = TOKENIZE

    model: str | None = None
    tokens: Ids


class AbortRequest(_Body):
    """``POST /abort_requests``: the ids that answers carry."""

    request_ids: (
        Annotated[list[str], Field(fail_fast=True, max_length=MOST_PROMPTS)] | Literal["all"]
    )
