"""The fields of vLLM's ``SamplingParams``, and the methods of its ``LLM`` with their arguments."""

from __future__ import annotations

from .argument import ignored, other, refused, same, table
from .engine import LORA, POOLING, PROCESSORS

SAMPLING = table(
    same("n temperature top_p top_k min_p seed repetition_penalty presence_penalty"),
    same("frequency_penalty max_tokens min_tokens stop stop_token_ids ignore_eos"),
    same("include_stop_str_in_output skip_special_tokens detokenize logit_bias bad_words"),
    same("allowed_token_ids truncate_prompt_tokens output_kind structured_outputs"),
    same("thinking_token_budget", "needs thinking_tokens, the ids around the thinking"),
    same("logprobs prompt_logprobs", "-1 is all; more than 20 need max_logprobs"),
    other(guided_decoding="structured_outputs"),
    ignored("texts are as the tokenizer decodes them", "spaces_between_special_tokens"),
    ignored("each token is shown when it comes", "stream_interval"),
    ignored("a request keeps a copy of its parameters", "skip_clone"),
    ignored("the engine finds it", "output_text_buffer_length"),
    refused("give n alone; all n outputs come back", "best_of", (1,)),
    refused("call LLM.beam_search", "use_beam_search length_penalty early_stopping", (1.0,)),
    refused(PROCESSORS, "logits_processors"),
    refused("read logprobs, a dict a token", "flat_logprobs"),
    refused("give logprobs=-1 with max_logprobs=-1, and read these tokens", "logprob_token_ids"),
    refused(
        "give prompt_logprobs=-1 with max_logprobs=-1, and read these positions and tokens",
        "prompt_logprob_token_ids prompt_logprob_start",
    ),
    refused("nothing reads them; leave them out", "extra_args"),
    refused("give the prompt a cache_salt of its own", "skip_reading_prefix_cache"),
    refused("use repetition_penalty", "repetition_detection"),
    refused("the experts of a token are not returned", "routed_experts_prompt_start"),
    refused("give the tokens as a part of the prompt", "trace_decode_token_ids"),
)

CALLS = table(
    same("prompts sampling_params use_tqdm priority messages add_generation_prompt tools"),
    same("chat_template_kwargs params continue_final_message"),
    ignored("chat templates get the form that they read", "chat_template_content_format"),
    refused(LORA, "lora_request prompt_adapter_request"),
    refused("models take text alone; leave it out", "mm_processor_kwargs"),
    refused("give LLM(chat_template=…)", "chat_template"),
    refused("give a prompt of token ids, made by LLM.get_tokenizer()", "tokenization_kwargs"),
)
"""Arguments of ``LLM.generate``, ``LLM.chat`` and ``LLM.beam_search``."""

METHODS = table(
    same("generate chat beam_search get_tokenizer get_default_sampling_params"),
    same("reset_prefix_cache from_engine_args wake_up"),
    same("sleep", "level 1 or 2"),
    other(get_metrics="report"),
    refused(POOLING, "encode embed classify reward score"),
    refused("LLM.report() has the facts of every rank", "collective_rpc"),
    refused("the model runs as compiled code; LLM.report() describes it", "apply_model"),
    refused("use `fusewright profile`", "start_profile stop_profile"),
    refused("give LLM(tokenizer=…)", "set_tokenizer"),
    refused("call LLM.chat, or LLM.get_tokenizer().render_chat", "preprocess_chat"),
    refused("LLM.engine is the engine; LLM.report() has its facts", "llm_engine"),
)
"""Methods of ``LLM``."""
