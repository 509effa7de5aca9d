"""The stages of a start, in order: ``read_model`` is called by ``Engine.__init__``, the others by
``Worker.__init__``.

Each takes the model's spec, the resolved configuration and what earlier stages made: weights, the
program, input buffers, graphs, KV caches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event

import torch

from ... import ops
from ...compiler.artifacts.store import artifacts_having
from ...compiler.capture.source import WEIGHTS
from ...compiler.compiled import LOOKUPS, Compiled
from ...compiler.lowering.check_kernels import check_kernels
from ...compiler.run.program import Program, eager_program
from ...config import EngineOptions, Hardware, ResolvedConfig, UserError, resolve
from ...config.speculative import HEAD_METHODS
from ...graph_capture import IN_TURN, Dispatcher, Graphs, StepBuffers, make_backend, say_free
from ...model_executor.cache_spec import LayerGroup
from ...model_executor.captured.described import nowhere
from ...model_executor.hf_config import model_folder, model_limits, read_spec
from ...model_executor.loader import Model, load_model
from ...model_executor.parallel import check_parallel
from ...model_executor.quant.scheme import FORMATS
from ...model_executor.spec import ModelSpec, quantize_online, stage_of
from ..messages.cache_group import CacheGroup
from .memory import bind_kv_caches, bytes_per_block, outside_bytes
from .missing_kernels import say_where_csrc_is_missing
from .peers import Alone, Peers
from .progress import Progress
from .source import (
    artifact_key,
    artifact_store,
    configured_store,
    drafts_on_gpu,
    find_or_compile,
    find_or_compile_drafts,
    module_arguments,
)
from .startup_report import StartupReport
from .step_arguments import schema_of, value_names
from .untuned_experts import say_how_to_tune

_log = logging.getLogger(__name__)
_CPU_CACHE_BYTES = 2**30


def read_model(
    options: EngineOptions,
    hardware: Hardware,
    *,
    weights: bool = False,
    read: Callable[..., ModelSpec] = read_spec,
) -> tuple[Path, ModelSpec, ResolvedConfig]:
    """Read the model's folder; returns it, the spec as it will run, and the resolved configuration.

    Args:
        weights: they will be loaded, if the options do not say otherwise.
        read: makes the spec of a folder.

    Raises:
        UserError: the folder or an option is bad.
    """
    lookup = partial(artifacts_having, options)
    weights = weights and options.load_format != "dummy"
    overrides = options.hf_overrides
    folder = model_folder(options.model, weights=weights, lookup=lookup, overrides=overrides)
    spec = read(folder, options.model_impl, lookup, options.tensor_parallel_size)
    config = resolve(options, hardware, model_limits(spec))
    parallel = config.parallel
    check_parallel(
        spec,
        parallel.tensor_parallel_size,
        expert_parallel=parallel.enable_expert_parallel,
        num_stages=parallel.pipeline_parallel_size,
        quantization=options.quantization,
    )
    check_kernels(dict(config.compile.kernels))
    spec = with_kept(with_options(spec, config), config)
    for note in spec.notes:
        _log.warning("%s: %s", folder, note)
    return folder, spec, config


def with_options(spec: ModelSpec, config: ResolvedConfig) -> ModelSpec:
    """A checkpoint's spec with the precision and the ranks of ``config``."""
    precision = config.precision
    spec = replace(
        spec,
        dtype_name=precision.dtype,
        fp8_kv_cache=precision.kv_cache_dtype == "fp8_e4m3",
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        expert_parallel=config.parallel.enable_expert_parallel,
        pipeline_parallel_size=config.parallel.pipeline_parallel_size,
    )
    if config.compile.record_expert_load:
        if spec.moe is None:
            raise UserError("record_expert_load: the model has no experts; leave it out")
        spec = replace(spec, moe=replace(spec.moe, record_load=True))
    if spec.quant is None and precision.quantization in FORMATS:
        return quantize_online(spec, precision.quantization)
    return spec


def with_kept(spec: ModelSpec, config: ResolvedConfig) -> ModelSpec:
    """``spec`` with the hidden states that the head of its ``speculative_config`` reads."""
    asked = config.scheduler.speculative
    if asked is None or asked.method not in HEAD_METHODS:
        return spec
    from ...model_executor.draft_checks import drafter_reader

    try:
        folder = model_folder(asked.model or config.model.path)
        head = drafter_reader(asked.method, spec)(folder).head
    except UserError as error:
        raise UserError(f"speculative_config: {error}") from error
    assert head is not None
    return replace(spec, kept=head.kept)


class Stopped(Exception):
    """Ends the loading of weights that nobody waits for any more."""


