"""``resolve()``: options + hardware + the model's limits -> what the engine runs with."""

from __future__ import annotations

from . import gates
from .errors import UserError
from .levels import (
    BATCH_INVARIANT,
    BATCH_INVARIANT_LEVEL,
    FLASHINFER,
    JOINS_PRODUCTS,
    LEVELS,
    OPT_IN,
    PASSES,
    CudagraphMode,
    Level,
)
from .options import EngineOptions, option_specs
from .resolved import (
    CacheConfig,
    CaptureConfig,
    CompileConfig,
    Hardware,
    ModelConfig,
    ModelLimits,
    ResolvedConfig,
    SchedulerConfig,
    StoreConfig,
)

_DEFAULT_BATCHED_TOKENS = {"cuda": 8192, "cpu": 2048}
_DEFAULT_NUM_SEQS, _NUM_SEQS_LARGE_GPU, _LARGE_GPU_BYTES = 256, 512, 70 * 10**9
_FP8_SM = 89


def capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8..248 by 8, then 256.. by 16, up to min(2 x max_num_seqs, 512), ascending;
    always with ``max_num_seqs`` itself when it is within that limit."""
    limit = min(2 * max_num_seqs, 512)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, limit + 1, 16)}
    return tuple(sorted(s for s in {*sizes, max_num_seqs} if s <= limit))


def resolve(options: EngineOptions, hardware: Hardware, limits: ModelLimits) -> ResolvedConfig:
    """Combine options with level, hardware and model; called once.

    Raises:
        UserError: an option is out of range, or two options contradict each other.
    """
    _check_ranges(options)
    level_number = 0 if options.enforce_eager else options.optimization_level
    level = LEVELS[level_number]
    max_model_len = _max_model_len(options, limits)
    scheduler = _scheduler(options, hardware, max_model_len)
    dtype = limits.dtype if options.dtype == "auto" else options.dtype
    quantization = _quantization(options, hardware, limits)
    weights = dtype if quantization == "none" else quantization
    return ResolvedConfig(
        hardware=hardware,
        model=ModelConfig(
            path=options.model,
            tokenizer=options.tokenizer or options.model,
            dtype=dtype,
            quantization=quantization,
            load_format=options.load_format,
            max_model_len=max_model_len,
            seed=options.seed,
        ),
        compile=_compile(options, level_number, level, hardware, weights),
        store=_store(options, level),
        capture=_capture(options, level, hardware, scheduler),
        scheduler=scheduler,
        cache=CacheConfig(
            block_size=options.block_size,
            dtype=_cache_dtype(options, hardware, dtype),
            gpu_memory_utilization=options.gpu_memory_utilization,
            kv_cache_memory_bytes=options.kv_cache_memory_bytes,
            num_blocks=options.num_gpu_blocks_override,
        ),
    )


def _check_ranges(options: EngineOptions) -> None:
    o = options
    size = o.block_size
    checks = [
        (o.optimization_level in LEVELS, "optimization_level", "0, 1, 2 or 3"),
        (8 <= size <= 256 and size & (size - 1) == 0, "block_size", "a power of two in 8..256"),
        (0 < o.gpu_memory_utilization <= 1, "gpu_memory_utilization", "a number in (0, 1]"),
        (o.max_num_seqs is None or o.max_num_seqs >= 1, "max_num_seqs", "at least 1"),
        (o.max_model_len is None or o.max_model_len >= 1, "max_model_len", "at least 1"),
        (
            o.max_num_batched_tokens is None or o.max_num_batched_tokens >= 1,
            "max_num_batched_tokens",
            "at least 1",
        ),
        (
            o.num_gpu_blocks_override is None or o.num_gpu_blocks_override >= 1,
            "num_gpu_blocks_override",
            "at least 1",
        ),
        (
            o.kv_cache_memory_bytes is None or o.kv_cache_memory_bytes > 0,
            "kv_cache_memory_bytes",
            "more than 0",
        ),
    ]
    for ok, name, expected in checks:
        if not ok:
            raise UserError(f"{name}={getattr(o, name)!r}: expected {expected}")
    for spec in option_specs():
        value = getattr(o, spec.name)
        if spec.choices and value not in (spec.default, *spec.choices):
            raise UserError(f"{spec.name}={value!r}: expected {' or '.join(spec.choices)}")
    if o.num_gpu_blocks_override is not None and o.kv_cache_memory_bytes is not None:
        raise UserError(
            "num_gpu_blocks_override and kv_cache_memory_bytes both size the KV cache: give one"
        )


def _max_model_len(options: EngineOptions, limits: ModelLimits) -> int:
    longest = limits.max_position_embeddings
    if options.max_model_len is None:
        return longest
    if options.max_model_len > longest:
        raise UserError(
            f"max_model_len={options.max_model_len}: the model was made for {longest} positions; "
            f"give {longest} or less"
        )
    return options.max_model_len


def _quantization(options: EngineOptions, hardware: Hardware, limits: ModelLimits) -> str:
    asked, there = options.quantization, limits.quantization
    if asked is not None and there not in ("none", asked):
        raise UserError(
            f"quantization={asked}: the checkpoint is quantized as {there} already; drop it, or "
            "give unquantized weights"
        )
    if asked == "fp8_static" and there == "none" and options.load_format != "dummy":
        raise UserError(
            "quantization=fp8_static: the scales of activations must be in the checkpoint, and it "
            "is unquantized; use fp8 or fp8_block, which find them at run time"
        )
    name = asked or there
    if name != "none":
        whence = "quantization" if asked else "quantization of the checkpoint"
        _check_fp8(f"{whence}={name}", hardware)
    return name


def _cache_dtype(options: EngineOptions, hardware: Hardware, dtype: str) -> str:
    if options.kv_cache_dtype == "auto":
        return dtype
    _check_fp8(f"kv_cache_dtype={options.kv_cache_dtype}", hardware)
    return "fp8_e4m3"


def _check_fp8(what: str, hardware: Hardware) -> None:
    if hardware.device == "cuda" and hardware.sm < _FP8_SM:
        raise UserError(
            f"{what}: FP8 needs compute capability {_FP8_SM / 10} or higher, {hardware.name} has "
            f"{hardware.sm / 10}; use another GPU or unquantized weights and kv_cache_dtype=auto"
        )


def why_off(name: str, number: int, sm: int, weights: str) -> str:
    """Why level ``number`` does not run a pass on this hardware, or an empty string.

    Args:
        weights: their dtype, or how they are quantized.
    """
    level = LEVELS[number]
    named = name in level.passes
    if not named and (name not in OPT_IN or not level.hand_kernels):
        return f"-O{number} does not run it"
    return gates.why_off(name, sm, weights, opt_in=not named)


def _compile(
    options: EngineOptions, number: int, level: Level, hardware: Hardware, weights: str
) -> CompileConfig:
    chosen = options.passes
    if chosen is None:
        chosen = tuple(name for name in PASSES if not why_off(name, number, hardware.sm, weights))
        if options.batch_invariant:
            chosen = tuple(name for name in chosen if name not in JOINS_PRODUCTS)
    for name in (*chosen, *options.disable_passes):
        if name not in PASSES:
            raise UserError(f"unknown pass {name!r}; known: {', '.join(PASSES)}")
    if options.passes and not level.trace:
        raise UserError(f"passes={','.join(options.passes)}: -O0 does not trace; use -O1 or higher")
    if options.verify and not level.trace:
        raise UserError("verify: -O0 rewrites nothing; use -O1 or higher")
    passes = tuple(p for p in PASSES if p in chosen and p not in options.disable_passes)
    if options.batch_invariant:
        _check_batch_invariant(options, number)
    return CompileConfig(
        level=number,
        trace=level.trace,
        passes=passes,
        required=_required(options, passes),
        hand_kernels=level.hand_kernels,
        tune=level.tune,
        kernels=tuple(BATCH_INVARIANT[hardware.device].items())
        if options.batch_invariant
        else _kernels(options, level),
        verify=options.verify,
        named_kernels=tuple(item.partition("=")[0] for item in options.kernels),
    )


def _check_batch_invariant(options: EngineOptions, number: int) -> None:
    """Refuse what would let a row's bits depend on the others, or is not shown not to."""
    if number != BATCH_INVARIANT_LEVEL:
        raise UserError(
            f"batch_invariant: kernels of -O{number} may add in another order at another batch "
            f"size; use -O{BATCH_INVARIANT_LEVEL}"
        )
    given = [f"attention_backend={options.attention_backend}"]
    given = given if options.attention_backend != "auto" else []
    given += [f"kernels={','.join(options.kernels)}"] if options.kernels else []
    given += [f"passes={name}" for name in JOINS_PRODUCTS if name in (options.passes or ())]
    if given:
        raise UserError(
            f"batch_invariant has implementations of its own, which {given[0]} contradicts: drop "
            "one of them"
        )


