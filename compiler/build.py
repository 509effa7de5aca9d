"""``build()`` makes an artifact's files from a model: the ordered list of what the compiler does.

It is imported only when something must be compiled: it brings Dynamo, sympy and the passes along.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import ops
from ..config import CompileConfig, UserError
from ..config.device_table import Weight
from ..ops.core.device_table import gpu_of
from ..passes import (
    JOIN,
    RAISE,
    PassReport,
    Rule,
    Subgraph,
    build_passes,
    check_references,
    check_required,
    digest,
    run_passes,
)
from .artifacts.key import Wanted
from .build_kernels import as_json, kernel_files
from .capture.dispatch import trace_by_dispatch
from .capture.source import Source
from .capture.trace import Traced, TraceError, check_sizes, trace
from .capture.unroll import in_all_layers, unroll
from .emit.constants import Constants, take_constants
from .emit.direct import emit_direct
from .emit.kernels import outside_variants, program_variants
from .emit.make_plan import limit_ranges, make_plan
from .emit.pieces import PieceCode, choose_emitter, emit
from .lowering.check_kernels import called, check_used
from .lowering.lower import lower
from .lowering.partition import Region, partition
from .lowering.search import Found, table_here
from .lowering.tune import Tuner
from .lowering.tune_experts import ExpertMeasure, tune_for
from .lowering.tune_library import algorithms_of, tune_weights, weights_of
from .probes import check_probes
from .record import Record
from .run.load import PLAN, TABLE, piece_file
from .run.plan import Plan
from .timer import Timer

_log = logging.getLogger(__name__)
_COMPILED: dict[str, PieceCode] = {}
"""Inductor's code of this process's pieces: levels and passes that are compared share most."""


@dataclass(frozen=True)
class Lowered:
    """A lowered model: everything that is known of it before code is generated.

    Attributes:
        traced: the lowered graph.
        regions: the regions of that graph, one for each step of ``plan``.
        plan, pieces: what runs, and the distinct pieces by digest.
        constants: the pieces of what runs once, by digest.
        reports, choices, tuned_us: what the passes and the choice of kernels report.
        graph: digest of the graph as it was traced.
        weights: the linear layers that a cuBLASLt algorithm can serve.
    """

    traced: Traced
    regions: list[Region]
    plan: Plan
    pieces: Mapping[str, Subgraph]
    constants: Mapping[str, Subgraph]
    reports: list[PassReport]
    choices: Mapping[str, int]
    tuned_us: Mapping[str, Mapping[str, Mapping[int, float]]]
    graph: str
    weights: Sequence[Weight]


def lower_model(
    source: Source,
    config: CompileConfig,
    *,
    sm: int,
    timer: Timer,
    record: Record,
    csrc: bool | None = None,
    tuner: Tuner | None = None,
) -> Lowered:
    """The first half of ``build()``: trace, rewrite, split, choose kernels, find equal pieces.
    For ``csrc`` and ``tuner`` see ``lower``; nothing is measured without a ``tuner``."""
    traced, reports, graph = rewritten(source, config, timer, record)
    check_required(reports, config.required)
    if config.verify:
        with timer.phase("references"):
            check_references(traced.gm)
        with timer.phase("probes"):
            check_probes(tuple(config.passes))
    with timer.phase("constants"):
        traced, constants = take_constants(traced) if source.why else (traced, Constants())
    with timer.phase("partition"):
        regions = partition(traced.gm)
    with timer.phase("lower"):
        weights = weights_of(traced.gm.graph)
        choices = lower(
            traced.gm,
            hand_kernels=config.hand_kernels,
            kernels=dict(config.kernels),
            sm=sm,
            csrc=csrc,
            tuner=tuner,
        )
        check_used(config.named_kernels, called(choices, outside_ops(source)))
    with timer.phase("dedupe"):
        plan, pieces = make_plan(traced, regions)
        plan = replace(plan, constants=constants.steps)
    record.graph("lowered", traced)
    measured = tuner.measured if tuner else {}
    return Lowered(
        *(traced, regions, plan, pieces, constants.pieces),
        *(reports, choices, measured, graph, weights),
    )


def rewritten(
    source: Source, config: CompileConfig, timer: Timer, record: Record
) -> tuple[Traced, list[PassReport], str]:
    """A model's graph behind the passes of a level, before kernels are chosen; their reports, and
    the digest of the graph that the level's own passes began with."""

    def run(traced: Traced, passes: Sequence[Rule]) -> list[PassReport]:
        with timer.phase("passes"):
            return run_passes(
                traced.gm,
                passes,
                verify=config.verify,
                on_pass=lambda name, gm: record.graph(f"after {name}", traced),
            )

    reports: list[PassReport] = []
    try:
        with timer.phase("trace"):
            traced = _trace(source)
        if source.why:
            record.graph("captured", traced)
            reports = run(traced, RAISE)
        if source.repeat:
            with timer.phase("unroll"):
                traced = unroll(traced, source.repeat)
                reports = [in_all_layers(report, source.repeat) for report in reports]
    except TraceError as error:
        if not source.why or not source.repeat:
            raise
        _log.warning("all layers are traced: %s", error)
        whole = replace(source, repeat=None, while_traced=nullcontext, whole=str(error))
        return rewritten(whole, config, timer, record)
    record.graph("traced", traced)
    graph = digest(traced.gm)
    if config.verify:
        with timer.phase("references"):
            check_references(traced.gm, source.outside(1, 1))
    joined = JOIN if source.why and source.repeat else ()
    reports += run(traced, [*joined, *build_passes(config.passes)])
    check_sizes(traced)
    return traced, reports, graph


