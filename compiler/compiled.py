"""``compile()``: the table of contents of the compiler."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..config import CompileConfig
from ..passes import PassReport, Subgraph, build_passes, check_required, run_passes
from .emit import emit
from .lower import lower
from .partition import partition
from .plan import Plan, make_plan
from .program import Program, link
from .trace import trace
from .tune import Tuner


@dataclass(frozen=True)
class Example:
    """What a model is traced with: see ``trace()``."""

    args: tuple[Any, ...]
    named: Mapping[str, Tensor]
    dynamic: Mapping[str, Mapping[int, str]]


@dataclass
class Compiled:
    """A program with the account of how it came to be; at ``-O0`` there is only the program."""

    program: Program
    plan: Plan | None = None
    pieces: Mapping[str, Subgraph] = field(default_factory=dict)
    reports: list[PassReport] = field(default_factory=list)
    choices: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    tuned_us: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def compile(
    model: nn.Module,
    example: Example,
    config: CompileConfig,
    *,
    sm: int = 0,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> Compiled:
    """Compile ``model`` for every batch size: trace, rewrite, split, compile what differs, link.

    Args:
        model: the module; its weights become inputs and are bound to the program by the caller.
        example: arguments to trace with.
        config: level, passes, kernel choices.
        sm: compute capability of the target GPU, such as 90; 0 for none.
        on_phase: told the name of each phase as it starts.

    Raises:
        TraceError: the model cannot be captured as one graph.
        RequiredFusionError: a pass of ``config.required`` missed a site.
        VerificationError: a rewrite changed values beyond its tier (with ``config.verify``).
        LoweringError: an op has no implementation for its call.
    """
    seconds: dict[str, float] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        on_phase(name)
        start = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - start

    with phase("trace"):
        traced = trace(model, example.args, example.named, example.dynamic)
    with phase("passes"):
        reports = run_passes(traced.gm, build_passes(config.passes), verify=config.verify)
        check_required(reports, config.required)
    with phase("partition"):
        regions = partition(traced.gm)
    tuner = Tuner() if config.tune and sm else None
    with phase("lower"):
        choices = lower(
            traced.gm,
            hand_kernels=config.hand_kernels,
            kernels=dict(config.kernels),
            sm=sm,
            tuner=tuner,
        )
    with phase("dedupe"):
        plan, pieces = make_plan(traced, regions)
    with phase("emit"):
        callables = emit(pieces, tune=config.tune, on_piece=lambda i: on_phase(f"piece {i}"))
    program = link(plan, callables)
    return Compiled(
        program, plan, pieces, reports, choices, seconds, tuner.measured if tuner else {}
    )
