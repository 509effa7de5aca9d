"""``resolve()``: options + hardware + the model's limits -> what the engine runs with."""

from __future__ import annotations

from pathlib import Path

from . import gates
from .capture_sizes import capture_sizes, launch_bound_tokens, most_rows
from .check import check_limits, check_options, forced_kernels, level_of
from .device_table import DeviceTable, shipped, tables_for
from .errors import UserError
from .expert_tables import installed_triton
from .levels import (
    BATCH_INVARIANT,
    LEVELS,
    LINEAR_FUSIONS,
    PASSES,
    CudagraphMode,
    Level,
)
from .options import EngineOptions
from .resolved import (
    CacheConfig,
    CaptureConfig,
    CompileConfig,
    Hardware,
    ModelConfig,
    ModelLimits,
    ParallelConfig,
    Precision,
    ResolvedConfig,
    SchedulerConfig,
    StoreConfig,
)
from .speculative import read_speculative
from .weight_format import STORED_FORMATS, full_name

_DEFAULT_BATCHED_TOKENS = {"cuda": 8192, "cpu": 2048}
_DEFAULT_NUM_SEQS, _NUM_SEQS_LARGE_GPU, _LARGE_GPU_BYTES = 256, 512, 70 * 10**9
_FP8_SM = 89


def resolve(options: EngineOptions, hardware: Hardware, limits: ModelLimits) -> ResolvedConfig:
    """Combine options with level, hardware and model; called once.

    Raises:
        UserError: an option is out of range, or two options contradict each other.
    """
    check_options(options)
    check_limits(options, limits)
    level_number = level_of(options)
    level = LEVELS[level_number]
    max_model_len = options.max_model_len or limits.max_position_embeddings
    scheduler = _scheduler(options, hardware, max_model_len)
    precision = _precision(options, hardware, limits)
    return ResolvedConfig(
        hardware=hardware,
        model=ModelConfig(
            path=options.model,
            hf_overrides=options.hf_overrides,
            load_format=options.load_format,
            max_model_len=max_model_len,
            seed=options.seed,
        ),
        precision=precision,
        parallel=ParallelConfig(
            options.tensor_parallel_size,
            options.enable_expert_parallel,
            options.pipeline_parallel_size,
        ),
        compile=_compile(options, level_number, level, hardware, precision.weights),
        store=_store(options, level),
        capture=_capture(
            options, level, hardware, scheduler, launch_bound_tokens(limits, precision.weights)
        ),
        scheduler=scheduler,
        cache=CacheConfig(
            block_size=options.block_size,
            gpu_memory_utilization=options.gpu_memory_utilization,
            kv_cache_memory_bytes=options.kv_cache_memory_bytes,
            num_blocks=options.num_gpu_blocks_override,
        ),
    )


def _precision(options: EngineOptions, hardware: Hardware, limits: ModelLimits) -> Precision:
    dtype = limits.dtype if options.dtype == "auto" else options.dtype
    quantization = full_name(options.quantization) or limits.quantization
    stored = STORED_FORMATS.get(quantization)
    if quantization != "none" and (stored is None or stored.x_dtype.startswith("float8")):
        whence = "quantization" if options.quantization else "quantization of the checkpoint"
        _check_fp8(f"{whence}={quantization}", hardware)
    if options.kv_cache_dtype == "auto":
        return Precision(dtype, quantization, dtype)
    _check_fp8(f"kv_cache_dtype={options.kv_cache_dtype}", hardware)
    return Precision(dtype, quantization, "fp8_e4m3")


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
    if name not in LEVELS[number].passes:
        return f"-O{number} does not run it"
    return gates.why_off(name, sm, weights)


def _tables(
    options: EngineOptions, hardware: Hardware
) -> tuple[tuple[DeviceTable, ...], dict[str, str]]:
    """The tables of the folder that the options name, which were measured on this hardware, and the
    reasons why others there cannot serve, by file."""
    here = DeviceTable("", hardware.name, hardware.sm, hardware.num_sms, hardware.memory_bytes)
    folder = None if options.tuned_config_dir is None else Path(options.tuned_config_dir)
    return tables_for(here, installed_triton(), folder, shipped())


def _compile(
    options: EngineOptions, number: int, level: Level, hardware: Hardware, weights: str
) -> CompileConfig:
    chosen = options.passes
    if chosen is None:
        chosen = tuple(name for name in PASSES if not why_off(name, number, hardware.sm, weights))
        if options.batch_invariant:
            chosen = tuple(name for name in chosen if name not in LINEAR_FUSIONS)
    passes = tuple(p for p in PASSES if p in chosen and p not in options.disable_passes)
    tables, ignored = _tables(options, hardware)
    return CompileConfig(
        tables=tables,
        ignored_tables=tuple(ignored.items()),
        level=number,
        trace=level.trace,
        passes=passes,
        required=_required(options, passes),
        hand_kernels=level.hand_kernels,
        tune=level.tune,
        kernels=tuple(BATCH_INVARIANT[hardware.device].items())
        if options.batch_invariant
        else forced_kernels(options, level),
        verify=options.verify,
        proof=options.proof,
        record_expert_load=options.record_expert_load,
        named_kernels=tuple(item.partition("=")[0] for item in options.kernels),
        tune_seconds=options.tune_seconds,
    )


def _store(options: EngineOptions, level: Level) -> StoreConfig:
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
        required.append((name, int(count or 1)))
    return tuple(required)


def _capture(
    options: EngineOptions,
    level: Level,
    hardware: Hardware,
    scheduler: SchedulerConfig,
    launch_bound: int,
) -> CaptureConfig:
    explicit = options.cudagraph_mode
    mode = CudagraphMode(explicit) if explicit else level.cudagraph_mode
    if hardware.graphs == "none":
        if explicit and mode is not CudagraphMode.NONE:
            raise UserError(
                f"cudagraph_mode={explicit}: CUDA graphs need a GPU, the device is "
                f"{hardware.device}; use cudagraph_mode=NONE"
            )
        mode = CudagraphMode.NONE
    sizes = options.cudagraph_capture_sizes
    if sizes is None:
        # Sums over ranks have not been captured for as many tokens.
        ranks = options.tensor_parallel_size * options.pipeline_parallel_size
        larger = mode.piecewise and ranks == 1
        sizes = capture_sizes(scheduler.max_num_rows, launch_bound if larger else 0)
    elif mode is CudagraphMode.NONE:
        raise UserError(
            f"cudagraph_capture_sizes with device {hardware.device}: nothing is captured; drop it"
        )
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
    tokens = min(tokens, seqs * max_model_len)
    speculative = read_speculative(options.speculative_config)
    num_drafts = 0 if speculative is None else speculative.num_speculative_tokens
    sizes = options.cudagraph_capture_sizes or ()
    return SchedulerConfig(
        max_num_seqs=seqs,
        max_num_rows=most_rows(seqs, num_drafts, tokens, sizes),
        max_num_batched_tokens=tokens,
        enable_chunked_prefill=options.enable_chunked_prefill,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        max_num_mixed_tokens=options.max_num_mixed_tokens or 0,
        max_step_ms=options.max_step_ms,
        policy=options.scheduling_policy,
        prefix_caching=options.enable_prefix_caching,
        async_scheduling=options.async_scheduling,
        speculative=speculative,
    )
