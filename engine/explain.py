"""Explain a model without loading or compiling it: ``fusewright explain MODEL``."""

from __future__ import annotations

from ..compiler.explain import Explanation, explain
from ..config import EngineOptions, UserError
from .ahead import target_hardware
from .source import artifact_label, model_source
from .startup import read_model


def explain_model(
    options: EngineOptions, *, target_sm: int | None = None, num_seqs: int = 1, context: int = 128
) -> tuple[str, Explanation]:
    """The model's label, and what a decode step of it does.

    Args:
        options: as for a start; a folder with ``config.json`` is enough.
        target_sm: compute capability to explain for; that of the GPU here if None.
        num_seqs: sequences of the step.
        context: KV positions of each.

    Raises:
        UserError: the options compile nothing, or only measurement could tell.
    """
    from ..compiler.build import lower_model
    from ..compiler.dump import Dump
    from ..compiler.timer import Timer

    if num_seqs < 1 or context < 1:
        raise UserError(f"batch={num_seqs}, context={context}: expected at least 1 of each")
    hardware = target_hardware(options, target_sm)
    _, spec, config = read_model(options, hardware)
    if not config.compile.trace:
        raise UserError("explain: -O0 rewrites and compiles nothing; use -O1 or higher")
    if config.compile.tune:
        raise UserError(
            "explain: -O3 chooses kernels by measurement; compile it, and see "
            "`fusewright cache show`"
        )
    lowered = lower_model(
        model_source(spec, config),
        config.compile,
        device=hardware.device,
        sm=hardware.sm,
        timer=Timer(lambda phase: None),
        record=Dump(None),
    )
    return artifact_label(spec, config), explain(lowered, num_seqs=num_seqs, context=context)
