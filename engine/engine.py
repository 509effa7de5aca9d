"""``Engine``: everything between a model folder and tokens; its constructor is the table of contents."""

from __future__ import annotations

from typing import Any

import torch

from ..config import EngineOptions, Hardware, resolve
from ..graph_capture import Dispatcher, StepBuffers
from ..model_executor.hf_config import read_spec
from ..model_executor.loader import load_model
from .hardware import detect_hardware
from .kv_blocks import BlockPool
from .loop import EngineLoop
from .progress import track
from .runner import Runner
from .sampler import OpTable, Sampler
from .scheduler import Scheduler
from .startup import (
    StartupReport,
    bind_kv_caches,
    capture,
    compile_model,
    driver_bytes,
    input_processor,
    measure_memory,
    model_folder,
    model_limits,
    size_kv_cache,
    weight_bytes,
    with_dtype,
)
from .tokenizer import find_eos_token_ids


class Engine(EngineLoop):
    """A model ready to serve.

    Args:
        options: see ``EngineOptions``.
        hardware: what to run on; found out when None.

    Raises:
        UserError: the model folder or an option is bad, or the model does not fit.
    """

    def __init__(self, options: EngineOptions, hardware: Hardware | None = None) -> None:
        startup = StartupReport()
        with startup.phase("config"):
            hardware = hardware or detect_hardware(options.device)
            folder = model_folder(options.model)
            spec = read_spec(folder)
            config = resolve(options, hardware, model_limits(spec))
            spec = with_dtype(spec, config.model.dtype)
            inputs = input_processor(spec, config)
            device = torch.device(hardware.device)
            context = driver_bytes(hardware)
        with startup.phase("weights"):
            model = load_model(
                spec,
                folder,
                device,
                load_format=config.model.load_format,
                seed=config.model.seed,
            )
        with startup.phase("compile"):
            max_blocks = -(-config.model.max_model_len // config.cache.block_size)
            compiled = compile_model(model, spec, config, max_blocks)
        with startup.phase("kv cache"):
            dispatcher = Dispatcher(config.capture, config.scheduler.max_num_seqs)
            buffers = StepBuffers(
                device,
                max_tokens=config.scheduler.max_num_batched_tokens,
                max_seqs=dispatcher.max_seqs,
                max_blocks=max_blocks,
            )
            size = size_kv_cache(compiled.program, spec, config, buffers, dispatcher.num_graphs)
            kv_bytes = bind_kv_caches(compiled.program, spec, config, size.num_blocks)
        with startup.phase("capture"), track("Capturing graphs", dispatcher.num_graphs) as advance:
            before = driver_bytes(hardware)
            graphs = capture(compiled.program, buffers, dispatcher, hardware, advance)
            graph_bytes = driver_bytes(hardware) - before
        table = OpTable(
            hand_kernels=config.compile.hand_kernels,
            kernels=dict(config.compile.kernels),
            sm=hardware.sm,
        )
        sampler = Sampler(
            table,
            device,
            max_num_seqs=config.scheduler.max_num_seqs,
            vocab_size=spec.vocab_size,
            seed=config.model.seed,
        )
        runner = Runner(
            compiled.program,
            graphs,
            dispatcher,
            buffers,
            sampler,
            table,
            block_size=config.cache.block_size,
        )
        scheduler = Scheduler(
            BlockPool(size.num_blocks, config.cache.block_size),
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_model_len=config.model.max_model_len,
            enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
        )
        super().__init__(
            scheduler=scheduler,
            runner=runner,
            inputs=inputs,
            eos_token_ids=find_eos_token_ids(folder, inputs.tokenizer),
            async_scheduling=config.scheduler.async_scheduling,
        )
        self.spec = spec
        self.config = config
        self.compiled = compiled
        self.dispatcher = dispatcher
        self.startup = startup
        self.memory = measure_memory(
            hardware,
            context=context,
            weights=weight_bytes(model),
            kv_cache=kv_bytes,
            graphs=graph_bytes,
            predicted=size.graph_bytes,
        )

    def report(self) -> dict[str, Any]:
        """What this engine is, as plain data: level, passes, kernel choices, times in seconds,
        graph counters, bytes of memory."""
        compiled = self.compiled
        return {
            "level": self.config.compile.level,
            "hardware": self.config.hardware.name,
            "passes": [report.to_json() for report in compiled.reports],
            "choices": dict(compiled.choices),
            "pieces": {"steps": len(compiled.program.steps), "unique": len(compiled.pieces)},
            "timings": dict(self.startup.seconds),
            "compile": dict(compiled.seconds),
            "dispatch": self.dispatcher.report(),
            "memory": self.memory.to_json(),
            "num_kv_blocks": self.scheduler.pool.num_blocks,
        }
