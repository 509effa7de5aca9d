"""Gives the compiler its view of a model: its key and, when it must be compiled, what to trace.

The model that is traced has one layer of each kind, on fake tensors: it needs no memory and no GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from ... import ops
from ...compiler.artifacts.factors import measured_factors, source_factors, toolchain_factors
from ...compiler.artifacts.key import Key, Wanted
from ...compiler.artifacts.scratch import scratch_folder
from ...compiler.artifacts.store import Store, open_store
from ...compiler.capture.source import Repeat, Source
from ...compiler.compiled import Compiled, CompiledKernels, compile, compile_kernels
from ...compiler.record import Record
from ...config import (
    ResolvedConfig,
    StoreConfig,
    key_factors,
)
from ...config.expert_tables import Experts
from ...model_executor.hf_config import model_folder
from ...model_executor.loader import fake_model
from ...model_executor.models.decoder import distinct_layers
from ...model_executor.spec import ModelSpec
from .drafts.state import draft_calls
from .sampling.op_table import outside_calls
from .step_arguments import (
    KV_CACHE as KV_CACHE,
    example as example,
    first_input as first_input,
    kv_cache_name as kv_cache_name,
    module_arguments as module_arguments,
)

_log = logging.getLogger(__name__)
_MODEL_SOURCES = (
    "model_executor/models",
    "model_executor/attention",
    "model_executor/captured",
    "model_executor/heads",
    "model_executor/layers.py",
    "model_executor/experts.py",
    "model_executor/quant/scheme.py",
    "model_executor/sharding.py",
    "config/weight_format.py",
    "model_executor/cache_spec.py",
    "engine/worker/source.py",
    "engine/worker/step_arguments.py",
    "engine/worker/sampling/op_table.py",
)
_DRAFT_SOURCES = ("engine/worker/drafts/state.py",)
"""These decide which kernels of drafts there are; no other artifact depends on them."""


def artifact_key(spec: ModelSpec, config: ResolvedConfig) -> Key:
    """The key of a model's artifact: its fields, the configuration, sources and toolchain."""
    hardware = config.hardware
    factors = key_factors(spec, "model") | key_factors(config, "config")
    factors |= ops.format_factors(config.precision.quantization)
    factors |= source_factors(_MODEL_SOURCES) | toolchain_factors(hardware.device)
    if config.compile.tune:
        factors["config.hardware.name"] = hardware.name
        factors |= measured_factors(hardware.device)
        factors["config.compile.tune_seconds"] = str(config.compile.tune_seconds)
    return Key(factors)


def keys_as_good(key: Key, config: ResolvedConfig) -> list[Key]:
    """Keys of other artifacts that serve as well as that of ``key``.  Where rewrites need not be
    verified, an artifact in which they were does, as ``fusewright compile`` makes it; so does one
    with a proof where none is asked for."""
    lacking = [name for name in ("verify", "proof") if not getattr(config.compile, name)]
    return [
        Key({**key.factors, **{f"config.compile.{name}": str(True) for name in names}})
        for count in range(1, len(lacking) + 1)
        for names in combinations(lacking, count)
    ]


def configured_store(config: StoreConfig, spare: Callable[[], Path] | None = None) -> Store:
    """The store that the options name; for ``spare`` see ``Store``."""
    return open_store(
        config.search,
        trusted_keys=config.trusted_keys,
        size_limit_bytes=config.size_limit_bytes,
        spare=spare,
    )


@contextmanager
def artifact_store(config: StoreConfig) -> Iterator[Store]:
    """The store of a start: the configured one, with a temporary folder for what it cannot keep."""
    with ExitStack() as stack:

        def scratch() -> Path:
            return stack.enter_context(scratch_folder())

        yield configured_store(config, scratch) if config.enabled else Store((), write_to=scratch())


def find_or_compile(
    spec: ModelSpec,
    config: ResolvedConfig,
    store: Store,
    *,
    require: bool | None = None,
    before_build: Callable[[], object] = lambda: None,
    on_phase: Callable[[str], None],
    record: Record | None = None,
) -> Compiled:
    """``compile()`` for a model.

    Args:
        require: refuse to build; as the options say if None.
        before_build: called if there is no artifact.
    """
    take_tables(config)

    def source() -> Source:
        before_build()
        return model_source(spec, config)

    key = artifact_key(spec, config)
    wanted = Wanted(
        key,
        keys_as_good(key, config),
        artifact_label(spec, config),
        config.hardware.device,
        config.hardware.sm,
    )
    require = config.store.require if require is None else require
    options = config.compile
    if config.scheduler.speculative is not None:
        own = {name for name, _ in draft_calls(1, 1)}
        named = tuple(name for name in options.named_kernels if name not in own)
        options = replace(options, named_kernels=named)
    return compile(
        source, options, wanted, store, require=require, on_phase=on_phase, record=record
    )


def drafts_on_gpu(spec: ModelSpec, config: ResolvedConfig) -> bool:
    """Whether an engine runs the kernels of drafts for a model: for a target all of them, for a
    drafter ``place_rows`` over its own block tables, which a target's artifact has for one."""
    asked = config.scheduler.speculative is not None
    asked |= config.scheduler.is_drafter and len(spec.cache_groups) > 1
    return asked and config.compile.trace and config.hardware.device == "cuda"


