"""``EngineOptions`` is what a user may set; the command line makes its flags from its fields."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from .levels import PASSES, CudagraphMode
from .option_types import typed
from .weight_format import ALIASES, STORED_FORMATS

SERVER_MIXED_TOKENS = 256
"""``max_num_mixed_tokens`` of a server."""

SYNONYMS: dict[str, dict[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "generation_config": {"vllm": "none"},
    "model_impl": {"vllm": "adapter"},
}
"""Option -> other words for its values, which scripts for vLLM have."""


def _option(
    default: Any,
    group: str,
    help: str,
    choices: tuple[str, ...] = (),
    flag: str = "",
    alias: str = "",
) -> Any:
    metadata = {"group": group, "help": help, "choices": choices, "flag": flag, "alias": alias}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Engine options under vLLM's names.  ``None`` means: decided by level, model or hardware.

    The flag of ``max_num_seqs`` is ``--max-num-seqs``; ``optimization_level`` is ``-O``.
    """

    model: str = _option(
        "abacus",
        "model",
        "Hugging Face folder, ORG/NAME[@revision] on the Hub (downloaded once), or a bundled one: "
        "abacus, abacus-moe",
    )
    tokenizer: str | None = _option(
        None, "model", "folder or Hub name of tokenizer.json; the model's own if unset"
    )
    chat_template: str | None = _option(
        None, "model", "file of a chat template, or its text, in place of the model's own"
    )
    generation_config: str = _option(
        "auto",
        "model",
        "whose generation_config.json has the sampling of requests that leave it out: the model's "
        "(auto), nobody's (none), or that of this folder",
    )
    hf_overrides: str = _option(
        "", "model", "JSON object of values in place of those of the model's config.json"
    )
    model_impl: str = _option(
        "auto",
        "model",
        "whose implementation: an adapter's where there is one (auto, adapter), or that of "
        "transformers, captured",
        ("auto", "adapter", "transformers"),
    )
    dtype: str = _option(
        "auto", "model", "weights and activations", ("auto", "bfloat16", "float16", "float32")
    )
    quantization: str | None = _option(
        None,
        "model",
        "what 16-bit weights become: fp8, int4, int8, mxfp4, …; FP8 weights and activations with a "
        "scale a channel and token (fp8), a 128 x 128 block (fp8_block) or a matrix (fp8_static); "
        "int8 weights and activations (w8a8_int8); or weights alone: int4, int8, mxfp4, or a "
        "format by its whole name, such as int4_g32; as the checkpoint is if unset",
        ("fp8", "fp8_block", "fp8_static", *ALIASES, *STORED_FORMATS),
    )
    load_format: str = _option(
        "auto",
        "model",
        "dummy: random weights from config.json alone",
        ("auto", "safetensors", "dummy"),
    )
    max_model_len: int | None = _option(None, "model", "longest prompt + output, tokens")
    device: str = _option("auto", "model", "where to run", ("auto", "cpu", "cuda"))
    tensor_parallel_size: int = _option(
        1, "model", "ranks that hold the model together: GPUs, or processes with --device cpu"
    )
    pipeline_parallel_size: int = _option(
        1, "model", "stages of consecutive layers, each on ranks of its own: times the ranks above"
    )
    distributed_executor: str = _option(
        "mp",
        "model",
        "who starts the other ranks: this process on this host (mp), or Ray on the nodes of its "
        "cluster",
        ("mp", "ray"),
    )
    enable_expert_parallel: bool = _option(
        False, "model", "each rank holds whole experts, in place of a part of each"
    )
    seed: int = _option(0, "model", "of dummy weights and of requests without a seed")
    max_logprobs: int = _option(
        20, "model", "most log probabilities that a request may ask for a token; -1: all"
    )

    optimization_level: int = _option(2, "compile", "0..3; see `fusewright explain --levels`")
    enforce_eager: bool = _option(False, "compile", "neither compile nor capture: the same as -O0")
    passes: tuple[str, ...] | None = _option(
        None, "compile", f"run exactly these passes, of: {', '.join(PASSES)}"
    )
    disable_passes: tuple[str, ...] = _option((), "compile", "leave these passes out")
    require_fusion: tuple[str, ...] = _option(
        (), "compile", "fail unless this pass matches all its sites, or :N of them at least"
    )
    kernels: tuple[str, ...] = _option(
        (),
        "compile",
        "force implementations, as op=native|triton|cuda; op=cuda/triton: the first that fits",
    )
    attention_backend: str = _option(
        "auto",
        "compile",
        "which paged attention; auto takes the fastest that supports the model",
        ("auto", "cuda", "triton", "native"),
    )
    batch_invariant: bool = _option(
        False,
        "compile",
        "the same bits for a request at any batch size, order, chunking and cache state; slower",
    )
    verify: bool = _option(False, "compile", "run each distinct rewrite, before against after")
    proof: bool = _option(
        True,
        "compile",
        "of a model without an adapter, compare a small twin with its unmodified implementation "
        "before it is compiled",
    )
    record_expert_load: bool = _option(
        False,
        "compile",
        "count the tokens of each expert, for report() and `profile`; experts are not fused then",
    )

    tuned_config_dir: str | None = _option(
        None, "compile", "folder of device tables, as `fusewright tune moe` writes them"
    )
    tune_seconds: float = _option(
        40.0,
        "compile",
        "-O3: stop measuring library algorithms and experts' tiles then, and keep what was found",
    )

    compile_cache: bool = _option(
        True, "artifact", "keep what was compiled, and load it at the next start", flag="--cache"
    )
    require_cache: bool = _option(
        False, "artifact", "compile nothing: stop with the reason when no artifact fits"
    )
    compile_cache_dir: tuple[str, ...] = _option(
        (),
        "artifact",
        "folders of artifacts, searched in order after the baked one; new ones go to the first; "
        "separated by commas or colons",
    )
    compile_cache_limit_gb: float = _option(
        20.0, "artifact", "prune the least recently used artifacts beyond this size"
    )
    trusted_keys: tuple[str, ...] = _option(
        (), "artifact", "load only artifacts signed by these public keys (PEM files or folders)"
    )

    cudagraph_mode: str | None = _option(
        None, "capture", "which steps replay CUDA graphs", tuple(CudagraphMode)
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = _option(
        None,
        "capture",
        "token counts to capture; 1, 2, 4, 8..248 by 8, then by 16, then by 128 if unset",
        alias="--cudagraph-sizes",
    )
    lazy_capture: bool = _option(
        True, "capture", "serve at once and capture each size when it is first needed or at rest"
    )

    max_num_seqs: int | None = _option(
        None, "scheduler", "most requests a step; 512 on a GPU of 70 GB or more and 256 if unset"
    )
    max_num_batched_tokens: int | None = _option(
        None, "scheduler", "most tokens a step; 8192 on a GPU and 2048 on a CPU if unset"
    )
    enable_chunked_prefill: bool = _option(True, "scheduler", "split long prompts over steps")
    long_prefill_token_threshold: int = _option(
        0, "scheduler", "most tokens of one prompt a step, so that others share it; 0: all that fit"
    )
    max_num_mixed_tokens: int | None = _option(
        None,
        "scheduler",
        "most tokens of a step of decodes and prompts, so that tokens come evenly; more while much "
        "waits; 0: no limit; 256 under `serve` and 0 elsewhere if unset",
    )
    max_step_ms: float = _option(
        0.0,
        "scheduler",
        "longest step of decodes and prompts in ms, as predicted from measured steps; prompts wait "
        "for what it does not hold; 0: no bound",
    )
    scheduling_policy: str = _option(
        "fcfs", "scheduler", "who runs first: by arrival, or by priority", ("fcfs", "priority")
    )
    async_scheduling: bool = _option(True, "scheduler", "prepare step n+1 while n runs")
    speculative_config: str | None = _option(
        None,
        "scheduler",
        "JSON object that says who drafts tokens, several of which a step verifies, such as "
        '{"method": "ngram", "num_speculative_tokens": 4}',
    )

    block_size: int = _option(16, "cache", "tokens a KV block; a power of two from 8")
    kv_cache_dtype: str = _option(
        "auto",
        "cache",
        "of the KV cache; fp8 is fp8_e4m3, by the checkpoint's k_scale and v_scale if it has "
        "them; auto: as dtype",
        ("auto", "fp8", "fp8_e4m3"),
    )
    enable_prefix_caching: bool = _option(
        True, "cache", "start behind the longest prefix whose KV blocks are still there"
    )
    gpu_memory_utilization: float = _option(
        0.9, "cache", "share of GPU memory for weights, KV cache and graphs"
    )
    kv_cache_memory_bytes: int | None = _option(None, "cache", "bytes for the KV cache")
    num_gpu_blocks_override: int | None = _option(None, "cache", "number of KV blocks")

    @property
    def num_ranks(self) -> int:
        """The ranks of one engine: a process each."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def for_server(self) -> EngineOptions:
        """These options with the defaults of a server, whose clients read tokens as they come."""
        if self.max_num_mixed_tokens is not None or not self.enable_chunked_prefill:
            return self
        return replace(self, max_num_mixed_tokens=SERVER_MIXED_TOKENS)

    def __post_init__(self) -> None:
        """Raises ``UserError`` for a value of the wrong type."""
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not f.default:
                if f.name in SYNONYMS and isinstance(value, str):
                    value = SYNONYMS[f.name].get(value, value)
                object.__setattr__(self, f.name, typed(f.name, str(f.type), value))


@dataclass(frozen=True)
class OptionSpec:
    """One option as the command line needs it; ``alias``: another flag for it, or none."""

    name: str
    flag: str
    type: str
    default: Any
    group: str
    help: str
    choices: tuple[str, ...]
    alias: str = ""


def option_specs() -> list[OptionSpec]:
    """Every option of ``EngineOptions``, in order."""
    return [
        OptionSpec(
            name=f.name,
            type=str(f.type),
            default=f.default,
            **{**f.metadata, "flag": f.metadata["flag"] or "--" + f.name.replace("_", "-")},
        )
        for f in fields(EngineOptions)
    ]
