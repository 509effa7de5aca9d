"""Recompiles an engine's model with other passes.

The result has a program and graphs of its own, and shares the engine's weights, KV caches, input
buffers and sampler, so that two programs can be compared step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..compiler.compiled import Compiled
from ..config import UserError
from ..graph_capture import Dispatcher
from ..model_executor.parallel import check_one_rank
from .engine import Engine
from .worker.graph_mode import graph_mode
from .worker.model_runner import ModelRunner
from .worker.progress import Progress
from .worker.startup import compile_model, make_graphs, read_model
from .worker.startup_report import StartupReport
from .worker.step_arguments import cache_names


@dataclass(frozen=True)
class Recompiled:
    """A runner that ``engine.core.runner`` may be set to between steps, and how it was compiled."""

    runner: ModelRunner
    compiled: Compiled

    @property
    def matched(self) -> dict[str, int]:
        """Each pass that ran, and how many sites it matched."""
        return {entry["name"]: entry["matched"] for entry in self.compiled.report["passes"]}


def recompile(engine: Engine, passes: Sequence[str], progress: Progress) -> Recompiled:
    """``engine`` with ``passes`` in place of its own; nothing is captured yet.

    Raises:
        UserError: the engine's level runs no passes, it drafts, or it has several ranks.
    """
    hardware, level = engine.config.hardware, engine.config.compile
    check_one_rank(engine.options, "programs are compared on one rank")
    if engine.options.speculative_config:
        raise UserError("speculative_config: programs are compared without drafts; leave it out")
    if not level.trace:
        raise UserError(f"optimization_level={level.level}: it runs no passes; use -O1 or higher")
    options = replace(engine.options, passes=tuple(passes), disable_passes=(), require_fusion=())
    _, spec, config = read_model(options, hardware)
    compiled = compile_model(spec, config, engine.weights, StartupReport(), progress)
    program = compiled.program
    program.bind(dict(zip(cache_names(engine.spec), engine.kv_caches, strict=True)))
    mode = graph_mode(config.capture.mode, program, hardware)
    dispatcher = Dispatcher(mode, config.capture.sizes, config.scheduler.max_num_rows)
    graphs = make_graphs(program, engine.buffers, dispatcher, config)
    return Recompiled(engine.runner.with_graphs(graphs), compiled)
