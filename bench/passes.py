"""What each pass gains in a whole model: a step with it against a step without it.

One engine; a program for each configuration over its weights and KV caches (``engine/variant.py``):
what the options resolve to, that again, and that less one pass, or, of a pass that is off, with it.
They take turns over the steps of the same requests, forth and back, so that drift and the growth of
contexts cancel, and what the first two differ by is noise.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..config import PASSES, UserError
from ..config.gates import Measured
from ..engine.engine import Engine
from ..engine.llm import LLM
from ..engine.progress import Progress, show_progress
from ..engine.sampling_params import SamplingParams
from ..engine.scheduler import NewToken
from ..engine.variant import Variant, make_variant
from .environment import environment
from .serving import run
from .workloads import equal

BATCHES = (1, 64, 256)
PREFILL = 2048
INPUT_LEN = 128
_SPARE = 64
"""Steps of the first sequences until the last has its first token, and those after the measured."""


@dataclass(frozen=True)
class Steps:
    """What is timed of every configuration: decode steps of ``batches`` sequences, a prompt of
    ``prefill`` tokens.  A round is ``turn`` decodes of each configuration, then again in the other
    order; a prompt of each likewise."""

    batches: Sequence[int] = BATCHES
    prefill: int = PREFILL
    turn: int = 8
    rounds: int = 6

    @property
    def works(self) -> list[str]:
        return [*(f"decode {batch}" for batch in self.batches), f"prefill {self.prefill}"]


@dataclass(frozen=True)
class Configuration:
    """A program: the passes it ran, how often each matched, seconds of its compilation, and ms of
    each kind of step, a figure a round."""

    title: str
    passes: tuple[str, ...]
    matched: dict[str, int]
    compile_s: float
    rounds: dict[str, list[float]]

    @property
    def ms(self) -> dict[str, float]:
        """Medians over the rounds."""
        return {work: round(statistics.median(found), 4) for work, found in self.rounds.items()}


def measure_passes(
    options: dict[str, Any],
    names: Sequence[str] = (),
    *,
    steps: Steps | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Time ``options`` with and without each pass.

    Args:
        options: of the engine.
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
        variants = _variants(engine, names, progress, say)
        _check_length(engine, _longest(steps, len(variants)))
        rounds = _rounds(engine, list(variants.values()), steps, progress)
    found = [
        Configuration(
            title,
            tuple(variant.matched),
            variant.matched,
            round(sum(variant.compiled.seconds.values()), 2),
            {work: [figures[index] for figures in rounds[work]] for work in rounds},
        )
        for index, (title, variant) in enumerate(variants.items())
    ]
    for configuration in found:
        figures = (f"{work} {ms:.3f} ms" for work, ms in configuration.ms.items())
        say(f"{configuration.title}: {', '.join(figures)}")
    facts = _facts(engine)
    return {"rows": [_row(found, c, facts) for c in found[2:]], "configurations": found}


def _engine(options: dict[str, Any], steps: Steps) -> Engine:
    longest = max(steps.prefill + 1, _longest(steps, len(PASSES) + 2))
    defaults: dict[str, Any] = {"max_num_seqs": max(steps.batches), "max_model_len": longest}
    if torch.cuda.is_available() and options.get("device") != "cpu":
        defaults["cudagraph_capture_sizes"] = tuple(steps.batches)
    # A round's prompts are found in the prefix cache; those of the prefill are new each time.
    engine = LLM(**{**defaults, **options, "enable_prefix_caching": True}).engine
    assert isinstance(engine, Engine)
    return engine


def _longest(steps: Steps, variants: int) -> int:
    return INPUT_LEN + 2 * steps.turn * variants + _SPARE


def _check_length(engine: Engine, longest: int) -> None:
    if engine.inputs.max_model_len < longest:
        raise UserError(
            f"max_model_len={engine.inputs.max_model_len}: the decodes that are measured go up to "
            f"{longest} tokens; raise it, or measure fewer passes"
        )


def _variants(
    engine: Engine, names: Sequence[str], progress: Progress, say: Callable[[str], None]
) -> dict[str, Variant]:
    """The programs by title: the engine's own twice, then one for each pass that matches."""
    base = engine.config.compile.passes
    variants = {
        title: make_variant(engine, base, progress) for title in ("as it is", "as it is, again")
    }
    here = variants["as it is"].matched
    for name in names or PASSES:
        is_on = name in base
        matches = here[name] if is_on else 1
        if matches:
            passes = [p for p in PASSES if (p in base) != (p == name)]
            variant = make_variant(engine, passes, progress)
            matches = matches if is_on else variant.matched[name]
        if matches:
            title = f"{'without' if is_on else 'with'} {name}"
            variants[title] = variant
            say(f"{title}: compiled in {sum(variant.compiled.seconds.values()):.1f} s")
        elif names:
            raise UserError(f"pass={name}: it matches nothing in this model")
    return variants


