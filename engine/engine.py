"""``Engine``: all between a model folder and tokens; its constructor is the table of contents."""

from __future__ import annotations

from typing import Any

from ..config import EngineOptions, Hardware
from ..graph_capture import Dispatcher
from .hardware import detect_hardware
from .loop import EngineLoop
from .runner import Runner
from .sampler import OpTable, Sampler
from .startup import (
    StartupReport,
    bind_kv_caches,
    capture,
    compile_model,
    driver_bytes,
    input_processor,
    load_weights,
    make_scheduler,
    measure_memory,
    read_model,
    size_kv_cache,
    step_buffers,
    weight_bytes,
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
            folder, spec, config = read_model(options, hardware)
            inputs = input_processor(spec, config)
        with startup.phase("weights"):
            model = load_weights(folder, spec, config)
        with startup.phase("compile"):
            compiled = compile_model(model, spec, config)
        with startup.phase("kv cache"):
            dispatcher = Dispatcher(config.capture, config.scheduler.max_num_seqs)
            buffers = step_buffers(config, dispatcher)
            size = size_kv_cache(compiled.program, spec, config, buffers, dispatcher.num_graphs)
            kv_bytes = bind_kv_caches(compiled.program, spec, config, size.num_blocks)
            memory = measure_memory(
                hardware,
                weights=weight_bytes(model),
                kv_cache=kv_bytes,
                predicted_graphs=size.graph_bytes,
            )
        with startup.phase("capture"):
            graphs, memory.graphs = capture(compiled.program, buffers, dispatcher, hardware)
        with startup.phase("warm-up"):
            table = OpTable(config.compile, hardware.sm)
            sampler = Sampler(table, config, spec.vocab_size)
            sampler.warm_up(spec.dtype)
        runner = Runner(
            compiled.program,
            graphs,
            dispatcher,
            buffers,
            sampler,
            table,
            block_size=config.cache.block_size,
        )
        scheduler = make_scheduler(config, size.num_blocks)
        super().__init__(
            scheduler=scheduler,
            runner=runner,
            inputs=inputs,
            eos_token_ids=find_eos_token_ids(folder, inputs.tokenizer),
            async_scheduling=config.scheduler.async_scheduling,
        )
        self.spec, self._table = spec, table
        self.config = config
        self.compiled = compiled
        self.dispatcher = dispatcher
        self.startup = startup
        self.memory = memory
        memory.driver = driver_bytes(hardware)

    def report(self) -> dict[str, Any]:
        """What this engine is, as plain data: level, passes, kernel choices, times in seconds,
        graph counters, bytes of memory."""
        compiled = self.compiled
        return {
            "level": self.config.compile.level,
            "num_layers": self.spec.num_layers,
            "hardware": self.config.hardware.name,
            "passes": [report.to_json() for report in compiled.reports],
            "choices": dict(compiled.choices),
            "sampling": dict(self._table.choices),
            "tuned_us": {call: dict(times) for call, times in compiled.tuned_us.items()},
            "pieces": {"steps": len(compiled.program.steps), "unique": len(compiled.pieces)},
            "timings": dict(self.startup.seconds),
            "compile": dict(compiled.seconds),
            "dispatch": self.dispatcher.report(),
            "memory": self.memory.to_json(),
            **super().report(),
        }
