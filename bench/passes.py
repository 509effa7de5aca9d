"""Measures what each pass gains in a whole model: a step with it against a step without it.

One engine compiles several programs over the same weights and KV caches (``engine/recompile.py``):
two with the passes that the options resolve to, and one for each pass, without it, or with it if it
was off.  The programs take turns over the steps of the same requests.  One of the first two runs
between every two others, and each of the others is compared with the steps right before and right
after its own: contexts that grow and clocks that drift change both alike.  The difference between
the first two is noise.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..config import PASSES, EngineOptions, UserError
from ..config.gates import Measured
from ..engine.engine import Engine
from ..engine.frontend.gc_pause import gc_paused
from ..engine.llm import LLM
from ..engine.messages.requests import NewTokens
from ..engine.messages.sampling_params import SamplingParams
from ..engine.recompile import Recompiled, recompile
from ..engine.worker.hardware import detect_hardware
from ..engine.worker.progress import Progress, show_progress
from ..engine.worker.startup import read_model
from .environment import environment
from .profiling import come_to_rest
from .serving import run
from .workloads import equal

BATCHES = (1, 64, 256)
CPU_BATCHES = (1, 8)
"""A CPU would take many minutes for more, and its figures decide nothing."""
PREFILL = 2048
INPUT_LEN = 128
_BASES = ("as it is", "as it is, again")
_SETTLE = 12
"""Steps after a prefill that are not measured, because the GPU's clock differs behind one."""
_SPARE = 64
"""Room for the steps of the first sequences until the last has its first token, and for those after
the measured ones."""


@dataclass(frozen=True)
class Steps:
    """Says what is timed for every configuration: decode steps of ``batches`` sequences, and a
    prompt of ``prefill`` tokens.  A turn is ``turn`` decode steps, or one prompt.  Every pass has
    one turn in each of the ``rounds``."""

    batches: Sequence[int] = BATCHES
    prefill: int = PREFILL
    turn: int = 6
    rounds: int = 5

    @property
    def works(self) -> list[str]:
        return [*(f"decode {batch}" for batch in self.batches), f"prefill {self.prefill}"]


@dataclass(frozen=True)
class Configuration:
    """A program: the passes that it ran, how often each matched, and how long it compiled.

    ``rounds`` has, for each kind of step, a pair for each round: ms of the program's turn, and of
    the turns of ``_BASES`` beside it.
    """

    title: str
    passes: tuple[str, ...]
    matched: dict[str, int]
    compile_s: float
    rounds: dict[str, list[tuple[float, float]]]

    def ratios(self, work: str) -> list[float]:
        return [ms / beside for ms, beside in self.rounds[work]]

    @property
    def beside_ms(self) -> dict[str, float]:
        """The medians of ``_BASES``."""
        return {
            work: round(statistics.median(beside for _, beside in pairs), 4)
            for work, pairs in self.rounds.items()
        }

    @property
    def ms(self) -> dict[str, float]:
        """The medians of ``_BASES``, times the medians of the ratios."""
        return {
            work: round(beside * statistics.median(self.ratios(work)), 4)
            for work, beside in self.beside_ms.items()
        }


