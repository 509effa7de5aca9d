"""Capture a program at every size, largest first into one pool, and replay it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .backend import GraphBackend, Replay
from .buffers import StepBuffers
from .dispatch import Dispatcher
from .protocol import Program, Step


@dataclass(frozen=True)
class _FullGraph:
    replay: Replay
    output: Tensor


@dataclass(frozen=True)
class _PiecewiseGraph:
    """Graphs of consecutive per-token steps, with the steps that run between them; ``env`` keeps
    the static addresses that pass from one to the next."""

    parts: tuple[Replay | Step, ...]
    env: list[Any]


@dataclass
class CapturedGraphs:
    """Every captured graph of a program."""

    program: Program
    full: dict[tuple[int, int], _FullGraph] = field(default_factory=dict)
    piecewise: dict[int, _PiecewiseGraph] = field(default_factory=dict)

    def replay_full(self, num_tokens: int, num_seqs: int) -> Tensor:
        """Replay the whole step of captured sizes; its output, valid until the next replay."""
        graph = self.full[num_tokens, num_seqs]
        graph.replay()
        return graph.output

    def replay_piecewise(self, num_tokens: int, inputs: Mapping[str, Tensor]) -> Tensor:
        """Replay the captured parts, running the others on this step's ``inputs``."""
        graph = self.piecewise[num_tokens]
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
        # What ran between the graphs is memory of its own, which must not live until the next
        # replay of this size.
        for slot in computed:
            env[slot] = None
        return output


def capture_all(
    program: Program,
    buffers: StepBuffers,
    dispatcher: Dispatcher,
    backend: GraphBackend,
    on_graph: Callable[[], None] = lambda: None,
) -> CapturedGraphs:
    """Capture all sizes of ``dispatcher``, largest first, so that smaller ones fit the memory of
    larger ones.  Each distinct step runs once at each size before it is captured: kernels compile
    and libraries set up their workspaces outside of capture.

    Args:
        on_graph: called after each captured size, for progress bars.
    """
    graphs = CapturedGraphs(program)
    for size in sorted(dispatcher.piecewise_sizes, reverse=True):
        num_seqs = min(size, buffers.max_seqs)
        inputs = buffers.dummy(num_tokens=size, num_seqs=num_seqs)
        _warm_up(program, inputs)
        graphs.piecewise[size] = _capture_piecewise(program, inputs, backend)
        on_graph()
    for num_tokens, num_seqs in sorted(dispatcher.full_sizes, reverse=True):
        inputs = buffers.dummy(num_tokens=num_tokens, num_seqs=num_seqs)
        _warm_up(program, inputs)
        graphs.full[num_tokens, num_seqs] = _capture_full(program, inputs, backend)
        on_graph()
    return graphs


def _warm_up(program: Program, inputs: Mapping[str, Tensor]) -> None:
    """Run every distinct step once.  Steps of one name do the same to values of the same shapes,
    so the outputs of the first stand for those of the others."""
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
    program: Program, inputs: Mapping[str, Tensor], backend: GraphBackend
) -> _FullGraph:
    (output,), replay = backend.capture(lambda: [program.run(inputs)])
    return _FullGraph(replay, backend.alias(output))


def _capture_piecewise(
    program: Program, inputs: Mapping[str, Tensor], backend: GraphBackend
) -> _PiecewiseGraph:
    owned = program.environment(inputs)
    static = program.environment(inputs)
    parts: list[Replay | Step] = []
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
    steps: Sequence[Step], owned: list[Any], static: list[Any], backend: GraphBackend
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
        static[slot] = backend.alias(value)
    return replay


def _runs(steps: Sequence[Step]) -> Iterator[tuple[bool, list[Step]]]:
    """Consecutive steps of the same kind."""
    run: list[Step] = []
    for step in steps:
        if run and run[-1].per_token != step.per_token:
            yield run[-1].per_token, run
            run = []
        run.append(step)
    if run:
        yield run[-1].per_token, run
