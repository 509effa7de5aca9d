"""Proves a captured model at a cold start: its twin runs as it will, and as its library has it.

The twin's graph is captured, rewritten by the passes of the level and run op by op on the CPU; what
the kernels of a GPU compute is what tests of their ops hold.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ...compiler.build import rewritten
from ...compiler.capture.source import WEIGHTS, Example, Repeat, Source
from ...compiler.capture.trace import Traced
from ...compiler.record import Record
from ...compiler.timer import Timer
from ...config import TOKEN_IDS, CompileConfig, ResolvedConfig, block_table_of, slot_mapping_of
from ...model_executor.attention import AttentionInputs
from ...model_executor.captured.layers.once import layer_kinds
from ...model_executor.captured.model import CapturedModel
from ...model_executor.captured.read import why
from ...model_executor.captured.text_decoder import whole_config
from ...model_executor.captured.twin import Step, compare, make_twin
from ...model_executor.spec import ModelSpec
from ...passes import PassReport
from ...passes.raising.layer_mark import mark
from .step_arguments import KV_CACHE, example, kv_cache_name

_log = logging.getLogger(__name__)


def prove(spec: ModelSpec, config: ResolvedConfig) -> Mapping[str, Any]:
    """Compare a captured model's twin with its unmodified implementation, and return what was
    found, as JSON.

    Raises:
        ProofError: they differ; names the first module that does.
        UserError: no twin can be made.
    """
    assert spec.captured is not None
    began = time.perf_counter()
    twin = make_twin(whole_config(spec.captured), spec.architecture)
    agreement = compare(twin, twin.ours, spec.architecture)
    if config.compile.trace:
        program = rewritten_program(twin.spec, twin.ours, config.compile)
        second = compare(twin, program.step, spec.architecture)
        agreement = max(agreement, second, key=lambda each: each.error)
    seconds = round(time.perf_counter() - began, 2)
    _log.info("%s: its twin differs by %.1e at most", spec.architecture, agreement.error)
    return {
        "error": agreement.error,
        "tokens": agreement.tokens,
        "layers": agreement.layers,
        "library": spec.captured.library,
        "seconds": seconds,
    }


@dataclass(frozen=True)
class Program:
    """A twin's graph that a level's passes rewrote: as a step, as it is, and what they report."""

    step: Step
    traced: Traced
    reports: list[PassReport]


def captured_source(spec: ModelSpec, model: CapturedModel, inputs: Example) -> Source:
    """Make the source of a captured model's build.  One layer of each kind is traced, unless its
    facts say why none can stand for others."""
    facts = spec.captured
    assert facts is not None
    if not facts.layers:
        return Source(
            model, inputs, why=why, whole="it has no list of layers that attend once each"
        )
    module, kinds = f"library.{facts.layers}", layer_kinds(spec, model.library)
    groups = map(spec.cache_group, range(spec.num_layers))
    shared = tuple((slot_mapping_of(group), block_table_of(group)) for group in groups)
    inputs_of_one = (f"{WEIGHTS}{module}.{{}}.", KV_CACHE)
    layers = Repeat(module, kinds, inputs_of_one, shared=shared)
    if facts.undivided:
        return Source(model, inputs, why=why, whole=facts.undivided, shown=layers)
    once = partial(model.running_once, kinds, mark)
    return Source(model, inputs, layers, why=why, while_traced=once)


def rewritten_program(spec: ModelSpec, model: CapturedModel, config: CompileConfig) -> Program:
    """Trace a captured twin and let the level's passes rewrite its graph, which is not compiled."""
    source = captured_source(spec, model, example(spec, 8, torch.device("cpu")))
    config = replace(config, verify=False)
    traced, reports, _ = rewritten(source, config, Timer(lambda phase: None), Record())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    weights = {WEIGHTS + name: tensor for name, tensor in tensors.items()}
    return Program(partial(_interpret, traced, weights), traced, reports)


def _interpret(
    traced: Traced,
    weights: Mapping[str, Tensor],
    ids: Tensor,
    positions: Tensor,
    attention: AttentionInputs,
    kv_caches: list[Tensor],
) -> Tensor:
    values = {
        **weights,
        TOKEN_IDS: ids,
        "positions": positions,
        "seq_lens": attention.seq_lens,
        "query_start_loc": attention.query_start_loc,
    }
    for number, cache in enumerate(attention.groups):
        values[slot_mapping_of(number)] = cache.slot_mapping
        values[block_table_of(number)] = cache.block_table
    values |= {kv_cache_name(layer): cache for layer, cache in enumerate(kv_caches)}
    arguments = [
        values[source.name] if source.dim is None else values[source.name].shape[source.dim]
        for source in traced.inputs
    ]
    result = fx.Interpreter(traced.gm).run(*arguments)
    return result[0]  # type: ignore[no-any-return]
