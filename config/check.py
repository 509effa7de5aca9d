"""Refuses what no hardware can run: options by themselves, and beside a model's limits.

A start calls this before torch is imported, which takes seconds, and ``resolve`` calls it again.
"""

from __future__ import annotations

from typing import Any

from .errors import UserError
from .levels import BATCH_INVARIANT_LEVEL, LEVELS, LINEAR_FUSIONS, PASSES, Level
from .option_types import read_object
from .options import EngineOptions, option_specs
from .resolved import ModelLimits
from .speculative import check_rows, read_speculative
from .weight_format import STORED_FORMATS, W8A8, W8A8_STATIC, full_name, why_no_choice

_MAX_INT = 2**63 - 1
_FOUND_AT_RUN_TIME = {"fp8_static": "fp8 or fp8_block", W8A8_STATIC: W8A8}
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size")
_LIMITS = ("max_num_seqs", "max_model_len", "max_num_batched_tokens", "num_gpu_blocks_override")
_PROMPT_TOKENS = ("long_prefill_token_threshold", "max_num_mixed_tokens")
# (the least value, how an error names it, integer options that may also be unset)
_LEAST = (
    (1, "at least 1", (*_PARALLEL, *_LIMITS)),
    (1, "more than 0", ("kv_cache_memory_bytes",)),
    (0, "0 (no limit) or a number of tokens", _PROMPT_TOKENS),
)
_LARGEST = {
    "tensor_parallel_size": 1024,
    "pipeline_parallel_size": 1024,
    "max_num_seqs": 2**20,
    "max_num_batched_tokens": 2**24,
    "compile_cache_limit_gb": 10**9,
}


def check_options(options: EngineOptions) -> None:
    """Check each option by itself, and those that contradict each other.

    Raises:
        UserError: an option is out of range, or two of them contradict each other.
    """
    _check_ranges(options)
    _check_overrides(options)
    level = LEVELS[level_of(options)]
    _check_passes(options, level)
    _check_batch_invariant(options)
    forced_kernels(options, level)
    _check_store(options, level)
    _check_capture(options, level)
    _check_scheduler(options)
    _check_speculative(options)


def _check_speculative(options: EngineOptions) -> None:
    asked = read_speculative(options.speculative_config)
    if asked is None:
        return
    check_rows(asked, options.max_num_batched_tokens, options.cudagraph_capture_sizes or ())
    (spec,) = (spec for spec in option_specs() if spec.name == "quantization")
    _check_quantization("speculative_config: quantization", asked.quantization, spec.choices)