def find_or_compile_drafts(
    spec: ModelSpec,
    config: ResolvedConfig,
    store: Store,
    *,
    require: bool,
    on_phase: Callable[[str], None],
) -> CompiledKernels:
    """The kernels of ``draft_calls``: an artifact beside that of the model's program, which serves
    with and without drafts."""

    sources = source_factors(_DRAFT_SOURCES, alone=True)

    def own(key: Key) -> Key:
        return Key({**key.factors, **sources, "kernels": "of drafts"})

    def calls(num_tokens: int, num_seqs: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
        return draft_calls(num_seqs, len(spec.cache_groups))

    key = artifact_key(spec, config)
    wanted = Wanted(
        own(key),
        [own(each) for each in keys_as_good(key, config)],
        f"kernels of drafts: {artifact_label(spec, config)}",
        config.hardware.device,
        config.hardware.sm,
    )
    return compile_kernels(calls, config.compile, wanted, store, require=require, on_phase=on_phase)


def artifact_label(spec: ModelSpec, config: ResolvedConfig) -> str:
    hardware = config.hardware
    target = f"sm_{hardware.sm}" if hardware.sm else hardware.device
    precision = config.precision
    dtypes = precision.dtype
    if precision.quantization != "none":
        dtypes += f", {precision.quantization} weights"
    if precision.kv_cache_dtype != precision.dtype:
        dtypes += f", {precision.kv_cache_dtype} KV cache"
    ranks, stages = spec.tensor_parallel_size, spec.pipeline_parallel_size
    label = (
        f"{spec.architecture}, {spec.num_layers} layers, hidden {spec.hidden_size}, "
        f"{dtypes}, -O{config.compile.level}, {target}{f', {ranks} ranks' if ranks > 1 else ''}"
    )
    if stages == 1:
        return label
    place = "first" if spec.has_embedding else "last" if spec.has_head else "middle"
    return f"{label}, {place} of {stages} stages"


def take_tables(config: ResolvedConfig) -> None:
    """Have ops use the device tables that the configuration has.

    Raises:
        UserError: this process uses others.
    """
    ops.take_tables(config.compile.tables, measures=config.compile.tune)


def model_source(spec: ModelSpec, config: ResolvedConfig) -> Source:
    """The module that is traced for ``spec``, with its example inputs."""
    take_tables(config)
    from torch._subclasses.fake_tensor import FakeTensorMode

    if spec.captured:
        return _captured_source(spec, config)
    device = torch.device(config.hardware.device)
    if spec.head:
        with FakeTensorMode():
            model, inputs = fake_model(spec, device), example(spec, config.cache.block_size, device)
        return Source(model, inputs, outside=partial(head_calls, spec))
    short, layers = distinct_layers(spec)
    with FakeTensorMode():
        model = fake_model(short, device)
        inputs = example(short, config.cache.block_size, device)
    return Source(
        model,
        inputs,
        Repeat(
            "layers",
            layers,
            ("weights/layers.{}.", KV_CACHE),
            "" if spec.has_embedding else first_input(spec),
        ),
        outside=partial(outside_calls, spec),
        experts=experts_of(spec),
    )


def head_calls(
    spec: ModelSpec, num_tokens: int, num_seqs: int
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """``outside_calls`` of a head."""
    yield from outside_calls(spec, num_tokens, num_seqs)
    from ...model_executor.heads.forms import FORMS

    if spec.head and FORMS[spec.head.form].widens:
        columns = len(spec.head.kept) * spec.head.target_hidden_size
        x, weight = (
            torch.empty((rows, columns), dtype=spec.dtype, device="meta")
            for rows in (num_tokens, spec.hidden_size)
        )
        yield "linear", (x, weight)


def _captured_source(spec: ModelSpec, config: ResolvedConfig) -> Source:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ...model_executor.captured.model import CapturedModel
    from ...model_executor.captured.read import why
    from ...model_executor.captured.skeleton import describe
    from .proof import captured_source, prove

    device = torch.device(config.hardware.device)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model: Any = fake_model(spec, device)
        inputs = example(spec, config.cache.block_size, device)
    assert isinstance(model, CapturedModel)
    if spec.head:
        return Source(model, inputs, outside=partial(outside_calls, spec), why=why)
    source = captured_source(spec, model, inputs)
    if source.whole:
        _log.info("%s: all layers are traced: %s", spec.architecture, source.whole)
    return replace(
        source,
        outside=partial(outside_calls, spec),
        prove=(lambda: prove(spec, config)) if config.compile.proof else None,
        describe=lambda: describe(
            spec, model_folder(config.model.path, overrides=config.model.hf_overrides)
        ),
    )


def experts_of(spec: ModelSpec) -> Experts | None:
    """The experts of a rank whose tiles can be measured: none of float32, whose tiles are fixed,
    and none that are spread over ranks as a whole."""
    if spec.moe is None or spec.expert_shape is None or spec.expert_parallel:
        return None
    if spec.dtype.itemsize > 2:
        return None
    number, intermediate, kind = spec.expert_shape
    return Experts(number, intermediate, spec.hidden_size, spec.moe.routing.top_k, kind)
