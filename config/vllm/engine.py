"""The arguments of vLLM's ``LLM``, ``EngineArgs`` and ``AsyncEngineArgs``, which are flags of
``vllm serve`` too."""

from __future__ import annotations

from .argument import ignored, other, refused, same, table

LORA = "LoRA adapters are not served; merge the adapter into the weights and give that folder"
_IMAGES = "models take text alone; leave it out"
_STATE = "no served model has a state cache that this would tune; leave it out"
_HOSTS = "ranks on several hosts start with distributed_executor='ray', or under torchrun"
_OVERLAP = "steps are not split into overlapping halves; leave it out"
_EXPERTS = "experts stay where enable_expert_parallel puts them; leave it out"
_OFFLOAD = "weights and KV cache stay on the device; use quantization='fp8', kv_cache_dtype='fp8' "
_OFFLOAD += "or tensor_parallel_size"
_CLASSES = "parts of the engine are not replaced by classes; docs/adding.md shows the seams"
_TRANSFER = "KV cache and weights are not sent between engines; leave it out"
_FIGURES = "it is not measured; LLM.report(), /metrics and `fusewright profile` have what is"
_ONE_REPLICA = "an engine is one replica; `fusewright serve --data-parallel-size` has several"
PROCESSORS = "sampling runs on the device without Python in between; use logit_bias, bad_words, "
PROCESSORS += "allowed_token_ids or structured_outputs"
POOLING = "models generate text, they give no embeddings or scores; use another server for that"
_LOADING = "weights are read from safetensors straight to the device"

