"""A draft model: a smaller model of the same vocabulary, or a head that reads hidden states of the
target, which guesses what the target will sample.

It has weights, a program, graphs and input buffers of its own.  Its KV cache lies beside the
target's under the same block ids: it reads the block tables of the target's layers that keep all
tokens.  So a prefix that is found by key, and a block that changes hands, are the same for both.
It runs whole on rank 0, whatever the ranks of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs
from torch import Tensor, UntypedStorage

from ...compiler.run.program import Program
from ...config import ResolvedConfig
from ...graph_capture import IN_TURN, Dispatcher, Graphs
from ...model_executor.kv_cache import kv_cache_bytes_per_block
from ...model_executor.loader import Model, load_model
from ...model_executor.spec import ModelSpec
from ..messages.cache_group import CacheGroup
from ..messages.draft_run import DraftRun
from ..messages.step import Batch, DraftPasses, Ints, NewSequence, PendingStep, Runner
from .drafts.draft_sampler import DraftSampler, HeadSampler
from .drafts.head_runner import DraftRunner, HeadRunner
from .drafts.pass_sizes import PassSizes, up_to
from .drafts.passes import PassRunner
from .graph_mode import graph_mode
from .memory import bind_kv_caches
from .model_runner import BlockTables, LaunchedStep, ModelRunner
from .progress import Progress
from .sampling.op_table import OpTable
from .sleep import drop_weights, read_weights, restore_weights
from .startup import (
    Needs,
    block_groups,
    capture,
    compile_model,
    decode_buffers,
    load_beside,
    make_graphs,
    step_buffers,
    warm_up,
)
from .startup_report import StartupReport
from .step_arguments import FED, hidden_cache_names
from .weight_bytes import weight_bytes

_BATCHES = 2
"""Batches of a step that the host writes to the same inputs: ``reading`` and ``fresh``."""


@dataclass(frozen=True)
class DraftParts:
    """A draft model as ``read_model`` returns it, and the number of tokens that it drafts."""

    folder: Path
    spec: ModelSpec
    config: ResolvedConfig
    most: int
    """Drafts of a sequence in a step."""


@dataclass(frozen=True)
class Target:
    """The model that is drafted for: its folder, its spec as a whole, and what is ready of it."""

    folder: Path
    spec: ModelSpec
    weights: Model
    program: Program

    def kept(self) -> list[Tensor]:
        """The caches of its hidden states."""
        return [self.program.bound(name) for name in hidden_cache_names(self.spec)]


class SharedTables(BlockTables):
    """The block tables of a draft model's groups: all are that of one group of the target's."""

    def __init__(self, target: BlockTables, group: int, groups: Sequence[CacheGroup]) -> None:
        max_seqs, _, max_blocks = target.rows.shape
        shape = (max_seqs, len(groups), max_blocks)
        self.rows = np.broadcast_to(target.rows[:, group : group + 1], shape)
        self.block_size, self._groups, self._target = target.block_size, groups, target

    def update(self, batch: Batch) -> None:
        self._target.update(batch)


class DraftModel:
    """A draft model that is ready to run; its stages are called by ``Worker``, in order.

    Args:
        target: its weights and its program are ready.
    """

    def __init__(
        self,
        parts: DraftParts,
        target: Target,
        startup: StartupReport,
        progress: Progress,
    ) -> None:
        self._parts, spec, config = parts, parts.spec, parts.config
        hardware = config.hardware
        group = target.spec.whole_group
        assert group is not None, "check_drafter has looked for it"
        self._group, self._failure, self._target = group, "", target
        with startup.phase("draft model"):
            beside = self._load_beside(startup, progress)
            with beside as self._weights:
                self._compiled = compile_model(spec, config, self._weights, startup, progress)
            program = self._compiled.program
            mode = graph_mode(config.capture.mode, program, hardware)
            dispatcher = Dispatcher(mode, config.capture.sizes, config.scheduler.max_num_rows)
            self._table = OpTable(config.compile, hardware.sm)
            self._sampler, self._fed = self._make_sampler(), self._bind_fed()
            self._sampler.warm_up(spec.dtype)
            buffers = step_buffers(spec, config, dispatcher, _BATCHES * IN_TURN)
            self.graphs: Graphs = make_graphs(program, buffers, dispatcher, config)
            needs = warm_up(program, spec, config, buffers, self.graphs)
            sizes = up_to(config.scheduler.max_num_seqs, dispatcher.decode_sizes)
            self._sizes = PassSizes(sizes, parts.most, self.graphs.predict_capture)
            self.needs = Needs(needs.activations, needs.graphs + self._sizes.most_bytes)
        self._runner: DraftRunner | None = None
        self._passes: PassRunner | None = None
        self.kv_caches: list[Tensor] = []
        self._epoch = 0
        self._copies: list[tuple[UntypedStorage, Tensor]] = []
        self._reads = False

    def _load_beside(
        self, startup: StartupReport, progress: Progress
    ) -> AbstractContextManager[Future[Model]]:
        parts, target = self._parts, self._target
        load: Callable[..., Model] = load_model
        if parts.spec.head:
            from ...model_executor.heads.load import load_head

            load = partial(load_head, target=target.weights, target_folder=target.folder)
        return load_beside(parts.folder, parts.spec, parts.config, startup, progress, load=load)

    def _make_sampler(self) -> DraftSampler:
        config, vocab_size = self._parts.config, self._parts.spec.vocab_size
        if self._parts.spec.head:
            head: Any = self.weights
            return HeadSampler(self._table, config, vocab_size, head.target_ids)
        return DraftSampler(self._table, config, vocab_size)

    def _bind_fed(self) -> Tensor | None:
        """Where a head keeps its own last hidden state of each slot."""
        spec, config = self._parts.spec, self._parts.config
        if spec.head is None:
            return None
        shape = (config.scheduler.max_num_seqs, *spec.hidden_cache.block_shape(1))
        fed = torch.zeros(shape, dtype=spec.dtype, device=config.hardware.device)
        self._compiled.program.bind({FED: fed})
        return fed

    @property
    def weights(self) -> Model:
        return self._weights.result()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that are not the target's too."""
        shared = {id(tensor): tensor.nbytes for tensor in self._target.weights.parameters()}
        own = {id(tensor) for tensor in self.weights.parameters()}
        return weight_bytes(self.weights) - sum(shared[key] for key in own & set(shared))

    def described(self, target_bytes: float) -> DraftRun:
        """What the core needs to know.

        Args:
            target_bytes: bytes of weights that a step of the target reads on a rank.
        """
        config = self._parts.config
        return DraftRun(
            run=self.run,
            epoch=lambda: self._epoch,
            group=self._group,
            block_size=config.cache.block_size,
            max_model_len=config.model.max_model_len,
            max_tokens=config.scheduler.max_num_batched_tokens,
            failure=lambda: self._failure,
            share=self.weight_bytes / max(target_bytes, 1.0),
            reads_hidden=self._parts.spec.head is not None,
        )

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes that a block id takes in all layers; each group has memory of its own, since all
        use the same ids."""
        groups = self._parts.spec.cache_groups
        return sum(kv_cache_bytes_per_block([group], block_size) for group in groups)

    def bind(self, num_blocks: int) -> None:
        """Allocate ``num_blocks`` KV blocks.

        Raises:
            UserError: the device has no room for them.
        """
        parts, program = self._parts, self._compiled.program
        self._epoch += 1
        self.kv_caches = bind_kv_caches(program, parts.spec, parts.config, num_blocks, apart=True)

    def begin(self, target: ModelRunner, progress: Progress) -> None:
        """Capture graphs, and make the runner beside the target's."""
        spec, config = self._parts.spec, self._parts.config
        self.capture(progress)
        groups = block_groups(spec.cache_groups)
        make: Callable[..., DraftRunner] = DraftRunner
        if spec.head:
            head: Any = {"head": self.weights, "kept": self._target.kept, "fed": self._fed}
            make = partial(HeadRunner, **head)
        self._runner = make(
            self.graphs,
            self._sampler,
            self._table,
            block_size=config.cache.block_size,
            groups=groups,
            repeats=spec.moe is not None,
            tables=SharedTables(target.tables, self._group, groups),
        )
        assert target.sampler.drafts is not None
        behind, state = int(spec.head is not None), target.sampler.drafts
        drafting = decode_buffers(spec, config)
        inputs, sizes = target.buffers, self._sizes
        self._passes = PassRunner(
            self._runner, self._sampler, drafting, state, inputs, behind, sizes
        )
        target.draft = self.follow

    def capture(self, progress: Progress) -> None:
        """Capture the largest graphs, and the others too unless capture is lazy."""
        capture(self.graphs, self._parts.config, progress)

    def sleep(self, *, keep: bool) -> None:
        """Free the device memory of weights, KV cache and graphs; see ``Engine.sleep``.

        Args:
            keep: the host's memory keeps the weights; else they are read again.
        """
        self._copies = drop_weights(self.weights, keep=keep)
        self._reads = not keep
        self.graphs.forget()
        if self._passes is not None:
            self._passes.forget()
        self.bind(1)

    def wake_weights(self) -> None:
        """Bring the weights back."""
        if self._reads:
            read_weights(self.weights, self._compiled.program, self._load)
        else:
            restore_weights(self._copies)

    def _load(self) -> Model:
        start = StartupReport()
        with self._load_beside(start, Progress()) as model:
            return model.result()

    def admit(self, sequence: NewSequence) -> None:
        """A request begins in a slot.  It is drafted for with its own parameters, seed and
        positions, so that draft and target draw by the same noise; but without penalties, whose
        counts only the target keeps."""
        if self._failure:
            return
        plain = copy(sequence.sampling_params)
        plain.logprobs = plain.prompt_logprobs = None
        plain.repetition_penalty, plain.presence_penalty, plain.frequency_penalty = 1.0, 0.0, 0.0
        try:
            self._sampler.admit(structs.replace(sequence, sampling_params=plain))
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"

    def run(self, passes: Sequence[Batch]) -> list[Ints]:
        """Run batches one behind the other; returns the tokens of each.

        Raises:
            RuntimeError: the model cannot run any more.
        """
        if self._failure or self._runner is None:
            raise RuntimeError(self._failure or "the draft model has not been started")
        tokens: list[Ints] = []
        flying: LaunchedStep | None = None
        for batch in passes:
            launched = self._runner.launch(batch)
            if flying is not None:
                tokens.append(flying.result().token_ids)
            flying = launched
        if flying is not None:
            tokens.append(flying.result().token_ids)
        return tokens

    def follow(self, passes: DraftPasses) -> None:
        """Launch the passes behind a step of the target, and wait for nothing.  If they fail, the
        target's next step tries drafts that nobody has made; the core asks for ``failure`` then."""
        if self._failure or self._passes is None:
            return
        try:
            self._passes.run(passes)
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"


class DraftingRunner:
    """A ``Runner`` of a target that has a draft model.  An error of the latter reaches whoever asks
    it for drafts, and no step of the target.

    Args:
        runner: the target's, on all ranks.
        draft: runs on this rank alone.
    """

    def __init__(self, runner: Runner, draft: DraftModel) -> None:
        self._runner, self._draft = runner, draft

    def launch(self, batch: Batch) -> PendingStep:
        for sequence in batch.new:
            self._draft.admit(sequence)
        return self._runner.launch(batch)

    def check(self) -> None:
        self._runner.check()