def _store(options: EngineOptions, level: Level) -> StoreConfig:
    given = [
        flag
        for flag, is_given in [
            ("require_cache", options.require_cache),
            ("compile_cache_dir", bool(options.compile_cache_dir)),
            ("trusted_keys", bool(options.trusted_keys)),
        ]
        if is_given
    ]
    if given and not options.compile_cache:
        raise UserError(f"{given[0]} contradicts no_cache: give one of them")
    if given and not level.trace:
        raise UserError(f"{given[0]}: -O0 compiles nothing; use -O1 or higher")
    if options.compile_cache_limit_gb <= 0:
        raise UserError(
            f"compile_cache_limit_gb={options.compile_cache_limit_gb}: expected more than 0"
        )
    return StoreConfig(
        enabled=options.compile_cache and level.trace,
        require=options.require_cache,
        search=options.compile_cache_dir,
        trusted_keys=options.trusted_keys,
        size_limit_bytes=int(options.compile_cache_limit_gb * 1e9),
    )


def _required(options: EngineOptions, passes: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    required: list[tuple[str, int]] = []
    for item in options.require_fusion:
        name, _, count = item.partition(":")
        if name not in passes:
            raise UserError(
                f"require_fusion={item}: no such pass at this level; it runs: "
                f"{', '.join(passes) or 'none'}"
            )
        if count and not count.isdigit():
            raise UserError(f"require_fusion={item}: expected NAME or NAME:COUNT")
        required.append((name, int(count or 1)))
    return tuple(required)


def _kernels(options: EngineOptions, level: Level) -> tuple[tuple[str, str], ...]:
    if options.kernels and not level.trace:
        raise UserError(
            f"kernels={','.join(options.kernels)}: -O0 runs references; use -O1 or higher"
        )
    backend = options.attention_backend
    if backend != "auto" and not level.trace:
        raise UserError(f"attention_backend={backend}: -O0 runs references; use -O1 or higher")
    kernels = {} if backend == "auto" else {"paged_attention": backend}
    if backend == "flashinfer":
        kernels = dict([FLASHINFER])
    for item in options.kernels:
        op, _, implementation = item.partition("=")
        if not op or not implementation:
            raise UserError(
                f"kernels={item!r}: expected op=implementation, such as rms_norm=triton"
            )
        if (op, implementation) == (FLASHINFER[0], "flashinfer"):
            op, implementation = FLASHINFER  # the backend's other name
        if kernels.setdefault(op, implementation) != implementation:
            raise UserError(f"kernels: {op} is given twice, {kernels[op]} and {implementation}")
    return tuple(kernels.items())


def _capture(
    options: EngineOptions, level: Level, hardware: Hardware, scheduler: SchedulerConfig
) -> CaptureConfig:
    explicit = options.cudagraph_mode
    mode = CudagraphMode(explicit) if explicit else level.cudagraph_mode
    if explicit and mode is not CudagraphMode.NONE:
        if not level.trace:
            remedy = "drop --enforce-eager" if options.enforce_eager else "use -O1 or higher"
            raise UserError(f"cudagraph_mode={explicit}: -O0 captures nothing; {remedy}")
        if hardware.graphs == "none":
            raise UserError(
                f"cudagraph_mode={explicit}: CUDA graphs need a GPU, the device is "
                f"{hardware.device}; use cudagraph_mode=NONE"
            )
    if hardware.graphs == "none" or not level.trace:
        mode = CudagraphMode.NONE
    sizes = options.cudagraph_capture_sizes
    if sizes is None:
        sizes = capture_sizes(scheduler.max_num_seqs)
    elif mode is CudagraphMode.NONE:
        why = (
            "cudagraph_mode=NONE"
            if explicit
            else f"device {hardware.device}"
            if level.trace
            else "-O0"
        )
        raise UserError(f"cudagraph_capture_sizes with {why}: nothing is captured; drop it")
    if not sizes or min(sizes) < 1:
        raise UserError(f"cudagraph_capture_sizes={sizes}: expected token counts of at least 1")
    if mode is CudagraphMode.NONE:
        return CaptureConfig(mode, (), options.lazy_capture)
    fitting = tuple(sorted({size for size in sizes if size <= scheduler.max_num_batched_tokens}))
    return CaptureConfig(mode, fitting, options.lazy_capture)


def _scheduler(options: EngineOptions, hardware: Hardware, max_model_len: int) -> SchedulerConfig:
    seqs = options.max_num_seqs
    if seqs is None:
        large = hardware.memory_bytes >= _LARGE_GPU_BYTES
        seqs = _NUM_SEQS_LARGE_GPU if large else _DEFAULT_NUM_SEQS
        seqs = min(seqs, options.max_num_batched_tokens or seqs)
    tokens = options.max_num_batched_tokens
    if tokens is None:
        tokens = max(_DEFAULT_BATCHED_TOKENS[hardware.device], seqs)
        if not options.enable_chunked_prefill:
            tokens = max(tokens, max_model_len)
    if tokens < seqs:
        raise UserError(
            f"max_num_batched_tokens={tokens} < max_num_seqs={seqs}: every running "
            "request needs one token a step; raise the former or lower the latter"
        )
    if not options.enable_chunked_prefill and tokens < max_model_len:
        raise UserError(
            f"max_num_batched_tokens={tokens} < max_model_len={max_model_len} without chunked "
            "prefill: a long prompt could never run; raise it or enable chunked prefill"
        )
    if options.long_prefill_token_threshold < 0:
        raise UserError(
            f"long_prefill_token_threshold={options.long_prefill_token_threshold}: expected 0 "
            "(no limit) or a number of tokens"
        )
    if options.long_prefill_token_threshold and not options.enable_chunked_prefill:
        raise UserError(
            f"long_prefill_token_threshold={options.long_prefill_token_threshold} splits prompts, "
            "which enable_chunked_prefill=False forbids; drop one of them"
        )
    return SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=min(tokens, seqs * max_model_len),
        enable_chunked_prefill=options.enable_chunked_prefill,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        policy=options.scheduling_policy,
        prefix_caching=options.enable_prefix_caching,
        async_scheduling=options.async_scheduling,
    )