def measure_passes(
    options: dict[str, Any],
    names: Sequence[str] = (),
    *,
    steps: Steps | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Time ``options`` with and without each pass.

    Args:
        options: options of the engine.
        names: the passes to measure; all that match in this model if empty.
        say: told of each configuration when it is compiled and when it is measured.

    Returns:
        ``rows``, as ``Measured`` has them, and the ``configurations`` they come from, the first two
        the same.

    Raises:
        UserError: an unknown pass, one that matches nothing here, or a level without passes.
    """
    if unknown := set(names) - set(PASSES):
        raise UserError(f"pass={sorted(unknown)[0]}: unknown; known: {', '.join(PASSES)}")
    steps = steps or Steps()
    engine = _engine(options, steps)
    with show_progress() as progress:
        programs = _programs(engine, names, progress, say)
        _check_length(engine, _longest(steps, len(programs)))
        rounds = _rounds(engine, list(programs.values()), steps, progress)
    measured = [
        Configuration(
            title,
            tuple(program.matched),
            program.matched,
            round(sum(program.compiled.seconds.values()), 2),
            {work: [pairs[index] for pairs in rounds[work]] for work in rounds},
        )
        for index, (title, program) in enumerate(programs.items())
    ]
    for configuration in measured:
        figures = (f"{work} {ms:.3f} ms" for work, ms in configuration.ms.items())
        say(f"{configuration.title}: {', '.join(figures)}")
    facts = _facts(engine)
    return {"rows": [_row(measured, c, facts) for c in measured[2:]], "configurations": measured}


def _engine(options: dict[str, Any], steps: Steps) -> Engine:
    longest = max(steps.prefill + 1, _longest(steps, len(PASSES) + 2))
    longest = min(longest, max(_model_len(options), steps.prefill + 1))
    defaults: dict[str, Any] = {"max_num_seqs": max(steps.batches), "max_model_len": longest}
    if torch.cuda.is_available() and options.get("device") != "cpu":
        defaults["cudagraph_capture_sizes"] = tuple(steps.batches)
    if options.get("enable_prefix_caching") is False:
        raise UserError(
            "enable_prefix_caching=False: bench passes needs it, to skip prefills; drop it"
        )
    # A round's prompts are found in the prefix cache; those of the prefill are new each time.
    engine = LLM(**{**defaults, **options}).engine
    assert isinstance(engine, Engine)
    return engine


def fitting_prefill(options: dict[str, Any]) -> int:
    """The default number of tokens of the prompt: ``PREFILL``, or as many as the model takes with
    one token behind them."""
    return min(PREFILL, max(_model_len(options) - 1, 1))


def _model_len(options: dict[str, Any]) -> int:
    hardware = detect_hardware(options.get("device", "auto"))
    return read_model(EngineOptions(**options), hardware)[2].model.max_model_len


def _longest(steps: Steps, programs: int) -> int:
    return INPUT_LEN + _SETTLE + 2 * steps.turn * programs + _SPARE


def _check_length(engine: Engine, longest: int) -> None:
    if engine.inputs.max_model_len < longest:
        raise UserError(
            f"max_model_len={engine.inputs.max_model_len}: the decodes that are measured go up to "
            f"{longest} tokens; raise it, or measure fewer passes"
        )


def _programs(
    engine: Engine, names: Sequence[str], progress: Progress, say: Callable[[str], None]
) -> dict[str, Recompiled]:
    """The programs by title: the engine's own twice, then one for each pass that matches."""
    base = engine.config.compile.passes
    programs = {title: recompile(engine, base, progress) for title in _BASES}
    here = programs[_BASES[0]].matched
    for name in names or PASSES:
        is_on = name in base
        matches = here[name] if is_on else 1
        if matches:
            passes = [p for p in PASSES if (p in base) != (p == name)]
            program = recompile(engine, passes, progress)
            matches = matches if is_on else program.matched[name]
        if matches:
            title = f"{'without' if is_on else 'with'} {name}"
            programs[title] = program
            say(f"{title}: compiled in {sum(program.compiled.seconds.values()):.1f} s")
        elif names:
            raise UserError(f"pass={name}: it matches nothing in this model")
    if len(programs) == len(_BASES):
        raise UserError("bench passes: no pass matches anything in this model at this level")
    return programs


def _rounds(
    engine: Engine, programs: Sequence[Recompiled], steps: Steps, progress: Progress
) -> dict[str, list[list[tuple[float, float]]]]:
    """For each kind of step, a list for each round, with a pair for each program.  An extra round,
    in which graphs are captured, comes first and is dropped."""
    seed = iter(range(2**31))
    rounds: dict[str, list[list[tuple[float, float]]]] = {}
    total = (1 + steps.rounds) * len(steps.works)
    gc.collect()
    with progress.bar("Measuring", total) as advance, gc_paused(), _restored(engine):
        for work in steps.works:
            kind, _, size = work.partition(" ")
            for number in range(1 + steps.rounds):
                order = _order(len(programs), number)
                if kind == "decode":
                    times = _decode(engine, programs, order, int(size), steps.turn)
                else:
                    times = _prefill(engine, programs, order, int(size), seed)
                rounds.setdefault(work, []).append(_pairs(order, times))
                advance(1)
            del rounds[work][0]
    return rounds


@contextmanager
def _restored(engine: Engine) -> Iterator[None]:
    """Give the engine its own runner and listener back after the block, however that ends."""
    runner, on_tokens = engine.core.runner, engine.on_tokens
    try:
        yield
    finally:
        engine.core.runner, engine.on_tokens = runner, on_tokens


def _order(count: int, number: int) -> list[int]:
    """The order of a round: the programs from 2 on, with another one first in each round.  Programs
    0 and 1 alternate before, between and behind them."""
    others = [2 + (i + number) % (count - 2) for i in range(count - 2)]
    order = [0]
    for i, other in enumerate(others):
        order += [other, (i + 1) % 2]
    return order


def _pairs(order: Sequence[int], times: Sequence[float]) -> list[tuple[float, float]]:
    """For each program, the time of its turn, and the mean of the turns of 0 and 1 right before and
    behind it.  For these two, both are means over all their turns but the first and the last."""
    bases = range(0, len(order), 2)
    turns: dict[int, list[tuple[float, float]]] = {}
    for place, index in enumerate(order):
        apart = 2 if place in bases else 1
        if apart <= place < len(order) - apart:
            beside = (times[place - apart] + times[place + apart]) / 2
            turns.setdefault(index, []).append((times[place], beside))
    # With one pass each of the first two has one turn, with two passes the first has none inside.
    turns.setdefault(1, [(times[2], times[0])])
    turns.setdefault(0, [(beside, own) for own, beside in turns[1]])
    return [
        (statistics.fmean(own for own, _ in pairs), statistics.fmean(beside for _, beside in pairs))
        for _, pairs in sorted(turns.items())
    ]


def _decode(
    engine: Engine, programs: Sequence[Recompiled], order: Sequence[int], batch: int, turn: int
) -> list[float]:
    """Mean ms between the ends of two successive steps, for each turn."""
    ended: list[float] = []
    started: set[str] = set()
    num_launched = 0

    def on_tokens(tokens: NewTokens) -> None:
        ended.append(time.perf_counter())
        started.update(tokens.request_ids)

    def step(index: int) -> None:
        nonlocal num_launched
        num_launched += 1
        engine.core.runner = programs[index].runner
        for output in engine.step():
            raise UserError(f"request {output.request_id} failed: {output.error}")

    params = SamplingParams(
        temperature=0.0, max_tokens=engine.inputs.max_model_len - INPUT_LEN, ignore_eos=True
    )
    requests: list[str] = []
    engine.on_tokens = on_tokens
    with ExitStack() as stack:
        stack.callback(come_to_rest, engine, requests)
        for work in equal(batch, INPUT_LEN, 1, engine.inputs.vocab_size):
            prompt = {"prompt_token_ids": work.prompt_token_ids}
            requests.append(engine.add_request(prompt, params, final_only=True))
        while len(started) < batch:
            step(0)
        for _ in range(_SETTLE):
            step(0)
        first = num_launched
        for index in order:
            for _ in range(turn):
                step(index)
        step(0)  # so that the last of them has ended
    # A turn is timed from the end of its first step, when nothing of the turn before is left.
    begins = range(first, first + turn * len(order), turn)
    return [(ended[i + turn - 1] - ended[i]) / (turn - 1) * 1e3 for i in begins]


def _prefill(
    engine: Engine,
    programs: Sequence[Recompiled],
    order: Sequence[int],
    size: int,
    seed: Iterator[int],
) -> list[float]:
    """ms from a prompt to its first token, for each turn.  A first prompt does not count."""
    prompts = [
        equal(1, size, 1, engine.inputs.vocab_size, next(seed)) for _ in range(1 + len(order))
    ]
    times = []
    for index, prompt in zip([order[0], *order], prompts, strict=True):
        engine.core.runner = programs[index].runner
        times.append(run(engine, prompt).seconds * 1e3)
    return times[1:]


def _row(measured: list[Configuration], other: Configuration, facts: dict[str, Any]) -> Measured:
    """Noise is the difference between rounds, plus that between the two equal programs: the same
    kernels, captured twice, find their memory elsewhere."""
    how, name = other.title.split()
    on, off = other.beside_ms, other.ms
    if how == "with":
        on, off = off, on
    noise = {}
    for work in other.rounds:
        ratios = other.ratios(work)
        error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else 0.0
        apart = abs(statistics.median(measured[1].ratios(work)) - 1)
        noise[work] = round(2 * error + apart, 5)
    return Measured(name=name, **facts, on_ms=on, off_ms=off, noise=noise)


def _facts(engine: Engine) -> dict[str, Any]:
    config, spec = engine.config, engine.spec
    about = environment()
    return {
        "sm": config.hardware.sm,
        "dtype": config.precision.weights,
        "gpu": about["device"],
        "model": f"{spec.architecture}, {spec.num_layers} layers, hidden {spec.hidden_size}",
        "commit": about["commit"],
        "source": "fusewright bench passes",
    }
