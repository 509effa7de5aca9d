"""``Engine`` is everything between a model folder and tokens.

Its constructor reads the model, makes a ``Worker``, whose constructor lists the stages of a start,
and hands the parts to ``EngineLoop``, whose ``step`` runs requests.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from threading import local
from typing import Any

import torch
from msgspec import to_builtins

from .. import ops
from ..config import EngineDeadError, EngineOptions, Hardware, UserError
from ..config.device_table import copy_ceiling, shipped
from ..graph_capture import Graphs, MemoryReport
from ..model_executor.expert_load import Load, describe_load, read_load
from ..model_executor.loader import Model
from ..model_executor.parallel import check_one_rank
from .core.loop import EngineCore, make_core
from .frontend.generation_config import find_eos_token_ids, within_vocabulary
from .frontend.inputs import input_processor, read_tokenizer
from .frontend.loop import EngineLoop
from .grammar.checks import GrammarChecks, grammar_setup
from .grammar.matchers import Grammars
from .ranks.executor import StartedRanks
from .ranks.leader import Leader
from .ranks.start import OneRank, on_all, start_ranks
from .worker.hardware import detect_hardware
from .worker.memory import bind_kv_caches, report_kv_groups
from .worker.progress import Progress, show_progress
from .worker.sleep import PARTS, Sleeping, drop_weights, read_weights, restore_weights
from .worker.startup import capture, load_beside, read_model
from .worker.startup_report import StartupReport
from .worker.worker import Worker


def _end_ranks(ranks: OneRank | Leader, graphs: Graphs) -> None:
    """End the other ranks.  Graphs go first: NCCL does not end while one holds its kernels."""
    if isinstance(ranks, Leader):
        graphs.release()
    ranks.stop()


class Engine(EngineLoop):
    """A model that is ready to serve: frontend, core and worker in one process, which is rank 0;
    the workers of other ranks have a process each.

    Args:
        options: see ``EngineOptions``.
        hardware: what to run on; detected when None.
        others: the other ranks, if they have been started.

    Raises:
        UserError: the model folder or an option is bad, the model does not fit, or another rank
            has ended.
    """

    core: EngineCore

    def __init__(
        self,
        options: EngineOptions,
        hardware: Hardware | None = None,
        others: StartedRanks | None = None,
    ) -> None:
        startup = StartupReport()
        with startup.phase("config"):
            if others is not None:
                others.take_gpu()
            hardware = hardware or detect_hardware(options.device)
            folder, spec, config = read_model(options, hardware, weights=True)
            draft = None
            if config.scheduler.speculative is not None:
                from .read_draft import read_draft_model

                draft = read_draft_model(options, config, spec, hardware)
            sizes = (spec.vocab_size, config.model.max_model_len)
            inputs = input_processor(options, *sizes, read_tokenizer(options))
            eos_token_ids = within_vocabulary(
                find_eos_token_ids(folder, inputs.tokenizer, options.generation_config),
                inputs.tokenizer,
                spec.vocab_size,
            )
        with ExitStack() as on_failure, show_progress() as progress:
            ranks = start_ranks(options, spec, hardware, others)
            on_failure.callback(ranks.stop)
            with ranks.guard():
                worker = Worker(folder, spec, config, startup, progress, ranks, draft)
                ranks.ready()
            on_failure.pop_all()
        self._ranks = ranks
        self._end_ranks = weakref.finalize(self, _end_ranks, ranks, worker.graphs)
        tokenizer_file = inputs.tokenizer_folder / "tokenizer.json"
        grammars = grammar_setup(tokenizer_file, spec.vocab_size, eos_token_ids)
        self.grammars = Grammars(grammars, config.scheduler.max_num_seqs)
        runner = on_all(ranks, worker.runner)
        if worker.draft is not None:
            from .worker.draft_model import DraftingRunner

            runner = DraftingRunner(runner, worker.draft)
        core = make_core(
            config,
            worker.num_blocks,
            worker.groups,
            runner,
            self.grammars,
            worker.reads,
            vocab_size=spec.vocab_size,
            draft=None if worker.draft is None else worker.draft.described(worker.reads.weights),
        )
        inputs = replace(inputs, grammars=GrammarChecks(grammars))
        super().__init__(core=core, inputs=inputs, eos_token_ids=eos_token_ids)
        self.spec, self.options, self.config, self.startup = spec, options, config, startup
        self.runner, self.graphs, self.dispatcher = worker.runner, worker.graphs, worker.dispatcher
        self.compiled, self.weights = worker.compiled, worker.weights
        self.buffers, self.kv_caches = worker.buffers, worker.kv_caches
        self._table, self._account, self.draft = worker.table, worker.account, worker.draft
        self._bytes_per_block = worker.bytes_per_block
        self._stream = torch.cuda.current_stream() if hardware.device == "cuda" else None
        self._prepared = local()
        self._sleeping, self._folder = Sleeping(), folder

    def report(self) -> dict[str, Any]:
        """Describe this engine as plain data: level, passes, kernel choices, times in seconds,
        graph counters and bytes of memory."""
        built = self.compiled.report
        artifact = self.compiled.artifact
        return {
            "model": self._report_model(),
            "kv_cache": self._report_kv_cache(),
            "level": self.config.compile.level,
            "num_layers": self.spec.num_layers,
            "hardware": self.config.hardware.name,
            "ranks": {
                "tensor_parallel_size": self.spec.tensor_parallel_size,
                "pipeline_parallel_size": self.spec.pipeline_parallel_size,
                "processes": self._ranks.report(),
                "peer_memory": self._ranks.peer_memory(),
                **self._report_shards(),
            },
            "passes": built.get("passes", []),
            "choices": built.get("choices", {}),
            "sampling": dict(self._table.choices),
            "tuned_us": built.get("tuned_us", {}),
            "tuned": built.get("tuned", {}),
            "tuned_experts": built.get("tuned_experts", {}),
            "expert_load": describe_load(self.expert_load()),
            "device_table": self._report_tables(),
            "pieces": {
                "steps": len(self.compiled.program.steps),
                "unique": len(built.get("pieces", {})),
            },
            "traced_whole": built.get("whole", ""),
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
            "chunks": self._report_chunks(),
            "reads": {**to_builtins(self.core.reads), "copy_tb_s": self.copy_ceiling},
            "memory": {
                **self.memory().to_json(),
                "kv_groups": report_kv_groups(
                    self.spec.cache_groups, self.core.stats(), self._bytes_per_block
                ),
            },
            **super().report(),
        }

    def _report_model(self) -> dict[str, Any]:
        precision = self.config.precision
        return {
            "name": self.options.model,
            "architecture": self.spec.architecture,
            "dtype": precision.dtype,
            "quantization": precision.quantization,
            "gathered": list(self.spec.quant.gathered if self.spec.quant else ()),
            "notes": list(self.spec.notes),
            "max_model_len": self.config.model.max_model_len,
        }

    def _report_kv_cache(self) -> dict[str, Any]:
        """The size of the KV cache, and how many requests of ``max_model_len`` fit."""
        limits, size = self.core.limits, self.config.cache.block_size
        longest, chunk = self.config.model.max_model_len, limits.longest_chunk
        each = sum(group.most_blocks(longest, chunk, size) for group in limits.groups)
        return {
            "tokens": limits.num_blocks * size,
            "block_size": size,
            "dtype": self.config.precision.kv_cache_dtype,
            "bytes": limits.num_blocks * self._bytes_per_block,
            "full_requests": limits.num_blocks / each,
        }

    def _report_shards(self) -> dict[str, Any]:
        """How many parameters of a captured model are split, by kind, and which layers are not."""
        if self.spec.captured is None or self.spec.captured.ranks == 1:
            return {}
        kinds = Counter(shard.kind for shard in self.spec.captured.shards)
        return {"split": dict(kinds), "whole": dict(self.spec.captured.unsplit)}

    def _report_chunks(self) -> dict[str, Any]:
        """The steps with decodes and prompts, by the tokens of these up to a power of two."""
        stats = self.core.stats()
        return {
            "max_step_ms": self.config.scheduler.max_step_ms,
            "steps": {str(size): count for size, count in stats.chunk_sizes.items()},
            "over": stats.num_over_bound,
        }

    def _report_tables(self) -> dict[str, Any]:
        said = ops.report_tables(torch.device(self.config.hardware.device))
        return said | {"ignored": said["ignored"] | dict(self.config.compile.ignored_tables)}

    def expert_load(self) -> Load:
        """Tokens of each expert since the start; empty without ``record_expert_load``."""
        return read_load(self.weights.result())

    @property
    def copy_ceiling(self) -> float:
        """The measured copy rate of this device in TB/s; 0 if no device table has it."""
        return copy_ceiling(self.config.hardware.name, (*self.config.compile.tables, *shipped()))

    def memory(self) -> MemoryReport:
        """Account for the device memory, with the graphs that are captured by now."""
        return self._account()

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture one graph that no step has needed yet; returns False when all are captured.
        Call it while the engine is at rest.

        Raises:
            UserError: what ended another rank.
        """
        self._ranks.check()
        if self.is_sleeping:
            return False
        if self.graphs.num_pending:
            self._ranks.capture_next()
        return self.graphs.capture_next() or (
            self.draft is not None and self.draft.graphs.capture_next()
        )

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or KV cache are not there."""
        return bool(self._sleeping.parts)

    def sleep(self, level: int = 1) -> None:
        """Free the device memory of weights, KV cache and graphs; see ``LLM.sleep``.

        Raises:
            UserError: as there.
        """
        check_one_rank(self.options, "an engine of one rank can sleep")
        if level not in (1, 2) or isinstance(level, bool):
            raise UserError(
                f"level={level!r}: expected 1 (weights are kept in the host's memory) or 2 (they "
                "are read again)"
            )
        if self.is_sleeping:
            raise UserError("sleep: the engine sleeps already; call wake_up() first")
        self.core.rest()
        copies = drop_weights(self.weights.result(), keep=level == 1)
        self._sleeping, self.core.is_sleeping = Sleeping(set(PARTS), level == 2, copies), True
        self.graphs.forget()
        self.kv_caches = bind_kv_caches(self.compiled.program, self.spec, self.config, 1)
        if self.draft is not None:
            self.draft.sleep(keep=level == 1)
        if self._stream is not None:
            torch.cuda.empty_cache()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Bring back what ``sleep`` has freed, or a part of it; see ``LLM.wake_up``.

        Raises:
            UserError: as there.
        """
        asleep, wanted = self._sleeping, set(PARTS if tags is None else tags)
        if isinstance(tags, str) or not wanted <= set(PARTS):
            raise UserError(f"tags={tags!r}: expected a list of {', '.join(PARTS)}")
        program = self.compiled.program
        if "weights" in wanted & asleep.parts:
            if asleep.reads:
                read_weights(self.weights.result(), program, self._load)
            else:
                restore_weights(asleep.copies)
            if self.draft is not None:
                self.draft.wake_weights()
            asleep.parts.remove("weights")
        if "kv_cache" in wanted & asleep.parts:
            blocks = self.core.limits.num_blocks
            self.kv_caches = bind_kv_caches(program, self.spec, self.config, blocks)
            if self.draft is not None:
                self.draft.bind(blocks)
            asleep.parts.remove("kv_cache")
        if self.core.is_sleeping and not asleep.parts:
            capture(self.graphs, self.config, Progress())
            if self.draft is not None:
                self.draft.capture(Progress())
            self.core.is_sleeping = False

    def _load(self) -> Model:
        start = StartupReport()
        with load_beside(self._folder, self.spec, self.config, start, Progress()) as model:
            return model.result()

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
        if self.inputs.grammars is not None:
            self.inputs.grammars.close()
        self._end_ranks()
        if not isinstance(closed, EngineDeadError) and hasattr(self, "graphs"):
            del self.runner, self.graphs, self.compiled, self.weights, self.kv_caches, self.buffers
            del self._account, self._table, self.dispatcher, self.draft
            gc.collect()
            if self._stream is not None:
                torch.cuda.empty_cache()
        return closed