def _check_quantization(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse what is neither one of ``choices`` nor a format that a script has admitted."""
    known = (*dict.fromkeys((*choices, *STORED_FORMATS)),)
    if value is None or value in known:
        return
    why = why_no_choice(str(value)) or f"expected {' or '.join(known)}"
    raise UserError(f"{name}={value!r}: {why}")


def _check_overrides(options: EngineOptions) -> None:
    if options.hf_overrides:
        read_object("hf_overrides", options.hf_overrides, '{"max_position_embeddings": 4096}')


def check_limits(options: EngineOptions, limits: ModelLimits) -> None:
    """Check options beside the limits of the model.

    Raises:
        UserError: they ask for more than the model can do, or for what its checkpoint is not.
    """
    o, longest = options, limits.max_position_embeddings
    if o.max_model_len is not None and o.max_model_len > longest:
        why = limits.why_no_longer and f" ({limits.why_no_longer})"
        raise UserError(
            f"max_model_len={o.max_model_len}: the model was made for {longest} positions{why}; "
            f"give {longest} or less"
        )
    tokens, max_model_len = o.max_num_batched_tokens, o.max_model_len or longest
    if tokens is not None and not o.enable_chunked_prefill and tokens < max_model_len:
        raise UserError(
            f"max_num_batched_tokens={tokens} < max_model_len={max_model_len} without chunked "
            "prefill: a long prompt could never run; raise it or enable chunked prefill"
        )
    asked, there = full_name(o.quantization), limits.quantization
    if asked is not None and there not in ("none", asked):
        raise UserError(
            f"quantization={asked}: the checkpoint is quantized as {there} already; drop it, or "
            "give unquantized weights"
        )
    instead = _FOUND_AT_RUN_TIME.get(asked or "")
    if instead and there == "none" and o.load_format != "dummy":
        raise UserError(
            f"quantization={asked}: the scales of activations must be in the checkpoint, and it "
            f"is unquantized; use {instead}, which finds them at run time"
        )


def level_of(options: EngineOptions) -> int:
    """The number of the level that runs."""
    return 0 if options.enforce_eager else options.optimization_level


def forced_kernels(options: EngineOptions, level: Level) -> tuple[tuple[str, str], ...]:
    """(op, implementation) of ``kernels`` and ``attention_backend``.

    Raises:
        UserError: one has another form, two contradict each other, or the level runs none.
    """
    if options.kernels and not level.trace:
        raise UserError(
            f"kernels={','.join(options.kernels)}: -O0 runs references; use -O1 or higher"
        )
    backend = options.attention_backend
    if backend != "auto" and not level.trace:
        raise UserError(f"attention_backend={backend}: -O0 runs references; use -O1 or higher")
    kernels = {} if backend == "auto" else {"paged_attention": backend}
    for item in options.kernels:
        op, _, implementation = item.partition("=")
        if not op or not implementation:
            raise UserError(
                f"kernels={item!r}: expected op=implementation, such as rms_norm=triton"
            )
        if kernels.setdefault(op, implementation) != implementation:
            raise UserError(f"kernels: {op} is given twice, {kernels[op]} and {implementation}")
    return tuple(kernels.items())


def _check_ranges(options: EngineOptions) -> None:
    o = options
    size = o.block_size
    checks = [
        (o.optimization_level in LEVELS, "optimization_level", "0, 1, 2 or 3"),
        (8 <= size <= 256 and size & (size - 1) == 0, "block_size", "a power of two in 8..256"),
        (0 < o.gpu_memory_utilization <= 1, "gpu_memory_utilization", "a number in (0, 1]"),
        (o.max_step_ms >= 0, "max_step_ms", "0 (no bound) or a number of milliseconds"),
        (o.tune_seconds >= 0, "tune_seconds", "0 (measure none) or a number of seconds"),
        (o.compile_cache_limit_gb > 0, "compile_cache_limit_gb", "a number of more than 0"),
    ]
    for least, expected, names in _LEAST:
        values = [(name, getattr(o, name)) for name in names]
        checks += [(value is None or value >= least, name, expected) for name, value in values]
    for ok, name, expected in checks:
        if not ok:
            raise UserError(f"{name}={getattr(o, name)!r}: expected {expected}")
    for spec in option_specs():
        value = getattr(o, spec.name)
        largest = _LARGEST.get(spec.name, _MAX_INT)
        if isinstance(value, int | float) and not abs(value) <= largest:  # NaN is not either
            raise UserError(f"{spec.name}={value}: expected a number up to {largest}")
        if spec.name == "quantization":
            _check_quantization("quantization", value, spec.choices)
        elif spec.choices and value not in (spec.default, *spec.choices):
            raise UserError(f"{spec.name}={value!r}: expected {' or '.join(spec.choices)}")
    if o.num_gpu_blocks_override is not None and o.kv_cache_memory_bytes is not None:
        raise UserError(
            "num_gpu_blocks_override and kv_cache_memory_bytes both size the KV cache: give one"
        )
    if o.distributed_executor == "ray" and o.num_ranks == 1:
        raise UserError(
            "distributed_executor=ray: there is one rank, which nobody has to start; leave it out, "
            "or give tensor_parallel_size or pipeline_parallel_size of 2 or more"
        )
    if o.record_expert_load and o.pipeline_parallel_size > 1:
        raise UserError(
            f"record_expert_load with pipeline_parallel_size={o.pipeline_parallel_size}: the "
            "counts of other stages would be missing; leave one of them out"
        )


def _check_passes(options: EngineOptions, level: Level) -> None:
    required = [item.partition(":") for item in options.require_fusion]
    names = (*(options.passes or ()), *options.disable_passes, *(name for name, _, _ in required))
    for name in names:
        if name not in PASSES:
            raise UserError(f"unknown pass {name!r}; known: {', '.join(PASSES)}")
    for name, colon, count in required:
        if colon and not (count.isdecimal() and int(count) > 0):
            raise UserError(
                f"require_fusion={name}:{count}: expected NAME or NAME:COUNT, a count of at least 1"
            )
    if options.passes and not level.trace:
        raise UserError(f"passes={','.join(options.passes)}: -O0 does not trace; use -O1 or higher")
    if options.verify and not level.trace:
        raise UserError("verify: -O0 rewrites nothing; use -O1 or higher")


def _check_batch_invariant(options: EngineOptions) -> None:
    """Refuse what would let a row's bits depend on the others, or is not shown not to."""
    if not options.batch_invariant:
        return
    if (number := level_of(options)) != BATCH_INVARIANT_LEVEL:
        raise UserError(
            f"batch_invariant: kernels of -O{number} may add in another order at another batch "
            f"size; use -O{BATCH_INVARIANT_LEVEL}"
        )
    choices = [f"attention_backend={options.attention_backend}"]
    choices = choices if options.attention_backend != "auto" else []
    choices += [f"kernels={','.join(options.kernels)}"] if options.kernels else []
    choices += [f"passes={name}" for name in LINEAR_FUSIONS if name in (options.passes or ())]
    if choices:
        raise UserError(
            f"batch_invariant has implementations of its own, which {choices[0]} contradicts: drop "
            "one of them"
        )


def _check_store(options: EngineOptions, level: Level) -> None:
    names = ("require_cache", "compile_cache_dir", "trusted_keys")
    asked = [name for name in names if getattr(options, name)]
    if asked and not options.compile_cache:
        raise UserError(f"{asked[0]} contradicts no_cache: give one of them")
    if asked and not level.trace:
        raise UserError(f"{asked[0]}: -O0 compiles nothing; use -O1 or higher")


def _check_capture(options: EngineOptions, level: Level) -> None:
    mode, sizes = options.cudagraph_mode, options.cudagraph_capture_sizes
    if mode not in (None, "NONE") and not level.trace:
        remedy = "drop --enforce-eager" if options.enforce_eager else "use -O1 or higher"
        raise UserError(f"cudagraph_mode={mode}: -O0 captures nothing; {remedy}")
    if sizes is None:
        return
    if mode == "NONE" or not level.trace:
        why = "cudagraph_mode=NONE" if mode else "-O0"
        raise UserError(f"cudagraph_capture_sizes with {why}: nothing is captured; drop it")
    if not sizes or min(sizes) < 1:
        raise UserError(f"cudagraph_capture_sizes={sizes}: expected token counts of at least 1")


def _check_scheduler(options: EngineOptions) -> None:
    tokens, seqs = options.max_num_batched_tokens, options.max_num_seqs
    if tokens is not None and seqs is not None and tokens < seqs:
        raise UserError(
            f"max_num_batched_tokens={tokens} < max_num_seqs={seqs}: every running "
            "request needs one token a step; raise the former or lower the latter"
        )
    for name in (*_PROMPT_TOKENS, "max_step_ms"):
        if getattr(options, name) and not options.enable_chunked_prefill:
            raise UserError(
                f"{name}={getattr(options, name)} splits prompts, which "
                "enable_chunked_prefill=False forbids; drop one of them"
            )
