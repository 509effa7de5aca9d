"""The flags that ``vllm serve`` has beside ``ENGINE``, and those that mean more there."""

from __future__ import annotations

from .argument import ignored, other, refused, same, table

_LOG = "give --log-level and --log-format json"
_TOOLS = "calls of tools are read in every answer to a request that has tools"
_PROXY = "a proxy in front of the server does that"
_AUTHOR = "endpoints are not added to the server"

SERVE = table(
    same("host port api_key ssl_certfile ssl_keyfile served_model_name data_parallel_size"),
    same("api_server_count shutdown_timeout config"),
    same("allowed_origins", "separated by commas; none unless given"),
    same("reasoning_parser", "auto reads the chat template; none leaves reasoning in the text"),
    same("tool_call_parser", "auto reads the chat template; hermes, llama3_json, mistral, …"),
    other(otlp_traces_endpoint="otlp_endpoint", uvicorn_limit_concurrency="limit_concurrency"),
    ignored(_TOOLS, "enable_auto_tool_choice", switch=True),
    ignored(
        "answers carry cached tokens and ids of requests anyway",
        "enable_prompt_tokens_details enable_request_id_headers",
        switch=True,
    ),
    ignored(
        "usage comes in every answer, and at the end of streams that ask for it",
        "enable_force_include_usage",
        switch=True,
    ),
    ignored("/load and /metrics have it", "enable_server_load_tracking", switch=True),
    ignored(
        "/docs is one page without files of others",
        "disable_fastapi_docs enable_offline_docs",
        switch=True,
    ),
    same("disable_log_stats disable_log_requests disable_uvicorn_access_log", switch=True),
    same("trust_request_chat_template", switch=True),
    same("enable_log_requests", "sizes and sampling, never the text", switch=True),
    same("disable_access_log_for_endpoints", "those of probes and /metrics unless given"),
    ignored("texts of requests are not logged", "max_log_len"),
    ignored("--log-level is of the whole log", "uvicorn_log_level"),
    ignored("heads are bounded anyway", "h11_max_incomplete_event_size h11_max_header_count"),
    ignored("no credentials are in cookies", "allow_credentials", switch=True),
    ignored(
        "the server has what the answers of its API need",
        "allowed_methods allowed_headers chat_template_content_format",
    ),
    ignored(
        "each engine has a process of its own",
        "disable_frontend_multiprocessing disable_log_deltas",
        switch=True,
    ),
    refused("give chat_template_kwargs in the request", "default_chat_template_kwargs"),
    refused("answers are of the assistant", "response_role", ("assistant",)),
    refused(
        "give return_tokens_as_token_ids in the request", "return_tokens_as_token_ids", switch=True
    ),
    refused("leave tools out of the request", "exclude_tools_when_tool_choice_none", switch=True),
    refused("name one of --tool-call-parser", "tool_parser_plugin"),
    refused("the client runs its tools", "tool_server"),
    refused("LoRA adapters are not served; merge the adapter into the weights", "lora_modules"),
    refused("give --host and --port", "uds"),
    refused(_PROXY, "root_path ssl_ca_certs ssl_cert_reqs ssl_ciphers"),
    refused("restart the server for another certificate", "enable_ssl_refresh", switch=True),
    refused(_AUTHOR, "middleware"),
    refused(
        "POST /tokenize and /detokenize are there", "enable_tokenizer_info_endpoint", switch=True
    ),
    refused("times are in /metrics, and in traces", "enable_per_request_metrics", switch=True),
    refused(_LOG, "log_config_file"),
    refused("outputs are never logged: they may be private", "enable_log_outputs", switch=True),
    ignored("internal errors have a traceback in the log", "log_error_stack", switch=True),
    refused("answers carry no system_fingerprint; leave it out", "fingerprint_mode", ("full",)),
    refused("answers carry no system_fingerprint; leave it out", "fingerprint_value"),
    refused("engines start with the server", "headless grpc", switch=True),
    refused(
        "replicas are behind one address",
        "data_parallel_supervisor_port "
        "dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s "
        "dp_supervisor_probe_failure_threshold",
        (9256, 5.0, 3),
    ),
    refused("there is no endpoint of Cohere's", "cohere_format", ("cmd4",)),
    refused("there is no endpoint of Cohere's", "cohere_is_reasoning_model", switch=True),
    refused("models give no scores", "enable_flash_late_interaction", switch=True),
)
