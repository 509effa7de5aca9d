"""``Graphs`` captures a program at every size, the largest first into one pool, and replays it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .backend import GraphBackend, Replay, is_out_of_memory
from .buffers import StepBuffers
from .dispatch import Dispatch, Dispatcher, GraphKind
from .memory import CaptureMemoryError
from .protocol import CapturableProgram, CapturableStep

_BYTES_A_GRAPH = 133 << 10
_BYTES_A_STEP = 14 << 10
"""Device memory of an instantiated CUDA graph, and of each program step in a FULL one.  Both are
fitted to measurements on an H200 (docs/lab/engine.md)."""


@dataclass(frozen=True)
class _FullGraph:
    replay: Replay
    output: Tensor


@dataclass(frozen=True)
class _PiecewiseGraph:
    """Graphs of consecutive per-token steps, and the steps that run between them.  ``env`` holds
    the tensors at static addresses that pass from one to the next."""

    parts: tuple[Replay | CapturableStep, ...]
    env: list[Any]


@dataclass(frozen=True)
class GraphSize:
    """The sizes of one graph.  A FULL graph is for ``num_seqs`` sequences.  A piecewise one serves
    any number (0 here), since the steps that count sequences run outside of it."""

    kind: GraphKind
    num_tokens: int
    num_seqs: int


class Graphs:
    """The graphs of a program, captured at the start, at rest, or when a step first needs one.

    All share one memory pool.  The largest sizes are captured first and determine its extent;
    smaller ones fit into it, whenever they are captured.  FULL graphs come before piecewise ones:
    the logits of the former leave room in the pool for what the latter need.

    Args:
        program: bound to weights and KV caches.
        buffers: the static inputs that graphs read.
        dispatcher: says which sizes there are.
        backend: captures graphs; None where nothing is captured.
        outside_bytes: device memory in use outside of PyTorch, for the account in ``bytes``.
    """

    def __init__(
        self,
        program: CapturableProgram,
        buffers: StepBuffers,
        dispatcher: Dispatcher,
        backend: GraphBackend | None,
        outside_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self.program, self.buffers, self.dispatcher = program, buffers, dispatcher
        self._backend, self._outside_bytes = backend, outside_bytes
        self._full: dict[GraphSize, _FullGraph] = {}
        self._piecewise: dict[int, _PiecewiseGraph] = {}
        self._sizes = tuple(_largest_first(dispatcher)) if backend else ()
        self._pending = dict.fromkeys(self._sizes)
        self._warm: set[int] = set()
        self._grown = 0

    @property
    def pool_bytes(self) -> int:
        """Size of the graph pool, in bytes of PyTorch's allocator."""
        return self._backend.pool_bytes() if self._backend else 0

    @property
    def bytes(self) -> int:
        """Device memory of all captured graphs: the pool, and what the driver took beside it."""
        return self.pool_bytes + self._grown

    def predict_bytes(self) -> int:
        """Predict ``bytes`` after all captures from the pool of the largest graphs."""
        graphs = 0
        for size in self._sizes:
            if size.kind is GraphKind.FULL:
                graphs += _BYTES_A_GRAPH + _BYTES_A_STEP * len(self.program.steps)
            else:
                runs = [per_token for per_token, _ in _runs(self.program.steps)]
                graphs += _BYTES_A_GRAPH * sum(runs)
        return self.pool_bytes + graphs

    def predict_capture(self, runs: int) -> int:
        """Predict what ``capture`` takes beside the pool for so many runs of the program."""
        if not self.are_captured:
            return 0
        return _BYTES_A_GRAPH + runs * _BYTES_A_STEP * len(self.program.steps)

    @property
    def are_captured(self) -> bool:
        """Whether anything is captured at all."""
        return self._backend is not None

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def num_captured(self) -> int:
        return len(self._full) + len(self._piecewise)

    def capture_largest(self) -> None:
        """Capture the largest graph of each kind, whose memory the others share.  Called again, it
        captures them anew, for when the program was bound to other tensors."""
        self._grown = 0
        seen: set[GraphKind] = set()
        for size in self._sizes:
            if size.kind not in seen:
                seen.add(size.kind)
                self._capture(size)

    def capture_next(self) -> bool:
        """Capture the largest graph that is missing; returns False if none is."""
        size = next(iter(self._pending), None)
        if size is not None:
            self._capture(size)
        return size is not None

    def ensure(self, dispatch: Dispatch) -> None:
        """Capture the graph that ``dispatch`` replays, if it is missing.  Overwrites the static
        inputs."""
        num_seqs = dispatch.num_seqs if dispatch.kind is GraphKind.FULL else 0
        size = GraphSize(dispatch.kind, dispatch.num_tokens, num_seqs)
        if size in self._pending:
            self._capture(size)

    def _capture(self, size: GraphSize) -> None:
        """Capture one graph.  Raises CaptureMemoryError if the device has no room for it."""
        before = self._outside_bytes()
        try:
            self._run_and_capture(size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            device = self.buffers.device
            name = f"{size.kind} graph of {size.num_tokens} tokens"
            raise CaptureMemoryError(name, device) from error
        self._pending.pop(size, None)  # at the end, so that a failed one is tried again when needed
        self._grown += self._outside_bytes() - before

    def _run_and_capture(self, size: GraphSize) -> None:
        """Run each distinct step once, then capture: libraries must load their kernels and set up
        their workspaces outside of capture.  A piecewise graph has per-token steps only, which have
        already run if there is a graph of as many tokens."""
        assert self._backend is not None
        num_seqs = size.num_seqs or min(size.num_tokens, self.buffers.max_seqs)
        inputs = self.buffers.dummy(num_tokens=size.num_tokens, num_seqs=num_seqs)
        program = self.program
        if size.kind is GraphKind.FULL or size.num_tokens not in self._warm:
            _warm_up(program, inputs)
            self._warm.add(size.num_tokens)
        if size.kind is GraphKind.FULL:
            self._full[size] = _capture_full(program, inputs, self._backend)
        else:
            pieces = _capture_piecewise(program, inputs, self._backend)
            self._piecewise[size.num_tokens] = pieces

    def capture(self, fn: Callable[[], None]) -> Replay:
        """Capture what runs the program several times, into the same pool.  It has run before.

        Raises:
            CaptureMemoryError: the device has no room for it.
        """
        assert self._backend is not None

        def run() -> Sequence[Any]:
            fn()
            return []

        before = self._outside_bytes()
        try:
            _, replay = self._backend.capture(run)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise CaptureMemoryError("a graph of several runs", self.buffers.device) from error
        self._grown += self._outside_bytes() - before
        return replay

    def release(self) -> None:
        """Drop all graphs, none of which can be replayed any more."""
        self._full.clear()
        self._piecewise.clear()

    def forget(self) -> None:
        """Drop all graphs and their memory; each is captured anew when it is needed."""
        self.release()
        self._pending, self._grown = dict.fromkeys(self._sizes), 0
        if self._backend is not None:
            self._backend.renew()

    def replay_full(self, num_tokens: int, num_seqs: int) -> Tensor:
        """Replay a whole step of captured sizes.  Its output is valid until the next replay."""
        graph = self._full[GraphSize(GraphKind.FULL, num_tokens, num_seqs)]
        graph.replay()
        return graph.output

    def replay_piecewise(self, num_tokens: int, inputs: Mapping[str, Tensor]) -> Tensor:
        """Replay the captured parts, and run the steps between them on this step's ``inputs``."""
        graph = self._piecewise[num_tokens]
        env = graph.env
        self.program.rebind(env, inputs)
        computed: list[int] = []
        for part in graph.parts:
            if callable(part):
                part()
                continue
            for slot, value in zip(part.outputs, part.call(env), strict=True):
                env[slot] = value
            computed.extend(part.outputs)
        output: Tensor = env[self.program.output]
        # Steps between the graphs allocated these outputs, which must not live until the next
        # replay of this size.
        for slot in computed:
            env[slot] = None
        return output


def _largest_first(dispatcher: Dispatcher) -> Iterator[GraphSize]:
    """All graphs in the order of capture.  Those of prompts come last: they fit into the memory of
    the others, of which ``capture_largest`` takes the samples."""

    def full(sizes: Sequence[tuple[int, int]]) -> Iterator[GraphSize]:
        for num_tokens, num_seqs in sorted(sizes, reverse=True):
            yield GraphSize(GraphKind.FULL, num_tokens, num_seqs)

    yield from full(dispatcher.full_sizes)
    for size in sorted(dispatcher.piecewise_sizes, reverse=True):
        yield GraphSize(GraphKind.PIECEWISE, size, 0)
    yield from full(dispatcher.prompt_sizes)


def _warm_up(program: CapturableProgram, inputs: Mapping[str, Tensor]) -> None:
    """Run every distinct step once.  Steps with the same name do the same to values of the same
    shapes, so the outputs of the first stand for those of the others."""
    env = program.environment(inputs)
    done: dict[str, Sequence[Any]] = {}
    for step in program.steps:
        if step.name not in done:
            done[step.name] = step.call(env)
        for slot, value in zip(step.outputs, done[step.name], strict=True):
            env[slot] = value
        for slot in step.release:
            env[slot] = None


def _capture_full(
    program: CapturableProgram, inputs: Mapping[str, Tensor], backend: GraphBackend
) -> _FullGraph:
    (output,), replay = backend.capture(lambda: [program.run(inputs)])
    return _FullGraph(replay, backend.alias(output))


def _capture_piecewise(
    program: CapturableProgram, inputs: Mapping[str, Tensor], backend: GraphBackend
) -> _PiecewiseGraph:
    owned = program.environment(inputs)
    static = program.environment(inputs)
    parts: list[Replay | CapturableStep] = []
    for per_token, steps in _runs(program.steps):
        if not per_token:
            parts.extend(steps)
        else:
            parts.append(_capture_run(steps, owned, static, backend))
        for step in steps:
            for slot in step.release:
                owned[slot] = None
    return _PiecewiseGraph(tuple(parts), static)


def _capture_run(
    steps: Sequence[CapturableStep], owned: list[Any], static: list[Any], backend: GraphBackend
) -> Replay:
    slots = [slot for step in steps for slot in step.outputs]
    before = owned.copy()

    def fn() -> Sequence[Any]:
        env = before.copy()
        for step in steps:
            for slot, value in zip(step.outputs, step.call(env), strict=True):
                env[slot] = value
        return [env[slot] for slot in slots]

    outputs, replay = backend.capture(fn)
    for slot, value in zip(slots, outputs, strict=True):
        owned[slot] = value
        # A size that a piece computes is a number of this graph.
        static[slot] = backend.alias(value) if isinstance(value, Tensor) else value
    return replay


def _runs(steps: Sequence[CapturableStep]) -> Iterator[tuple[bool, list[CapturableStep]]]:
    run: list[CapturableStep] = []
    for step in steps:
        if run and run[-1].per_token != step.per_token:
            yield run[-1].per_token, run
            run = []
        run.append(step)
    if run:
        yield run[-1].per_token, run
