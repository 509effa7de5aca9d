"""The stages of a start, in the order in which ``Engine.__init__`` calls them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..compiler import (
    WEIGHTS,
    Compiled,
    Example,
    Program,
    check_kernels,
    compile,
    eager_program,
)
from ..config import (
    EngineOptions,
    Hardware,
    ModelLimits,
    ResolvedConfig,
    UserError,
    resolve,
)
from ..graph_capture import (
    CapturedGraphs,
    Dispatcher,
    MemoryReport,
    StepBuffers,
    capture_all,
    make_backend,
)
from ..model_executor.attention import AttentionInputs
from ..model_executor.hf_config import read_spec
from ..model_executor.kv_cache import allocate_kv_caches, kv_cache_bytes_per_block
from ..model_executor.loader import load_model
from ..model_executor.models.decoder import DecoderModel
from ..model_executor.spec import ModelSpec
from .inputs import InputProcessor
from .kv_blocks import BlockPool
from .progress import status, track
from .scheduler import Scheduler
from .tokenizer import Tokenizer

_STEP_INPUTS = ("input_ids", "positions", "slot_mapping")
_ATTENTION_INPUTS = AttentionInputs._fields
_CPU_CACHE_BYTES = 2**30
_GRAPH_BYTES_FIXED = 96 * 2**20
_GRAPH_BYTES_PER_LAYER = 216 * 2**10
"""Device memory of captured graphs, once and for each graph's layer: fitted to one H200, see
bench/NOTES.md."""


@dataclass
class StartupReport:
    """How long each phase took, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def model_folder(model: str) -> Path:
    """The folder of ``model``: "abacus" is the bundled one."""
    if model == "abacus" and not Path(model).is_dir():
        from ..model_executor.abacus import FOLDER

        return Path(FOLDER)
    return Path(model)


def kv_cache_name(layer: int) -> str:
    return f"kv_cache/{layer}"


def _module_arguments(values: Mapping[str, Any], num_layers: int) -> tuple[Any, ...]:
    attention = AttentionInputs(*(values[name] for name in _ATTENTION_INPUTS))
    kv_caches = [values[kv_cache_name(i)] for i in range(num_layers)]
    return (*(values[name] for name in _STEP_INPUTS), attention, kv_caches)


def read_model(
    options: EngineOptions, hardware: Hardware
) -> tuple[Path, ModelSpec, ResolvedConfig]:
    """The model's folder, its spec in the dtype to run in, and the resolved configuration.

    Raises:
        UserError: the folder or an option is bad.
    """
    folder = model_folder(options.model)
    spec = read_spec(folder)
    limits = ModelLimits(spec.max_position_embeddings, str(spec.dtype).removeprefix("torch."))
    config = resolve(options, hardware, limits)
    check_kernels(dict(config.compile.kernels))
    return folder, replace(spec, dtype=getattr(torch, config.model.dtype)), config


def load_weights(folder: Path, spec: ModelSpec, config: ResolvedConfig) -> DecoderModel:
    """The model on the device, with the weights of ``folder`` or random ones."""
    return load_model(
        spec,
        folder,
        config.hardware.device,
        load_format=config.model.load_format,
        seed=config.model.seed,
    )


def input_processor(spec: ModelSpec, config: ResolvedConfig) -> InputProcessor:
    """The prompt side of the engine; without a tokenizer, token-id prompts still work."""
    folder = model_folder(config.model.tokenizer)
    tokenizer = Tokenizer(folder) if (folder / "tokenizer.json").is_file() else None
    return InputProcessor(tokenizer, folder, spec.vocab_size, config.model.max_model_len)


def compile_model(model: nn.Module, spec: ModelSpec, config: ResolvedConfig) -> Compiled:
    """The model as a program with its weights bound: compiled, or at ``-O0`` as it is."""
    if not config.compile.trace:
        names = [kv_cache_name(i) for i in range(spec.num_layers)]
        program = eager_program(
            model,
            lambda values: _module_arguments(values, spec.num_layers),
            [*_STEP_INPUTS, *_ATTENTION_INPUTS, *names],
        )
        return Compiled(program)
    device = torch.device(config.hardware.device)
    example = _example(spec, config.cache.block_size, _max_blocks(config), device)
    with status("Compiling") as say:
        compiled = compile(model, example, config.compile, sm=config.hardware.sm, on_phase=say)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    compiled.program.bind({WEIGHTS + name: tensor for name, tensor in tensors})
    return compiled


