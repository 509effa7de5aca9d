"""``Engine`` is everything between a model folder and tokens.

Its constructor is the table of contents: it calls the stages in ``startup`` one after the other and
hands the parts that they make to ``EngineLoop``, whose ``step`` runs requests.
"""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager
from functools import partial
from threading import local
from typing import Any

import torch

from .. import ops
from ..config import EngineDeadError, EngineOptions, Hardware
from ..graph_capture import Dispatcher, MemoryReport
from ..model_executor.kv_cache import kv_cache_bytes_per_block
from .core.loop import EngineCore, make_core
from .frontend.inputs import input_processor
from .frontend.loop import EngineLoop
from .frontend.tokenizer import find_eos_token_ids
from .worker.graph_mode import graph_mode
from .worker.hardware import detect_hardware
from .worker.model_runner import ModelRunner
from .worker.progress import show_progress
from .worker.sampler import OpTable, Sampler
from .worker.startup import (
    account,
    bind_kv_caches,
    block_groups,
    capture,
    compile_model,
    load_beside,
    make_graphs,
    num_kv_blocks,
    outside_bytes,
    read_model,
    report_kv_groups,
    step_buffers,
    warm_up,
    weight_bytes,
)
from .worker.startup_report import StartupReport


class Engine(EngineLoop):
    """A model that is ready to serve: frontend, core and worker in one process.

    Args:
        options: see ``EngineOptions``.
        hardware: what to run on; detected when None.

    Raises:
        UserError: the model folder or an option is bad, or the model does not fit.
    """

    core: EngineCore

    def __init__(self, options: EngineOptions, hardware: Hardware | None = None) -> None:
        startup = StartupReport()
        with startup.phase("config"):
            hardware = hardware or detect_hardware(options.device)
            folder, spec, config = read_model(options, hardware)
            inputs = input_processor(config, spec.vocab_size)
            eos_token_ids = find_eos_token_ids(folder, inputs.tokenizer)
        with show_progress() as progress:
            with load_beside(folder, spec, config, startup, progress) as weights:
                compiled = compile_model(spec, config, weights, startup, progress)
            with startup.phase("warm-up"):
                mode = graph_mode(config.capture.mode, compiled.program, hardware)
                dispatcher = Dispatcher(mode, config.capture.sizes, config.scheduler.max_num_seqs)
                buffers = step_buffers(spec, config, dispatcher)
                table = OpTable(config.compile, hardware.sm)
                sampler = Sampler(table, config, spec.vocab_size)
                sampler.warm_up(spec.dtype)
                graphs = make_graphs(compiled.program, buffers, dispatcher, config)
                needs = warm_up(compiled.program, spec, config, buffers, graphs)
            with startup.phase("kv cache"):
                num_blocks = num_kv_blocks(spec, config, needs)
                self._bytes_per_block = kv_cache_bytes_per_block(
                    spec.cache_groups, config.cache.block_size
                )
                self.kv_caches = bind_kv_caches(compiled.program, spec, config, num_blocks)
                self._account = partial(
                    account,
                    hardware,
                    graphs,
                    context=outside_bytes(hardware),
                    weights=weight_bytes(weights.result()),
                    kv_cache=num_blocks * self._bytes_per_block,
                    predicted=graphs.predict_bytes(),
                )
            with startup.phase("capture"):
                capture(graphs, config, progress)
        groups = block_groups(spec.cache_groups)
        runner = ModelRunner(
            compiled.program,
            graphs,
            dispatcher,
            buffers,
            sampler,
            table,
            block_size=config.cache.block_size,
            groups=groups,
        )
        core = make_core(config, num_blocks, groups, runner)
        super().__init__(core=core, inputs=inputs, eos_token_ids=eos_token_ids)
        self.spec, self._table = spec, table
        self.options, self.config = options, config
        self.compiled, self.weights, self.buffers = compiled, weights, buffers
        self.dispatcher = dispatcher
        self.startup = startup
        self.graphs = graphs
        self._stream = torch.cuda.current_stream() if hardware.device == "cuda" else None
        self._prepared = local()

    def report(self) -> dict[str, Any]:
        """Describe this engine as plain data: level, passes, kernel choices, times in seconds,
        graph counters and bytes of memory."""
        built = self.compiled.report
        artifact = self.compiled.artifact
        return {
            "level": self.config.compile.level,
            "num_layers": self.spec.num_layers,
            "hardware": self.config.hardware.name,
            "passes": built.get("passes", []),
            "choices": built.get("choices", {}),
            "sampling": dict(self._table.choices),
            "tuned_us": built.get("tuned_us", {}),
            "tuned": built.get("tuned", {}),
            "device_table": ops.report_tables(torch.device(self.config.hardware.device)),
            "pieces": {
                "steps": len(self.compiled.program.steps),
                "unique": len(built.get("pieces", {})),
            },
            "artifact": {
                "key": artifact.manifest.key if artifact else None,
                "built": self.compiled.built,
            },
            "startup": self.startup.to_json(),
            "compile": self.compiled.seconds,
            "graphs": {
                "captured": self.graphs.num_captured,
                "pending": self.graphs.num_pending,
                "mode": self.dispatcher.mode.value,
                "outside": self.dispatcher.report_outside(),
            },
            "dispatch": self.dispatcher.report(),
            "memory": {
                **self.memory().to_json(),
                "kv_groups": report_kv_groups(
                    self.spec.cache_groups, self.core.stats(), self._bytes_per_block
                ),
            },
            **super().report(),
        }

    def memory(self) -> MemoryReport:
        """Account for the device memory, with the graphs that are captured by now."""
        return self._account()

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture one graph that no step has needed yet; returns False when all are captured.
        Call it while the engine is at rest."""
        return self.graphs.capture_next()

    def on_device(self) -> AbstractContextManager[object]:
        """The context that a thread steps in: the GPU and the stream that were current when the
        engine was made.  Each thread has its own current GPU and stream, and cuBLAS handle."""
        if self._stream is None:
            return super().on_device()
        if not hasattr(self._prepared, "handle"):
            # The cuBLAS handle is made now: CUDA forbids that while a graph is captured.
            with torch.cuda.stream(self._stream):
                self._prepared.handle = torch.cuda.current_blas_handle()
        if torch.cuda.current_stream() == self._stream:
            return super().on_device()
        return torch.cuda.stream(self._stream)

    def close(self) -> Exception:
        """Free weights, KV caches and graphs.  Returns the error that every later call raises."""
        closed = super().close()
        if not isinstance(closed, EngineDeadError) and hasattr(self, "graphs"):
            del self.graphs, self.compiled, self.weights, self.kv_caches, self.buffers
            del self._account, self._table, self.dispatcher
            gc.collect()
            if self._stream is not None:
                torch.cuda.empty_cache()
        return closed
