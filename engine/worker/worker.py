"""``Worker`` is one rank's side of an engine: weights, program, graphs, KV caches and runner.

Its constructor is a list of stages, which are in ``startup``; every rank of a model runs the same.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...config import ResolvedConfig
from ...graph_capture import Dispatcher
from ...model_executor.spec import ModelSpec, stage_of
from .graph_mode import graph_mode
from .memory import account, bind_kv_caches, bytes_per_block, log_rows_of_drafts, outside_bytes
from .missing_kernels import say_what_tables_left_out
from .model_runner import ModelRunner
from .peers import Peers
from .progress import Progress
from .sampler import Sampler
from .sampling.op_table import OpTable
from .startup import (
    block_groups,
    capture,
    compile_model,
    load_beside,
    make_graphs,
    num_kv_blocks,
    step_buffers,
    sum_of,
    warm_up,
)
from .startup_report import StartupReport
from .weight_bytes import step_reads, weight_bytes

if TYPE_CHECKING:
    from .draft_model import DraftModel, DraftParts


class Worker:
    """A model that is ready to run batches, or the part of it that one rank holds.

    Args:
        folder, spec, config: what ``read_model`` returned.
        peers: the other ranks.
        draft: the draft model, on rank 0.

    Raises:
        UserError: the checkpoint is bad, or the model does not fit.
    """

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        config: ResolvedConfig,
        startup: StartupReport,
        progress: Progress,
        peers: Peers,
        draft: DraftParts | None = None,
    ) -> None:
        hardware = config.hardware
        whole, spec = spec, stage_of(spec, peers.rank // spec.tensor_parallel_size)
        self.groups = block_groups(whole.cache_groups)
        with load_beside(folder, whole, config, startup, progress, peers.rank) as self.weights:
            self.compiled = compile_model(whole, config, self.weights, startup, progress, peers)
        if peers.rank == 0:
            say_what_tables_left_out()
        self.draft: DraftModel | None = None
        if draft is not None:
            from .draft_model import DraftModel, Target

            target = Target(folder, whole, self.weights.result(), self.compiled.program)
            self.draft = DraftModel(draft, target, startup, progress)
        ranks = peers.meet()
        with startup.phase("warm-up"):
            program = self.compiled.program
            mode = graph_mode(config.capture.mode, program, hardware)
            self.dispatcher = Dispatcher(mode, config.capture.sizes, config.scheduler.max_num_rows)
            self.buffers = step_buffers(spec, config, self.dispatcher)
            if peers.rank == 0:
                log_rows_of_drafts(config, spec, self.buffers)
            self.table = OpTable(config.compile, hardware.sm)
            sampler = Sampler(self.table, config, spec.vocab_size)
            sampler.warm_up(spec.dtype)
            self.graphs = make_graphs(program, self.buffers, self.dispatcher, config)
            needs = warm_up(program, spec, config, self.buffers, self.graphs)
        with startup.phase("kv cache"):
            size, drafts = config.cache.block_size, [self.draft] if self.draft else []
            needs = sum_of([needs, *(each.needs for each in drafts)])
            beside = sum(each.bytes_per_block(size) for each in drafts)
            blocks = num_kv_blocks(spec, config, needs, self.groups, beside)
            self.num_blocks = blocks if ranks is None else ranks.least(blocks)
            self.bytes_per_block = bytes_per_block(spec, size) + beside
            self.kv_caches = bind_kv_caches(program, spec, config, self.num_blocks)
            for each in drafts:
                each.bind(self.num_blocks)
            graphs = [self.graphs, *(each.graphs for each in drafts)]
            self.account = partial(
                account,
                hardware,
                graphs,
                context=outside_bytes(hardware),
                weights=weight_bytes(self.weights.result())
                + sum(each.weight_bytes for each in drafts),
                kv_cache=self.num_blocks * self.bytes_per_block,
                predicted=sum(each.predict_bytes() for each in graphs),
            )
        with startup.phase("capture"):
            capture(self.graphs, config, progress)
        self.reads = step_reads(self.weights.result(), spec, config)
        self.runner = ModelRunner(
            self.graphs,
            sampler,
            self.table,
            block_size=config.cache.block_size,
            groups=self.groups,
            # A state for a whole sequence must not be updated twice.
            repeats=spec.moe is not None and not any(g.per_sequence for g in self.groups),
            ranks=ranks,
        )
        if self.draft is not None:
            self.draft.begin(self.runner, progress)