def _trace(source: Source) -> Traced:
    example, repeat = source.example, source.repeat
    what = source.model, example.args, example.named, example.dynamic
    if source.why is None:
        return trace(*what)

    def is_used(name: str) -> bool:
        layer = repeat.owner(name) if repeat else None
        return layer is None or repeat is None or repeat.layers[layer] == layer

    with source.while_traced():
        return trace_by_dispatch(*what, source.why, is_used)


def build(
    source: Source, config: CompileConfig, wanted: Wanted, *, timer: Timer, record: Record
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Trace, rewrite, split and lower a model, and compile its distinct pieces.

    Arguments and errors are those of ``compile()``.

    Returns:
        The artifact's files, by name, and its report.
    """
    sm, device = wanted.sm, wanted.device
    measures = config.tune and device == "cuda"
    tuner = Tuner() if measures else None
    tiles, tuned_experts, tuned = None, Found[Any, Any](), Found[Any, Any]()
    if measures and source.experts:
        with timer.phase("tune experts"):
            tiles, tuned_experts = tune_for(
                source.experts, config, ExpertMeasure, on_point=timer.share
            )
        if tiles:
            ops.take_table(table_here(how="-O3", experts=(tiles,)))
    lowered = lower_model(source, config, sm=sm, timer=timer, record=record, tuner=tuner)
    traced, plan, pieces = lowered.traced, lowered.plan, lowered.pieces
    if device == "cuda" and sm != gpu_of(torch.device("cuda"))[1]:
        _check_direct(pieces.values(), sm)
    with timer.phase("emit"):
        code = emit(
            pieces,
            tune=config.tune,
            dims=traced.dims,
            compiled=_COMPILED,
            on_piece=lambda number: timer.say(f"piece {number}"),
        )
        plan = limit_ranges(plan, code.values())
        code |= {name: emit_direct(piece, {}) for name, piece in lowered.constants.items()}
    with timer.phase("kernels"):
        variants: set[ops.Variant] = set()
        if device == "cuda":
            variants = program_variants(traced)
            variants |= outside_variants(source.outside, config, device=device, sm=sm)
        files = kernel_files(variants, sm, timer)
    files[PLAN] = as_json(plan.to_json())
    if measures:
        left = max(config.tune_seconds - timer.seconds.get("tune experts", 0.0), 0.0)
        with timer.phase("tune"):
            tuned = tune_weights(lowered.weights, seconds=left, on_point=timer.share)
        table = table_here(
            how="-O3", experts=(tiles,) if tiles else (), algorithms=algorithms_of(tuned)
        )
        if table.measured:
            files[TABLE] = table.text().encode()
    for name, piece in code.items():
        files[piece_file(name)] = piece.source.encode()
        folder = piece_file(name).rpartition("/")[0]
        files |= {f"{folder}/{kernel}": content for kernel, content in piece.files.items()}
    record.write(files, wanted.label)
    report = {
        "graph": lowered.graph,
        "whole": source.whole,
        "passes": [report.to_json() for report in lowered.reports],
        "choices": dict(lowered.choices),
        "outside": outside_ops(source),
        "pieces": {name: piece.emitter for name, piece in code.items()},
        "steps": len(plan.steps),
        "kernels": len(variants),
        "tuned_us": lowered.tuned_us,
        "tuned": tuned.to_json(),
        "tuned_experts": tuned_experts.to_json(),
        "seconds": {name: round(value, 4) for name, value in timer.seconds.items()},
    }
    return files, report


def outside_ops(source: Source) -> list[str]:
    return sorted({name for name, _ in source.outside(1, 1)})


def _check_direct(pieces: Iterable[Subgraph], sm: int) -> None:
    """Refuse pieces that need Inductor, which compiles only for the GPU that it finds."""
    for piece in pieces:
        choice = choose_emitter(piece)
        if choice.emitter != "direct":
            raise UserError(
                f"a piece of this model needs Inductor ({choice.reason}), which needs the sm_{sm} "
                "that is compiled for; compile there, or use -O2 with all its passes and kernels"
            )
