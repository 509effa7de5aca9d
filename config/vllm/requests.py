"""The fields of requests over HTTP, and the paths that other servers have.

The fields are those of vLLM 0.26, of OpenAI's and Anthropic's APIs, and what gateways and clients
of them send.  ``serve/http/intake/fields.py`` reads these tables.
"""

from __future__ import annotations

from .argument import ignored, refused, same, table
from .engine import LORA, POOLING, PROCESSORS

_STORED = "answers are not stored; send the conversation"
_TEMPLATE = "needs --trust-request-chat-template"
_TEXT = "models give text alone"
_AUDIO = "models read and write text alone; use another server for speech"
_IMAGES = "models read and write text alone; use another server for pictures"
_DEVELOPERS = "not over HTTP; restart the server with other options"


GENERATION = table(
    same("model stream stream_options request_id temperature top_p top_k min_p seed"),
    same("repetition_penalty presence_penalty frequency_penalty max_tokens min_tokens"),
    same("stop stop_token_ids ignore_eos include_stop_str_in_output"),
    same("skip_special_tokens add_special_tokens logit_bias bad_words n"),
    same("allowed_token_ids truncate_prompt_tokens structured_outputs response_format"),
    same("return_token_ids return_tokens_as_token_ids prompt_logprobs cache_salt"),
    same("priority", "other than 0 needs --scheduling-policy priority"),
    same("guided_json guided_regex guided_choice guided_grammar", "as structured_outputs has them"),
    ignored("nobody counts requests by who asks", "user safety_identifier session_id"),
    ignored(_STORED, "store"),
    ignored("there is one tier; see priority", "service_tier", ("auto", "default")),
    ignored(
        "prefixes are found by their tokens, and kept as long as there is room",
        "prompt_cache_key prompt_cache_retention prompt_cache_options",
    ),
    ignored("max_tokens bounds the length", "verbosity", ("medium",)),
    ignored("a predicted output would only save time", "prediction"),
    ignored("each server reads its prompts itself", "kv_transfer_params ec_transfer_params"),
    ignored("models read text alone", "mm_processor_kwargs media_io_kwargs"),
    ignored("no extension reads them", "vllm_xargs"),
    ignored(
        "the grammars are llguidance's",
        "guided_decoding_backend guided_whitespace_pattern",
    ),
    ignored("texts are as the tokenizer decodes them", "spaces_between_special_tokens"),
    ignored("each token is shown when it comes", "stream_interval", (1,)),
    ignored("the server has one template for each model", "chat_template_content_format"),
    same("thinking_token_budget", "in chats, responses and messages"),
    same("include_reasoning", "false leaves it out of answers"),
    ignored("--reasoning-parser none leaves reasoning in the text", "separate_reasoning", (True,)),
    ignored(
        "only answers of vLLM's render endpoints have it", "return_token_offsets return_mm_kwargs"
    ),
    ignored("the experts of a token are not returned", "routed_experts_prompt_start"),
    ignored("give chat_template_kwargs={'enable_thinking': …}", "enable_thinking think thinking"),
    refused("the prompt's last tokens are kept", "truncation_side", ("left",)),
    refused("give structured_outputs or response_format", "structural_tag"),
    refused("call LLM.beam_search", "use_beam_search length_penalty early_stopping", (1.0,)),
    refused("use repetition_penalty", "repetition_detection"),
    refused(PROCESSORS, "logits_processors"),
    refused("give top_logprobs, or logprobs of a completion", "logprob_token_ids"),
    refused("outputs carry no watermark; leave it out", "watermarking"),
    refused("give prompts as text or token ids", "prompt_embeds"),
    refused(LORA, "lora_path lora_request adapter_id"),
)
"""Fields of whatever generates."""

COMPLETIONS = table(
    same("prompt echo logprobs messages max_completion_tokens top_logprobs tools tool_choice"),
    same("parallel_tool_calls add_generation_prompt continue_final_message chat_template_kwargs"),
    same("documents", "for a chat template that reads them"),
    same("reasoning_effort", "for a chat template that reads it, or enable_thinking"),
    same("best_of", "equal to n"),
    ignored("nothing is stored under it", "metadata"),
    ignored("use return_token_ids, and POST /detokenize", "return_prompt_text"),
    refused(_TEXT + "; leave it out", "modalities", (["text"],)),
    refused(_TEXT + "; leave it out", "audio"),
    refused("put both parts into the prompt, with the model's own marks of a gap", "suffix"),
    same("chat_template", _TEMPLATE),
    refused("use tools", "functions"),
    refused("use tool_choice", "function_call", ("auto", "none")),
    refused("the client searches; give it as a function in tools", "web_search_options"),
)
"""Further fields of ``/v1/completions`` and ``/v1/chat/completions``."""

