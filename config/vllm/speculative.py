"""The fields of vLLM's ``speculative_config``."""

from __future__ import annotations

from .argument import ignored, refused, same, table

_POLICY = "how many tokens are drafted is chosen each step from measured times and acceptance"
_OWN = "outputs are what the model samples without drafts; leave it out"
_SUFFIX = "a step's rows are scheduled before the device looks for drafts"
_METHOD = "it belongs to a method that is not there; leave it out"

SPECULATIVE = table(
    same("method", "ngram, suffix, draft_model, eagle3, mtp"),
    same("model", "folder or ORG/NAME of a draft model of the same vocabulary, or of a head"),
    same("num_speculative_tokens", "the most; a step may have fewer, or none"),
    same("prompt_lookup_max prompt_lookup_min"),
    same("suffix_decoding_max_tree_depth", "the most last tokens that are compared"),
    same(
        "suffix_decoding_max_cached_requests",
        "0 looks in the sequence alone; how much is kept says suffix_cached_tokens",
    ),
    ignored(_SUFFIX, "suffix_decoding_max_spec_factor suffix_decoding_min_token_prob"),
    same("max_model_len", "longer sequences go on without drafts; unset: a draft model's own"),
    same("quantization", "of the draft model, as the engine's"),
    same("revision", "of a draft model or a head on the Hub"),
    same("rejection_sample_method", "standard, synthetic"),
    same("synthetic_acceptance_rates", "for measurements: outputs are not those of the model"),
    ignored("a draft model runs whole on rank 0", "draft_tensor_parallel_size"),
    ignored("a draft model runs whole on rank 0", "tensor_parallel_size"),
    ignored(_POLICY, "disable_by_batch_size num_speculative_tokens_per_batch_size"),
    ignored("a draft model is compiled as the model is", "enforce_eager moe_backend"),
    ignored("a draft is a row of a decode", "disable_padded_drafter_batch"),
    ignored("a draft model has whole logits", "use_local_argmax_reduction"),
    ignored("a draft model draws by the noise of the request", "draft_sample_method"),
    ignored("code that comes with a checkpoint is never run", "code_revision"),
    ignored("counts are in LLM.report(), /metrics and the log", "disable_log_stats"),
    ignored("log probabilities are those without drafts", "disable_logprobs"),
    refused(_OWN, "draft_confidence_threshold acceptance_method typical_acceptance_sampler_type"),
    refused(_OWN, "posterior_threshold posterior_alpha spec_decoding_acceptance_method"),
    refused("give synthetic_acceptance_rates, one a position", "synthetic_acceptance_length"),
    refused(
        "a draft model reads the target's tokens: give one of the same vocabulary",
        "use_heterogeneous_vocab",
    ),
    refused("drafts are one sequence; leave it out", "speculative_token_tree"),
    refused("drafts are made one behind the other; leave it out", "parallel_drafting"),
    refused("it is the engine's: load_format", "draft_load_config"),
    refused("it is the engine's; leave it out", "attention_backend kv_cache_dtype"),
    refused("the engine makes it itself; leave it out", "target_model_config"),
    refused("the engine makes it itself; leave it out", "target_parallel_config"),
    refused("the engine makes it itself; leave it out", "draft_model_config"),
    refused("the engine makes it itself; leave it out", "draft_parallel_config"),
    refused(
        _METHOD,
        "disable_eagle_block_drop index_share_for_mtp_iteration enable_adaptive_verification "
        "dspark_draft_topk",
    ),
)
"""Fields of ``speculative_config``; ``config/speculative.py`` reads them."""

_HEADS = "heads of this form are not loaded"
_INSTEAD = "; use eagle3, a draft_model, or ngram"
NO_METHODS = {
    **dict.fromkeys(("eagle", "medusa", "mlp_speculator"), _HEADS + _INSTEAD),
    **dict.fromkeys(("dflash", "dspark", "extract_hidden_states"), _HEADS + _INSTEAD),
    "ngram_gpu": "ngram looks them up on the GPU itself; use ngram",
    "custom_class": "a drafter is a class with the methods of Drafter (docs/scheduling.md#drafts)"
    + _INSTEAD,
}
"""Methods of vLLM that are not there -> why, and what to use; all others that end in mtp are as
mtp."""