def _rounds(
    engine: Engine, variants: Sequence[Variant], steps: Steps, progress: Progress
) -> dict[str, list[list[float]]]:
    """ms of each kind of step: a list a round, with a figure a variant.  One round more than asked
    for comes first, in which graphs are captured, and is dropped."""
    seed = iter(range(2**31))
    found: dict[str, list[list[float]]] = {}
    own = engine.runner
    total = (1 + steps.rounds) * len(steps.works)
    with progress.bar("Measuring", total) as advance, _collector_at_rest():
        for work in steps.works:
            kind, _, size = work.partition(" ")
            for _ in range(1 + steps.rounds):
                if kind == "decode":
                    figures = _decode(engine, variants, int(size), steps.turn)
                else:
                    figures = _prefill(engine, variants, int(size), seed)
                found.setdefault(work, []).append(figures)
                advance(1)
            del found[work][0]
    engine.runner = own
    return found


def _forth_and_back(count: int) -> list[int]:
    return [*range(count), *reversed(range(count))]


def _decode(engine: Engine, variants: Sequence[Variant], batch: int, turn: int) -> list[float]:
    """ms between the ends of two successive steps of one variant, mean of a round."""
    ended: list[float] = []
    started: set[str] = set()
    launched: list[int] = []

    def on_tokens(tokens: list[NewToken]) -> None:
        ended.append(time.perf_counter())
        started.update(token.request.request_id for token in tokens)

    def step(index: int) -> None:
        launched.append(index)
        engine.runner = variants[index].runner
        for output in engine.step():
            raise UserError(f"request {output.request_id} failed: {output.error}")

    params = SamplingParams(
        temperature=0.0, max_tokens=engine.inputs.max_model_len - INPUT_LEN, ignore_eos=True
    )
    requests = [
        engine.add_request({"prompt_token_ids": work.prompt_token_ids}, params, final_only=True)
        for work in equal(batch, INPUT_LEN, 1, engine.inputs.vocab_size)
    ]
    engine.on_tokens = on_tokens
    while len(started) < batch:
        step(0)
    first = len(launched)
    for index in _forth_and_back(len(variants)):
        for _ in range(turn):
            step(index)
    step(0)  # so that the last of them has ended
    engine.on_tokens = None
    for request in requests:
        engine.abort(request)
    engine.step()  # what is in flight
    times: list[list[float]] = [[] for _ in variants]
    for i in range(first + 1, first + 2 * turn * len(variants)):
        if launched[i] == launched[i - 1]:
            times[launched[i]].append(ended[i] - ended[i - 1])
    return [statistics.fmean(found) * 1e3 for found in times]


def _prefill(
    engine: Engine, variants: Sequence[Variant], size: int, seed: Iterator[int]
) -> list[float]:
    """ms from a prompt to its first token, mean of two."""
    times: list[list[float]] = [[] for _ in variants]
    for index in _forth_and_back(len(variants)):
        prompt = equal(1, size, 1, engine.inputs.vocab_size, next(seed))
        engine.runner = variants[index].runner
        times[index].append(run(engine, prompt).seconds)
    return [statistics.fmean(found) * 1e3 for found in times]


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """A garbage collection takes as long as a step."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _row(found: list[Configuration], other: Configuration, facts: dict[str, Any]) -> Measured:
    base, again = found[:2]
    how, name = other.title.split()
    on, off = (base, other) if how == "without" else (other, base)
    noise = {}
    for work in base.rounds:
        ratios = [a / b for a, b in zip(other.rounds[work], base.rounds[work], strict=True)]
        spread = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else 0.0
        noise[work] = round(max(2 * spread, abs(again.ms[work] / base.ms[work] - 1)), 5)
    return Measured(name=name, **facts, on_ms=on.ms, off_ms=off.ms, noise=noise)


def _facts(engine: Engine) -> dict[str, Any]:
    config, spec = engine.config, engine.spec
    about = environment()
    quantization = config.model.quantization
    return {
        "sm": config.hardware.sm,
        "dtype": config.model.dtype if quantization == "none" else quantization,
        "gpu": about["device"],
        "model": f"{spec.architecture}, {spec.num_layers} layers, hidden {spec.hidden_size}",
        "commit": about["commit"],
        "source": "fusewright bench passes",
    }