@contextmanager
def load_beside(
    folder: Path,
    spec: ModelSpec,
    config: ResolvedConfig,
    startup: StartupReport,
    progress: Progress,
    rank: int = 0,
    load: Callable[..., Model] = load_model,
) -> Iterator[Future[Model]]:
    """Load the model, or one rank's part of it, in a thread while the block runs; an error in the
    block stops the loading.  ``load`` is called as ``load_model``."""
    stop = Event()

    @contextmanager
    def bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
        with progress.bar(label, total) as advance:

            def checked(count: int) -> None:
                if stop.is_set():
                    raise Stopped
                advance(count)

            yield checked

    def loaded() -> Model:
        with startup.phase("weights", beside=True):
            return load(
                spec,
                folder,
                device,
                load_format=config.model.load_format,
                seed=config.model.seed,
                progress=bar,
                rank=rank,
                lookup=configured_store(config.store).having if config.store.enabled else nowhere,
            )

    device = config.hardware.device
    current = torch.cuda.current_device() if device == "cuda" else 0

    def on_own_gpu() -> None:
        if device == "cuda":  # a thread begins on GPU 0, whatever its maker's is
            torch.cuda.set_device(current)

    with ThreadPoolExecutor(1, thread_name_prefix="weights", initializer=on_own_gpu) as pool:
        try:
            yield pool.submit(loaded)
        except BaseException:
            stop.set()
            raise