def _max_blocks(config: ResolvedConfig) -> int:
    """Blocks of the longest request."""
    return -(-config.model.max_model_len // config.cache.block_size)


def step_buffers(config: ResolvedConfig, dispatcher: Dispatcher) -> StepBuffers:
    """The static inputs, for the largest step."""
    return StepBuffers(
        torch.device(config.hardware.device),
        max_tokens=config.scheduler.max_num_batched_tokens,
        max_seqs=dispatcher.max_seqs,
        max_blocks=_max_blocks(config),
    )


def make_scheduler(config: ResolvedConfig, num_blocks: int) -> Scheduler:
    """The scheduler over ``num_blocks`` KV blocks."""
    return Scheduler(
        BlockPool(num_blocks, config.cache.block_size),
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=config.model.max_model_len,
        enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
    )


def _example(spec: ModelSpec, block_size: int, max_blocks: int, device: torch.device) -> Example:
    """Example inputs for tracing; sizes that count different things differ."""
    num_tokens, num_seqs, num_blocks = 37, 3, 5
    buffers = StepBuffers(device, max_tokens=num_tokens, max_seqs=num_seqs, max_blocks=max_blocks)
    named = buffers.views(num_tokens=num_tokens, num_seqs=num_seqs)
    dynamic = {name: {0: "num_tokens"} for name in _STEP_INPUTS}
    dynamic |= {name: {0: "num_seqs"} for name in ("block_table", "seq_lens")}
    dynamic["query_start_loc"] = {0: "num_seqs_plus_1"}
    for i, cache in enumerate(allocate_kv_caches(spec, num_blocks, block_size, spec.dtype, device)):
        named[kv_cache_name(i)] = cache
        dynamic[kv_cache_name(i)] = {0: "num_blocks"}
    return Example(_module_arguments(named, spec.num_layers), named, dynamic)


def bind_kv_caches(
    program: Program, spec: ModelSpec, config: ResolvedConfig, num_blocks: int
) -> int:
    """Allocate ``num_blocks`` in every layer, fix them in the program; their bytes.

    Raises:
        UserError: the device has no room for them.
    """
    size = config.cache.block_size
    device = torch.device(config.hardware.device)
    try:
        caches = allocate_kv_caches(spec, num_blocks, size, spec.dtype, device)
    except torch.OutOfMemoryError as error:
        needed = num_blocks * kv_cache_bytes_per_block(spec, size, spec.dtype)
        raise UserError(
            f"KV cache: {num_blocks} blocks of {size} tokens take {needed / 1e9:.2f} GB, more than "
            "the GPU has left; lower num_gpu_blocks_override, kv_cache_memory_bytes or "
            "gpu_memory_utilization"
        ) from error
    program.bind({kv_cache_name(i): cache for i, cache in enumerate(caches)})
    return sum(cache.nbytes for cache in caches)


@dataclass(frozen=True)
class CacheSize:
    """Number of KV blocks, and the bytes that were left for graphs."""

    num_blocks: int
    graph_bytes: int


def size_kv_cache(
    program: Program,
    spec: ModelSpec,
    config: ResolvedConfig,
    buffers: StepBuffers,
    num_graphs: int,
) -> CacheSize:
    """How many KV blocks fit.

    On a GPU the largest step runs once over a cache of one block, so that its activations are
    measured; graphs are predicted from their number.

    Raises:
        UserError: not even one block fits.
    """
    per_block = kv_cache_bytes_per_block(spec, config.cache.block_size, spec.dtype)
    graph_bytes = num_graphs * spec.num_layers * _GRAPH_BYTES_PER_LAYER
    graph_bytes += _GRAPH_BYTES_FIXED if num_graphs else 0
    if config.cache.num_blocks is not None:
        return CacheSize(config.cache.num_blocks, graph_bytes)
    if config.cache.kv_cache_memory_bytes is not None:
        budget, source = config.cache.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    elif config.hardware.device == "cpu":
        budget, source = _CPU_CACHE_BYTES, "1 GiB of memory"
    else:
        activations = _measure_activations(program, spec, config, buffers)
        free, total = torch.cuda.mem_get_info()
        share = config.cache.gpu_memory_utilization
        budget = int(share * total) - (total - free) - activations - graph_bytes
        source = f"gpu_memory_utilization={share} of {total / 1e9:.1f} GB"
    num_blocks = budget // per_block
    if num_blocks < 1:
        raise UserError(
            f"KV cache: {source} leaves {budget} bytes, one block of {config.cache.block_size} "
            f"tokens takes {per_block}; raise it, or use a smaller model or max_num_batched_tokens"
        )
    most_useful = config.scheduler.max_num_seqs * buffers.max_blocks
    return CacheSize(min(num_blocks, most_useful), graph_bytes)


def _measure_activations(
    program: Program, spec: ModelSpec, config: ResolvedConfig, buffers: StepBuffers
) -> int:
    """Peak bytes of the largest step beyond what is allocated before it, on a GPU."""
    bind_kv_caches(program, spec, config, 1)
    inputs = buffers.dummy(num_tokens=buffers.max_tokens, num_seqs=buffers.max_seqs)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.inference_mode():
        program.run(inputs)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    return peak


def capture(
    program: Program, buffers: StepBuffers, dispatcher: Dispatcher, hardware: Hardware
) -> tuple[CapturedGraphs, int]:
    """Capture what the dispatcher may choose, nothing where there are no graphs; the graphs and
    the device memory that they took, in bytes."""
    if not dispatcher.num_graphs:
        return CapturedGraphs(program), 0
    before = driver_bytes(hardware)
    backend = make_backend(hardware.graphs, torch.device(hardware.device))
    with torch.inference_mode(), track("Capturing graphs", dispatcher.num_graphs) as advance:
        graphs = capture_all(program, buffers, dispatcher, backend, advance)
    return graphs, driver_bytes(hardware) - before


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the parameters and buffers, shared ones once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({t.data_ptr(): t.nbytes for t in tensors}.values())


def driver_bytes(hardware: Hardware) -> int:
    """Device memory in use as the driver counts it; 0 on a CPU."""
    if hardware.device == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def measure_memory(
    hardware: Hardware, *, weights: int, kv_cache: int, predicted_graphs: int
) -> MemoryReport:
    """The account of device memory just before graphs are captured; the capture adds its own.

    ``context`` is what is in use outside of PyTorch's allocator: the CUDA context, loaded kernels
    and library workspaces.
    """
    report = MemoryReport(weights=weights, kv_cache=kv_cache, graphs_predicted=predicted_graphs)
    if hardware.device == "cuda":
        reserved = torch.cuda.memory_reserved()
        report.context = driver_bytes(hardware) - reserved
        report.activations = reserved - weights - kv_cache
    return report