RESPONSES = table(
    same("input instructions max_output_tokens text tools tool_choice parallel_tool_calls"),
    same("metadata add_generation_prompt continue_final_message chat_template_kwargs documents"),
    same("chat_template", _TEMPLATE),
    same("reasoning", "its effort, as reasoning_effort of chats"),
    same("reasoning_effort", "for a chat template that reads it, or enable_thinking"),
    ignored("answers hold text and calls of functions", "include"),
    ignored("the client runs its tools, and counts their calls", "max_tool_calls"),
    ignored("messages are told as items", "enable_response_messages"),
    refused(_STORED + " as input", "previous_response_id conversation previous_response"),
    refused(_STORED + " as input", "previous_input_messages"),
    refused("prompts are not stored; send instructions and input", "prompt"),
    refused("an answer comes on the connection that asked; use stream", "background"),
    refused("ask /v1/chat/completions for log probabilities", "top_logprobs"),
    refused("give truncate_prompt_tokens, or a shorter input", "truncation", ("disabled",)),
    refused("a long conversation is the client's to shorten", "context_management"),
)
"""Further fields of ``/v1/responses``."""

MESSAGES = table(
    same("messages system stop_sequences tools tool_choice parallel_tool_calls output_format"),
    same("add_generation_prompt continue_final_message chat_template_kwargs documents"),
    same("chat_template", _TEMPLATE),
    same("thinking", "enabled or not, for a chat template that reads enable_thinking"),
    same("reasoning_effort", "for a chat template that reads it, or enable_thinking"),
    same("output_config", "its format, and its effort as reasoning_effort of chats"),
    ignored("nobody counts requests by who asks", "metadata user_profile_id workspace_id"),
    ignored("prefixes are cached anyway", "cache_control"),
    ignored("the server is where it is, and as fast as it can", "inference_geo speed"),
    ignored("a long conversation is the client's to shorten", "context_management"),
    ignored("betas of Anthropic's are not read", "betas anthropic_beta anthropic_version"),
    ignored("nothing is diagnosed", "diagnostics fallbacks"),
    refused("no code runs here; give functions as tools", "container"),
    refused("the client asks MCP servers; give their functions as tools", "mcp_servers"),
)
"""Further fields of ``/v1/messages``, Anthropic's form."""

TOKENIZE = table(
    same("model prompt messages tokens add_special_tokens add_generation_prompt tools"),
    same("continue_final_message chat_template_kwargs return_token_strs documents"),
    same("reasoning_effort", "for a chat template that reads it, or enable_thinking"),
    ignored("models read text alone", "mm_processor_kwargs media_io_kwargs"),
    same("chat_template", _TEMPLATE),
)
"""Fields of ``/tokenize`` and ``/detokenize``."""

PATHS = table(
    same("/v1/completions /v1/chat/completions /v1/responses /v1/messages"),
    same("/v1/messages/count_tokens /v1/models /tokenize /detokenize /version /server_info"),
    same("/health /ping /load /metrics /docs /openapi.json"),
    same("/sleep /wake_up /is_sleeping"),
    same("/reset_prefix_cache", "needs an API key where the server has any"),
    refused(POOLING, "/v1/embeddings /embeddings /embed /v2/embed /pooling /classify /score"),
    refused(POOLING, "/v1/score /rerank /v1/rerank /v2/rerank /v1/moderations"),
    refused(_AUDIO, "/v1/audio /v1/realtime"),
    refused(_IMAGES, "/v1/images /v1/videos"),
    refused(
        "answers are not stored; each comes once, where it is asked for",
        "/v1/responses/{id} /v1/chat/completions/{id}",
    ),
    refused(_STORED + " to /v1/responses", "/v1/conversations /v1/threads /v1/assistants"),
    refused("run `fusewright run-batch` on the file", "/v1/batches /v1/files /v1/messages/batches"),
    refused("run `fusewright run-batch` on the file", "/v1/chat/completions/batch"),
    refused("models are served as they are; tune them elsewhere", "/v1/fine_tuning"),
    refused(
        "use /tokenize, which gives the ids of a prompt or a conversation",
        "/v1/completions/render /v1/chat/completions/render",
    ),
    refused("give prompts of token ids to /v1/completions", "/inference/v1/generate /generate"),
    refused("ask /v1/chat/completions or /v1/completions", "/invocations /api"),
    refused("use /tokenize and /detokenize", "/tokenizer_info"),
    refused(LORA, "/v1/load_lora_adapter /v1/unload_lora_adapter"),
    refused(_DEVELOPERS, "/pause /resume /scale_elastic_ep"),
    refused("not over HTTP; /server_info has the facts of the engines", "/collective_rpc"),
    refused("use `fusewright profile`", "/start_profile /stop_profile"),
    refused(
        "prompts and outputs are tokens and text; there is no cache of pictures", "/reset_mm_cache"
    ),
)
"""Paths of vLLM's server and of OpenAI's API.  One that is refused stands for those below it too,
and one that ends with ``/{id}`` for those below it alone."""
