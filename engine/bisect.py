"""``fusewright bisect MODEL`` finds where a level's outputs leave those of ``-O0``.

The model runs two steps of random tokens as it is.  The traced graph, the graph after some of the
passes, the lowered graph and the compiled program then run the same steps, until one is beyond
tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..compiler.capture.source import WEIGHTS
from ..config import (
    EngineOptions,
    ResolvedConfig,
    UserError,
    block_table_of,
    slot_mapping_of,
)
from ..model_executor.kv_cache import allocate_hidden_caches, allocate_kv_caches
from ..model_executor.loader import load_model
from ..model_executor.parallel import check_one_rank
from ..model_executor.spec import ModelSpec
from .worker.hardware import detect_hardware
from .worker.source import (
    artifact_store,
    find_or_compile,
    model_source,
    module_arguments,
)
from .worker.startup import read_model
from .worker.step_arguments import cache_names, schema_of

if TYPE_CHECKING:
    from ..compiler.inspect.bisect import Culprit, Inputs, RecordedRun
    from ..passes import Rule

PROMPTS = (9, 1, 18)
"""Lengths of the first step's sequences; the second step is a token of each."""
_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.02}
_TOLERANCE_FP8 = 0.3
"""Relative errors of logits: sums of a model's roundings, which tolerant passes move."""


def default_tolerance(config: ResolvedConfig) -> float:
    precision = config.precision
    if precision.quantization != "none" or precision.kv_cache_dtype == "fp8_e4m3":
        return _TOLERANCE_FP8
    return _TOLERANCE[precision.dtype]


def bisect_model(
    options: EngineOptions,
    *,
    tolerance: float | None = None,
    rules: Sequence[Rule] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Culprit | None, float]:
    """The first place where outputs are beyond tolerance, if there is one, and the tolerance.

    Args:
        options: as for a start; its ``seed`` is that of the inputs too.
        tolerance: largest relative error of an output; by dtype if None.
        rules: the pipeline; that of the options if None.
        say: told of every run.

    Raises:
        UserError: the options are those of -O0, or of several ranks.
    """
    check_one_rank(options, "bisect runs one rank")
    from ..compiler.capture.trace import trace
    from ..compiler.capture.unroll import unroll
    from ..compiler.inspect.bisect import Culprit, RecordedRun, bisect_kernels, bisect_passes
    from ..compiler.inspect.sites import copied
    from ..compiler.lowering.lower import lower
    from ..passes import build_passes, run_passes

    hardware = detect_hardware(options.device)
    folder, spec, config = read_model(options, hardware, weights=True)
    if not config.compile.trace:
        raise UserError("bisect: compares a level with -O0; give -O1, -O2 or -O3")
    if tolerance is None:
        tolerance = default_tolerance(config)
    model = load_model(
        spec, folder, hardware.device, load_format=options.load_format, seed=options.seed
    )
    fixed = {WEIGHTS + n: t for n, t in [*model.named_parameters(), *model.named_buffers()]}
    caches, steps = inputs(spec, config, options.seed)

    def eager(values: Inputs) -> Any:
        return model(*module_arguments(values, spec))

    say("-O0")
    run = RecordedRun(fixed, caches, steps, {}, tolerance)
    run = replace(run, want=run.outputs(eager))
    source = model_source(spec, config)
    example = source.example
    traced = trace(source.model, example.args, example.named, example.dynamic)
    traced = unroll(traced, source.repeat) if source.repeat else traced
    say("trace")
    if (difference := run.of(copied(traced))) is not None:
        return Culprit("trace", "", "", "", difference), tolerance
    rules = build_passes(config.compile.passes) if rules is None else rules
    if (culprit := bisect_passes(traced, rules, run, say)) is not None:
        return culprit, tolerance
    run_passes(traced.gm, rules)
    lowered = copied(traced)
    lower(
        lowered.gm,
        hand_kernels=config.compile.hand_kernels,
        kernels=dict(config.compile.kernels),
        sm=hardware.sm,
    )
    if (culprit := bisect_kernels(traced, lowered, run, say)) is not None:
        return culprit, tolerance
    return _code(spec, config, run, say), tolerance


def _code(
    spec: ModelSpec, config: ResolvedConfig, run: RecordedRun, say: Callable[[str], None]
) -> Culprit | None:
    """The compiled program as a whole: generated code, kernels chosen by measurement."""
    from ..compiler.inspect.bisect import Culprit

    say("the compiled program")
    with artifact_store(config.store) as store:
        program = find_or_compile(spec, config, store, on_phase=lambda phase: None).program
    program.bind(run.fixed)

    def call(values: Inputs) -> Tensor:
        program.bind({name: values[name] for name in run.caches})
        return program.run({name: values[name] for name in run.steps[0]})

    difference = run.difference(call)
    return Culprit("code", "", "", "", difference) if difference else None


def inputs(
    spec: ModelSpec, config: ResolvedConfig, seed: int
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """KV caches, and the inputs of two steps: prompts of ``PROMPTS`` tokens, then a token of each.
    Token ids are random; blocks are in random order."""
    device, size = torch.device(config.hardware.device), config.cache.block_size
    gen = torch.Generator().manual_seed(seed)
    per_sequence = max(PROMPTS) // size + 1
    shape = (len(spec.cache_groups), len(PROMPTS), per_sequence)
    blocks = torch.randperm(math.prod(shape), generator=gen)
    tensors = allocate_kv_caches(spec.cache_groups, len(blocks), size, device)
    tensors += allocate_hidden_caches(spec.hidden_cache, len(spec.kept), len(blocks), size, device)
    caches = dict(zip(cache_names(spec), tensors, strict=True))

    def step(spans: Iterable[tuple[int, int]]) -> dict[str, Tensor]:
        positions = [torch.arange(first, last) for first, last in spans]
        counts = torch.tensor([0, *(len(where) for where in positions)])
        total = int(counts.sum())
        values = {
            "input_ids": torch.randint(spec.vocab_size, (total,), generator=gen),
            "positions": torch.cat(positions),
            "seq_lens": torch.tensor([int(where[-1]) + 1 for where in positions]),
            "query_start_loc": counts.cumsum(0),
        }
        for group, table in enumerate(blocks.view(shape)):
            slots = [
                row[at // size] * size + at % size for row, at in zip(table, positions, strict=True)
            ]
            values[slot_mapping_of(group)] = torch.cat(slots)
            values[block_table_of(group)] = table
        return {
            field.name: values[field.name].to(getattr(torch, field.dtype)).to(device)
            for field in schema_of(spec).program
        }

    return caches, [step((0, n) for n in PROMPTS), step((n, n + 1) for n in PROMPTS)]
