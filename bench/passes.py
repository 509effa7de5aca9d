"""What each pass gains in a whole model: a step with it against a step without it.

One engine a configuration, in one process, one after the other: what the options resolve to, then
that less one pass, or, of a pass that is off, that and the pass.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..config import PASSES, UserError
from ..config.gates import Measured
from ..engine.llm import LLM
from .environment import environment
from .latency import measure_latency
from .serving import run
from .workloads import equal

BATCHES = (1, 64, 256)
PREFILL = 2048
_INPUT_LEN, _OUTPUT_LEN = 128, 65
_PREFILL_RUNS = 7


@dataclass(frozen=True)
class Steps:
    """What is timed of every configuration: decode steps of ``batches``, a prompt of ``prefill``
    tokens."""

    batches: Sequence[int] = BATCHES
    prefill: int = PREFILL
    output_len: int = _OUTPUT_LEN
    repeats: int = 2


@dataclass(frozen=True)
class Configuration:
    """One engine: the passes it ran, how often each matched, and ms of each kind of step."""

    passes: tuple[str, ...]
    matched: dict[str, int]
    ms: dict[str, float]


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
        say: told of each configuration when it is measured.

    Returns:
        ``rows``, as ``Measured`` has them, and the ``configurations`` they come from.

    Raises:
        UserError: an unknown pass, or one that matches nothing here.
    """
    if unknown := set(names) - set(PASSES):
        raise UserError(f"pass={sorted(unknown)[0]}: unknown; known: {', '.join(PASSES)}")
    steps = steps or Steps()
    facts: dict[str, Any] = {}
    base = _measure(options, None, steps, facts)
    say(_line("as it is", base))
    configurations, rows = [base], []
    for name in names or PASSES:
        is_on = name in base.passes
        if is_on and not base.matched[name]:
            if names:
                raise UserError(f"pass={name}: it matches nothing in this model")
            continue
        passes = tuple(p for p in PASSES if (p in base.passes) != (p == name))
        other = _measure(options, passes, steps, facts)
        configurations.append(other)
        say(_line(f"{'without' if is_on else 'with'} {name}", other))
        if not is_on and not other.matched[name]:
            continue
        on, off = (base, other) if is_on else (other, base)
        rows.append(Measured(name=name, **facts, on_ms=on.ms, off_ms=off.ms))
    return {"rows": rows, "configurations": configurations}


def _line(title: str, found: Configuration) -> str:
    return f"{title}: " + ", ".join(f"{work} {ms:.3f} ms" for work, ms in found.ms.items())


def _measure(
    options: dict[str, Any], passes: tuple[str, ...] | None, steps: Steps, facts: dict[str, Any]
) -> Configuration:
    """One engine, from its start to its end; ``facts`` gets what all of them share."""
    longest = max(steps.prefill + 1, _INPUT_LEN + steps.output_len)
    defaults: dict[str, Any] = {
        "enable_prefix_caching": False,
        "max_num_seqs": max(steps.batches),
        "max_model_len": longest,
        # Several engines one after the other: none may take all of the memory.
        "num_gpu_blocks_override": (max(steps.batches) + 1) * (_INPUT_LEN + steps.output_len) // 8
        + longest // 8,
    }
    if torch.cuda.is_available() and options.get("device") != "cpu":
        defaults["cudagraph_capture_sizes"] = tuple(steps.batches)
    chosen = {} if passes is None else {"passes": passes, "disable_passes": ()}
    llm = LLM(**{**defaults, **options, **chosen})
    try:
        ms = {}
        for batch in steps.batches:
            row = measure_latency(
                llm,
                batch,
                input_len=_INPUT_LEN,
                output_len=steps.output_len,
                repeats=steps.repeats,
            )
            ms[f"decode {batch}"] = row["tpot_ms"]
        prompt = equal(1, steps.prefill, 1, llm.engine.inputs.vocab_size)
        runs = [run(llm.engine, prompt).seconds for _ in range(_PREFILL_RUNS)]
        ms[f"prefill {steps.prefill}"] = round(min(runs) * 1e3, 4)
        facts |= _facts(llm)
        matched = {entry["name"]: entry["matched"] for entry in llm.report()["passes"]}
        return Configuration(tuple(matched), matched, ms)
    finally:
        del llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _facts(llm: LLM) -> dict[str, Any]:
    engine: Any = llm.engine
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