def compile_model(
    spec: ModelSpec,
    config: ResolvedConfig,
    weights: Future[Model],
    startup: StartupReport,
    progress: Progress,
    peers: Peers | None = None,
) -> Compiled:
    """Make the model a program with its weights bound.  The program is loaded or compiled while
    the weights are read; at ``-O0`` it is the model as it is.  Of the ranks of a pipeline stage on
    one host, one compiles."""
    peers = peers or Alone()
    peers.agree(lambda number: artifact_key(stage_of(spec, number), config))
    spec = stage_of(spec, peers.rank // spec.tensor_parallel_size)
    if not config.compile.trace:
        arguments = partial(module_arguments, spec=spec)
        return Compiled(eager_program(weights.result(), arguments, value_names(spec)))

    def on_phase(phase: str) -> None:
        if weights.done():
            weights.result()  # a bad checkpoint ends the start now, not when compilation is done
        peers.check()
        say(phase)

    with (
        startup.phase("compile"),
        peers.store(config.store) as store,
        progress.status("Compiling", quiet=LOOKUPS) as say,
    ):
        # -O3 measures kernels, so the weights are loaded first and the device is idle.
        before_build = weights.result if config.compile.tune else lambda: None
        compiled = find_or_compile(
            spec,
            config,
            store,
            require=config.store.require or not peers.compiles,
            before_build=before_build,
            on_phase=on_phase,
        )
        ops.KERNELS.sealed = config.store.require
        assert compiled.artifact is not None
        peers.share(compiled.artifact)
        if drafts_on_gpu(spec, config):
            _load_drafts(spec, config, on_phase)
    say_where_csrc_is_missing(config.hardware)
    if peers.rank == 0:
        say_how_to_tune(spec, config)
    with startup.phase("wait for weights"):
        model = weights.result()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    compiled.program.bind({WEIGHTS + name: tensor for name, tensor in tensors})
    compiled.program.check_bound(WEIGHTS)
    return compiled


def _load_drafts(spec: ModelSpec, config: ResolvedConfig, on_phase: Callable[[str], None]) -> None:
    """Load or compile the kernels of drafts; of several ranks on one host that share a store, one
    compiles."""
    require = config.store.require
    with artifact_store(config.store) as store:
        drafts = find_or_compile_drafts(spec, config, store, require=require, on_phase=on_phase)
    if drafts.built:
        seconds = sum(drafts.seconds.values())
        _log.info("the kernels of drafts were in no store: compiled in %.1f s", seconds)


def block_groups(groups: Sequence[LayerGroup]) -> tuple[CacheGroup, ...]:
    specs = [group.spec for group in groups]
    return tuple(CacheGroup(spec.window, spec.kind.per_sequence) for spec in specs)


def step_buffers(
    spec: ModelSpec, config: ResolvedConfig, dispatcher: Dispatcher, in_turn: int = IN_TURN
) -> StepBuffers:
    """Allocate the static inputs for the largest step; ``in_turn`` as of ``StepBuffers``."""
    device = torch.device(config.hardware.device)
    max_tokens = config.scheduler.max_num_batched_tokens
    hidden = None
    if not spec.has_embedding or spec.head:
        hidden = torch.zeros((max_tokens, spec.hidden_size), dtype=spec.dtype, device=device)
    return StepBuffers(
        device,
        max_tokens=max_tokens,
        max_seqs=dispatcher.max_seqs,
        max_blocks=-(-config.model.max_model_len // config.cache.block_size),
        schema=schema_of(spec),
        hidden=hidden,
        in_turn=in_turn,
    )


def decode_buffers(spec: ModelSpec, config: ResolvedConfig) -> StepBuffers:
    """Allocate the static inputs of a token for each sequence."""
    count, device = config.scheduler.max_num_seqs, torch.device(config.hardware.device)
    hidden = torch.zeros((count, spec.hidden_size), dtype=spec.dtype, device=device)
    return StepBuffers(
        device,
        max_tokens=count,
        max_seqs=count,
        max_blocks=-(-config.model.max_model_len // config.cache.block_size),
        schema=schema_of(spec),
        hidden=hidden if spec.head else None,
    )


@dataclass(frozen=True)
class Needs:
    """Bytes of device memory that steps and graphs will take beyond what is in use."""

    activations: int = 0
    graphs: int = 0


def sum_of(needs: Sequence[Needs]) -> Needs:
    """Programs that run one behind the other need this together."""
    activations = max(each.activations for each in needs)
    return Needs(activations, sum(each.graphs for each in needs))


def num_kv_blocks(
    spec: ModelSpec,
    config: ResolvedConfig,
    needs: Needs,
    groups: Sequence[CacheGroup],
    beside: int = 0,
) -> int:
    """The number of KV blocks: as the options say, else as many as fit beside ``needs`` and a full
    batch can use.

    Args:
        groups: the whole model's groups; ``spec`` may be a stage of it.
        beside: bytes of each block that a draft model takes.

    Raises:
        UserError: not even one block fits.
    """
    size = config.cache.block_size
    per_block = bytes_per_block(spec, size) + beside
    if config.cache.num_blocks is not None:
        return config.cache.num_blocks
    if config.cache.kv_cache_memory_bytes is not None:
        budget, source = config.cache.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    elif config.hardware.device == "cpu":
        budget, source = _CPU_CACHE_BYTES, "1 GiB of memory"
    else:
        free, total = torch.cuda.mem_get_info()
        share = config.cache.gpu_memory_utilization
        budget = int(share * total) - (total - free) - needs.activations - needs.graphs
        source = f"gpu_memory_utilization={share} of {total / 1e9:.1f} GB"
    num_blocks = budget // per_block
    if num_blocks < 1:
        raise UserError(
            f"KV cache: {source} leaves {budget} bytes, one block of {size} "
            f"tokens takes {per_block}; raise it, or use a smaller model or max_num_batched_tokens"
        )
    longest, chunk = config.model.max_model_len, config.scheduler.max_num_batched_tokens
    each = sum(group.most_blocks(longest, chunk, size) for group in groups)
    return min(num_blocks, config.scheduler.max_num_seqs * each)


def make_graphs(
    program: Program, buffers: StepBuffers, dispatcher: Dispatcher, config: ResolvedConfig
) -> Graphs:
    """Make the graphs that the dispatcher may choose; none of them is captured yet."""
    hardware = config.hardware
    device = torch.device(hardware.device)
    backend = make_backend(hardware.graphs, device) if dispatcher.num_graphs else None
    return Graphs(program, buffers, dispatcher, backend, lambda: outside_bytes(hardware))


@torch.inference_mode()
def warm_up(
    program: Program, spec: ModelSpec, config: ResolvedConfig, buffers: StepBuffers, graphs: Graphs
) -> Needs:
    """On a GPU, run the largest step and decodes and capture the largest graphs, over a KV cache of
    one block.  This measures the memory that they need, and lets kernels and libraries allocate
    what they keep for good.

    Raises:
        UserError: the device has no room for the largest step, or for a graph.
    """
    if config.hardware.device == "cpu":
        return Needs()
    bind_kv_caches(program, spec, config, 1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    most = config.scheduler.max_num_rows
    try:
        for num_tokens, num_seqs in ((buffers.max_tokens, buffers.max_seqs), (most, most), (1, 1)):
            program.run(buffers.dummy(num_tokens=num_tokens, num_seqs=num_seqs))
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"max_num_batched_tokens={buffers.max_tokens}: a step of so many finds no room beside "
            f"the weights{say_free(torch.device('cuda'))}; lower it or max_num_seqs, or use a "
            "smaller model"
        ) from error
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    graphs.capture_largest()
    torch.cuda.empty_cache()
    return Needs(peak, graphs.predict_bytes() - graphs.pool_bytes)


@torch.inference_mode()
def capture(graphs: Graphs, config: ResolvedConfig, progress: Progress) -> None:
    """Capture the largest graphs, and the others too unless capture is lazy."""
    total = graphs.num_pending + graphs.num_captured
    with progress.bar("Capturing graphs", total) as advance:
        graphs.capture_largest()
        advance(graphs.num_captured)
        while not config.capture.lazy and graphs.capture_next():
            advance(1)
