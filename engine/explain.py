"""``fusewright explain MODEL`` explains a model without loading or compiling it.

The model is traced, rewritten and lowered as for a build; ``compiler.inspect`` then describes a
decode step of the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from .. import ops
from ..compiler.record import Record
from ..compiler.run.load import measured_table
from ..config import PASSES, EngineOptions, ResolvedConfig, UserError
from ..config.resolve import why_off
from ..model_executor.spec import stage_of
from .aot_compile import lowered_model, target_hardware
from .worker.progress import show_progress
from .worker.source import (
    artifact_key,
    artifact_label,
    configured_store,
    keys_as_good,
)
from .worker.startup import read_model
from .worker.untuned_experts import why_tune

if TYPE_CHECKING:
    from ..compiler.artifacts.artifact import Artifact
    from ..compiler.capture.trace import Traced
    from ..compiler.inspect.explain import Explanation, StageFacts
    from ..model_executor.spec import ModelSpec

_UNMEASURED = (
    "-O3 chooses kernels by measurement when it compiles on the GPU, and it has not here: these "
    "are the choices without"
)
_MEASURED = "-O3 chose these kernels by measurement when it compiled artifact {}"
_CSRC = "the GPU is not here: the kernels of csrc are taken to be there"
_CUBLAS = "cuBLAS may split a GEMM into two launches"


class _Before(Record):
    """Keeps the graph as the level's passes find it."""

    traced: Traced | None = None

    def graph(self, title: str, traced: Traced) -> None:
        from ..compiler.inspect.sites import copied

        if title == "traced":
            self.traced = copied(traced)


def explain_model(
    options: EngineOptions,
    *,
    target_sm: int | None = None,
    num_seqs: int = 1,
    context: int = 128,
    stage: int = 0,
) -> tuple[str, Explanation]:
    """The model's label, and what a decode step of it does.

    Args:
        options: as for a start; a folder with ``config.json`` is enough.
        target_sm: compute capability to explain for; that of the GPU here if None.
        num_seqs: sequences of the step.
        context: KV positions of each.
        stage: the pipeline stage whose program is explained.

    Raises:
        UserError: the options compile nothing, or there is no such stage.
    """
    from ..compiler.inspect.explain import DecodeStep, explain
    from ..compiler.inspect.sites import Where, expected_sites
    from ..compiler.lowering.tune import Tuner

    hardware = target_hardware(options, target_sm)
    _, whole, config = read_model(options, hardware)
    if not 0 <= stage < whole.pipeline_parallel_size:
        last = whole.pipeline_parallel_size - 1
        raise UserError(f"stage={stage}: expected {f'0 to {last}' if last else 0}")
    spec = stage_of(whole, stage)
    if not config.compile.trace:
        raise UserError("explain: -O0 rewrites and compiles nothing; use -O1 or higher")
    artifact = _tuned(spec, config) if config.compile.tune else None
    before = _Before()
    with show_progress() as progress, progress.status("Explaining") as say:
        tuner = Tuner(known=artifact.manifest.report["tuned_us"]) if artifact else None
        source, lowered, absent = lowered_model(spec, config, say, before, tuner)
    assert before.traced is not None
    where = Where(source.repeat or source.shown, spec.first_layer)
    off = passes_off(options, config)
    sites = expected_sites(lowered.reports, before.traced, config.compile.passes, off, where)
    notes = [_UNMEASURED] if config.compile.tune and not artifact else []
    layers = spec.captured.unsplit if spec.captured else ()
    notes += [f"whole on every rank: {name} ({reason})" for name, reason in layers]
    notes += [_MEASURED.format(artifact.manifest.key)] if artifact else []
    if hardware.device == "cuda":
        if artifact and (table := measured_table(artifact)):
            ops.take_table(table)
        notes += ops.table_notes(lowered.weights, hardware.name, ops.installed_cublaslt())
        notes += [f"device table ignored: {why}" for _, why in config.compile.ignored_tables]
        notes += [note] if (note := why_tune(spec, config)) else []
    notes += [_CUBLAS] if hardware.device == "cuda" else []
    notes += [_CSRC] if absent else []
    facts = explain(
        lowered,
        before.traced,
        where,
        sites,
        DecodeStep(num_seqs, context, spec.tensor_parallel_size),
        notes=notes,
        stages=_stages(whole, num_seqs),
    )
    return artifact_label(spec, config), facts


def _stages(spec: ModelSpec, num_seqs: int) -> Iterator[StageFacts]:
    """The stages of a pipeline, and what a decode step of ``num_seqs`` sends between them."""
    from ..compiler.inspect.explain import StageFacts

    stages, size = spec.pipeline_parallel_size, spec.tensor_parallel_size
    for number in range(stages if stages > 1 else 0):
        stage = stage_of(spec, number)
        columns = spec.vocab_size if stage.has_head else spec.hidden_size
        sends = "logits to rank 0" if stage.has_head else f"hidden states to stage {number + 1}"
        yield StageFacts(
            (stage.first_layer, stage.first_layer + stage.num_layers - 1),
            (number * size, (number + 1) * size - 1),
            sends,
            num_seqs * columns * spec.dtype.itemsize,
        )


def _tuned(spec: ModelSpec, config: ResolvedConfig) -> Artifact | None:
    """The artifact of this model with kernels chosen by measurement, if it is in the store."""
    if not config.store.enabled or config.hardware.device != "cuda":
        return None
    store = configured_store(config.store)
    key = artifact_key(spec, config)
    return store.find(key, *keys_as_good(key, config))


def passes_off(options: EngineOptions, config: ResolvedConfig) -> Mapping[str, str]:
    """The passes that do not run -> why: an option, the level, or a gate (``config/gates.py``)."""
    off: dict[str, str] = {}
    for name in PASSES:
        if name in config.compile.passes:
            continue
        if name in options.disable_passes:
            off[name] = "by --disable-passes"
        elif options.passes is not None:
            off[name] = "by --passes"
        else:
            off[name] = why_off(
                name, config.compile.level, config.hardware.sm, config.precision.weights
            )
    return off