ENGINE = table(
    same("model tokenizer revision seed max_model_len gpu_memory_utilization block_size"),
    same("kv_cache_memory_bytes num_gpu_blocks_override max_num_seqs max_num_batched_tokens"),
    same("long_prefill_token_threshold tensor_parallel_size pipeline_parallel_size max_logprobs"),
    same("cudagraph_capture_sizes optimization_level scheduling_policy chat_template"),
    same(
        "enforce_eager enable_expert_parallel enable_prefix_caching enable_chunked_prefill "
        "async_scheduling",
        switch=True,
    ),
    same("dtype", "half and float are understood too"),
    same(
        "quantization",
        "fp8, int4, int8, mxfp4, w8a8_int8 of 16-bit weights; not awq, gptq: a checkpoint says so "
        "itself",
    ),
    same("kv_cache_dtype", "auto, fp8, fp8_e4m3"),
    same("load_format", "auto, safetensors, dummy"),
    same("hf_overrides", "a dict or its JSON, no function"),
    same("speculative_config", "a dict or its JSON; its fields are below"),
    same("generation_config", "none is vLLM's 'vllm', which is understood too"),
    same("model_impl", "auto, adapter (or vllm), transformers"),
    same("attention_backend", "auto, cuda, triton, native: the kernels have other names"),
    same("disable_log_stats", switch=True),
    other(distributed_executor_backend="distributed_executor"),
    other(compilation_config="optimization_level, cudagraph_mode, cudagraph_capture_sizes"),
    other(served_model_name="--served-model-name of serve", otlp_traces_endpoint="otlp_endpoint"),
    ignored(
        "code that comes with a checkpoint is never run, and a model that needs it is refused",
        "trust_remote_code",
        switch=True,
    ),
    ignored("code that comes with a checkpoint is never run", "code_revision"),
    ignored("what is preempted is computed anew", "swap_space preemption_mode"),
    ignored(_LOADING, "safetensors_load_strategy max_parallel_loading_workers"),
    ignored(_LOADING, "use_tqdm_on_load", switch=True),
    ignored(_LOADING, "pt_load_map_location model_loader_extra_config ignore_patterns"),
    ignored("ranks sum by what was measured fastest", "disable_custom_all_reduce", switch=True),
    ignored("prefixes are keyed by BLAKE2b", "prefix_caching_hash_algo"),
    ignored("attention is not computed as a cascade", "disable_cascade_attn", switch=True),
    ignored("blocks are grouped by layer kind", "disable_hybrid_kv_cache_manager", switch=True),
    ignored("there is one block manager", "use_v2_block_manager", switch=True),
    ignored("graphs hold every length", "max_seq_len_to_capture max_context_len_to_capture"),
    ignored("outputs are handled beside the step", "disable_async_output_proc", switch=True),
    ignored("llguidance makes the grammars", "guided_decoding_backend structured_outputs_config"),
    ignored("each token is shown when it comes", "stream_interval num_scheduler_steps"),
    ignored("prompts of token ids need no tokenizer", "skip_tokenizer_init", switch=True),
    ignored("sleep() needs no preparation", "enable_sleep_mode", switch=True),
    ignored("no text model has other parts", "language_model_only", switch=True),
    ignored("tuning is by `fusewright tune` and -O3", "enable_flashinfer_autotune", switch=True),
    ignored("an option of vLLM itself", "allow_deprecated_quantization", switch=True),
    ignored("an option of vLLM itself", "fail_on_environ_validation", switch=True),
    ignored("every replica logs for itself", "aggregate_engine_logging", switch=True),
    refused("tokenizer.json is the only tokenizer; leave it out", "tokenizer_mode", ("auto", "hf")),
    refused("give tokenizer='ORG/NAME@REVISION'", "tokenizer_revision"),
    refused("set HF_TOKEN, or run `hf auth login`", "hf_token"),
    refused("set HF_HUB_CACHE to the folder of downloads", "download_dir"),
    refused("config.json is read from the model's own folder", "hf_config_path"),
    refused("config.json is the only configuration", "config_format", ("auto", "hf")),
    refused("give hf_overrides={'rope_parameters': {…}}", "rope_scaling rope_theta"),
    refused(
        "write the values to a generation_config.json, and give its folder as generation_config",
        "override_generation_config",
    ),
    refused(POOLING, "task runner convert", ("auto", "generate", "none")),
    refused(POOLING, "pooler_config override_pooler_config io_processor_plugin"),
    refused("prompts are text or token ids; leave it out", "enable_prompt_embeds", switch=True),
    refused("the experts of a token are not returned", "enable_return_routed_experts", switch=True),
    refused("log probabilities are of the model's own logits", "logprobs_mode", ("raw_logprobs",)),
    refused("weights are read from the model's folder alone", "model_weights"),
    refused("name the sizes: cudagraph_capture_sizes=[1, 2, 4, 8]", "max_cudagraph_capture_size"),
    refused("a model with windows keeps to them", "disable_sliding_window", switch=True),
    refused(
        "one prompt begins when the one before is read; use long_prefill_token_threshold",
        "max_num_partial_prefills max_long_partial_prefills",
        (1,),
    ),
    refused("see levels, -O0 to -O3, and `fusewright tune`", "performance_mode", ("balanced",)),
    refused("the checkpoint's scales are used, else 1", "calculate_kv_scales", switch=True),
    refused("attention computes in float32", "override_attention_dtype"),
    refused(
        "use attention_backend and kernels", "attention_config kernel_config moe_backend", ("auto",)
    ),
    refused(
        "say it in speculative_config={'method': 'ngram', 'num_speculative_tokens': 4}",
        "speculative_model num_speculative_tokens ngram_prompt_lookup_max ngram_prompt_lookup_min "
        "speculative_draft_tensor_parallel_size speculative_disable_by_batch_size",
    ),
    refused("`serve` has it; texts of LLM are whole", "reasoning_parser"),
    refused("name one of --reasoning-parser", "reasoning_parser_plugin"),
    refused(PROCESSORS, "logits_processors logits_processor_pattern"),
    refused(
        _OFFLOAD,
        "cpu_offload_gb cpu_offload_params offload_backend offload_group_size "
        "offload_params kv_offloading_size kv_offloading_backend",
        ("auto", "native"),
    ),
    refused(_OFFLOAD, "offload_num_in_group offload_prefetch_step", (1,)),
    refused(_OFFLOAD, "kv_sharing_fast_prefill", switch=True),
    refused(LORA, "enable_lora fully_sharded_loras enable_lora_bias", switch=True),
    refused(LORA, "enable_tower_connector_lora specialize_active_lora", switch=True),
    refused(
        LORA,
        "max_loras max_lora_rank max_cpu_loras lora_dtype default_mm_loras lora_extra_"
        "vocab_size long_lora_scaling_factors",
        (1, 16, 256, "auto"),
    ),
    refused(LORA, "enable_prompt_adapter", switch=True),
    refused(
        _IMAGES,
        "limit_mm_per_prompt media_io_kwargs mm_processor_kwargs mm_encoder_attn_backend "
        "video_pruning_rate mm_processor_cache_type mm_encoder_tp_mode allowed_local_media_path "
        "allowed_media_domains mm_processor_cache_gb mm_shm_cache_max_object_size_mb",
        ("weights", "lru", 4, 4.0, 128),
    ),
    refused(
        _IMAGES,
        "enable_mm_embeds interleave_mm_strings mm_encoder_only skip_mm_profiling "
        "disable_mm_preprocessor_cache enable_mm_processor_stats disable_chunked_mm_input",
        switch=True,
    ),
    refused(
        _STATE,
        "mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode",
        ("auto",),
    ),
    refused(
        _HOSTS,
        "nnodes node_rank master_addr master_port distributed_timeout_seconds",
        (1, "127.0.0.1", 29501),
    ),
    refused(
        "one GPU computes a request's attention, or the ranks its heads",
        "prefill_context_parallel_size decode_context_parallel_size dcp_comm_backend "
        "dcp_kv_cache_interleave_size cp_kv_cache_interleave_size",
        (1, "ag_rs"),
    ),
    refused(_ONE_REPLICA, "data_parallel_size", (1,)),
    refused(
        "the replicas of a server are on one host, behind one address; use --data-parallel-size",
        "data_parallel_rank data_parallel_start_rank data_parallel_size_local "
        "data_parallel_address data_parallel_rpc_port data_parallel_backend",
        ("mp",),
    ),
    refused(
        "the replicas of a server are behind one address",
        "data_parallel_hybrid_lb data_parallel_external_lb",
        switch=True,
    ),
    refused(
        _OVERLAP, "ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold", (32, 512)
    ),
    refused(_OVERLAP, "enable_dbo disable_nccl_for_dp_synchronization", switch=True),
    refused(
        _EXPERTS,
        "all2all_backend eplb_config expert_placement_strategy",
        ("allgather_reducescatter", "linear"),
    ),
    refused(_EXPERTS, "enable_eplb enable_elastic_ep", switch=True),
    refused(_CLASSES, "scheduler_cls worker_cls worker_extension_cls additional_config", ("auto",)),
    refused("use `fusewright profile`", "profiler_config"),
    refused(
        "use `fusewright profile`",
        "ray_workers_use_nsight enable_layerwise_nvtx_tracing",
        switch=True,
    ),
    refused(
        _TRANSFER, "kv_transfer_config kv_events_config ec_transfer_config weight_transfer_config"
    ),
    refused(
        _FIGURES,
        "show_hidden_metrics_for_version collect_detailed_traces kv_cache_metrics_sample",
        (0.01,),
    ),
    refused(
        _FIGURES,
        "kv_cache_metrics cudagraph_metrics enable_mfu_metrics enable_logging_iteration_details",
        switch=True,
    ),
    refused(
        "requests are ids in, ids out already with prompt_token_ids and return_token_ids",
        "tokens_only",
        switch=True,
    ),
    refused("give device='cpu' or 'cuda'", "override_neuron_config"),
    same("device"),
)
"""Arguments of ``LLM``, ``EngineArgs`` and ``AsyncEngineArgs``, which are flags of ``serve``."""
