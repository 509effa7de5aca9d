"""Says which command tunes a model's experts where no tuned tiles serve them."""

from __future__ import annotations

import logging
import shlex

from ... import ops
from ...config import ResolvedConfig
from ...config.device_table import find_experts
from ...model_executor.spec import ModelSpec

_log = logging.getLogger(__name__)
_RULES_GPU, _LOSS = "NVIDIA H200", "up to 5 %"
"""The GPU on which the rule of tiles was measured, and how much slower than with tuned tiles the
experts are there (docs/decisions/expert-tiles-are-measured.md)."""


def why_tune(spec: ModelSpec, config: ResolvedConfig) -> str:
    """Returns a message with the command that tunes a rank's experts and what is lost without it.
    The message is empty if the experts have tuned tiles or cannot have any."""
    shape = spec.expert_shape
    if config.hardware.device != "cuda" or shape is None or spec.expert_parallel:
        return ""
    if find_experts(config.compile.tables, shape) or ops.expert_table(shape):  # -O3 measured it
        return ""
    gpu = config.hardware.name
    loss = f"{_LOSS} of the experts' time" if gpu == _RULES_GPU else "how much is not known here"
    command = ["fusewright", "tune", "moe", config.model.path]
    if spec.ranks_an_expert > 1:
        command += ["--tp", str(spec.ranks_an_expert)]
    if shape[2] != "bfloat16":
        command += ["--dtype", shape[2].replace(" ", "_")]
    experts, intermediate, kind = shape
    return (
        f"{experts} experts of {intermediate}, {kind}, on {gpu}: no tuned tiles, so those of a "
        f"rule serve, measured on an {_RULES_GPU}; they lose {loss}. `{shlex.join(command)} "
        "--output DIR` writes the table for --tuned-config-dir DIR; -O3 measures tiles when it "
        "compiles"
    )


def say_how_to_tune(spec: ModelSpec, config: ResolvedConfig) -> None:
    """Log the message of ``why_tune``, as a warning on a GPU on which the rule was not measured."""
    if note := why_tune(spec, config):
        known = config.hardware.name == _RULES_GPU
        _log.log(logging.INFO if known else logging.WARNING, "%s", note)
