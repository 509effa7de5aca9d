"""The flags of ``vllm bench latency | throughput | serve | startup`` that ``ENGINE`` has not."""

from __future__ import annotations

from .argument import ignored, other, refused, same, table

_RESULT = "give --output FILE"
_EXPORT = 'write the prompts as lines of {"prompt": "…"} and give --dataset jsonl --dataset-path'
_GREEDY = "requests are greedy, since speed is measured; leave it out"
_FORM = "requests go to /v1/completions of an OpenAI server, which --base-url names"
_LENGTHS = "requests of random have equal lengths; --dataset chat draws them"
_SHARED = "use --dataset prefix, or bench prefix --prefix-len"
_RATES = "give --request-rate several times: a run each"
_RECORD = "a result names machine, options and versions by itself"

BENCH = table(
    same("dataset_path num_prompts input_len output_len batch_size request_rate burstiness"),
    same("goodput max_concurrency base_url served_model_name"),
    other(dataset_name="dataset", random_input_len="input_len", random_output_len="output_len"),
    other(sonnet_input_len="input_len", sonnet_output_len="output_len"),
    other(custom_output_len="output_len", output_json="output"),
    other(num_iters="repeats", num_iters_cold="iterations", num_iters_warm="iterations"),
    ignored("each bench warms up before it measures", "num_warmups num_iters_warmup"),
    ignored("requests generate their whole length", "ignore_eos", switch=True),
    ignored("the result has all measures, with p50, p90 and p99", "percentile_metrics"),
    ignored("the result has all measures, with p50, p90 and p99", "metric_percentiles"),
    ignored("a result does not depend on it", "disable_tqdm disable_detokenize", switch=True),
    ignored("prompts are tokens, or text as it is", "skip_chat_template", switch=True),
    ignored("no request is sent twice to fill a number", "no_oversample", switch=True),
    ignored("the bench asks for /v1/models at once", "ready_check_timeout_sec"),
    refused(_RESULT, "save_result save_detailed append_result", switch=True),
    refused(_RESULT, "result_dir result_filename"),
    refused(_RECORD, "label metadata"),
    refused("use --async", "async_engine", switch=True),
    refused("use `fusewright profile`", "profile", switch=True),
    refused("give --base-url http://HOST:PORT", "host port"),
    refused(_FORM, "backend", ("vllm", "openai")),
    refused(_FORM, "endpoint", ("/v1/completions",)),
    refused(_GREEDY, "top_p", (1, 1.0)),
    refused(_GREEDY, "temperature top_k min_p frequency_penalty presence_penalty"),
    refused("each prompt has one output; leave it out", "n", (1,)),
    refused("each prompt has one output; leave it out", "use_beam_search", switch=True),
    refused("log probabilities are not asked for; leave it out", "logprobs"),
    refused(_LENGTHS, "random_range_ratio"),
    refused(_SHARED, "random_prefix_len sonnet_prefix_len prefix_repetition_prefix_len"),
    refused("the lengths are those of the file's answers", "sharegpt_output_len"),
    refused(_EXPORT, "hf_name hf_subset hf_split hf_output_len"),
    refused(_RATES, "ramp_up_strategy ramp_up_start_rps ramp_up_end_rps"),
    refused("requests carry no other fields or headers; leave it out", "extra_body header"),
)
