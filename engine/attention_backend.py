"""Chooses the attention backend.

FlashInfer is used only if the artifact already holds its compiled modules; a start never builds
them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from ..compiler.artifacts.store import Store
from ..config import FLASHINFER, ResolvedConfig
from ..model_executor.spec import ModelSpec
from .source import artifact_key, keys_as_good

_log = logging.getLogger(__name__)


def with_compiled_attention(
    spec: ModelSpec, config: ResolvedConfig, store: Store
) -> ResolvedConfig:
    """``config``, with FlashInfer if the store has the artifact with it, else without.

    An artifact with it is made by ``fusewright compile --attention-backend flashinfer`` alone; so
    ``auto`` takes it where someone has asked for it.  Where it is asked for now and there is no
    such artifact, a warning says that our own kernels serve.
    """
    asked = FLASHINFER in config.compile.kernels
    other = tuple(choice for choice in config.compile.kernels if choice != FLASHINFER)
    if config.hardware.device != "cuda" or FLASHINFER[0] in dict(other):
        return config
    wanted = _with_kernels(config, (FLASHINFER, *other))
    if store.find(artifact_key(spec, wanted), *keys_as_good(spec, wanted)):
        return wanted
    if not asked or config.store.require:
        return config
    _log.warning(
        "attention_backend=flashinfer: its modules are not compiled, so our own kernels serve; "
        "`fusewright compile` with the options of this start builds them"
    )
    return _with_kernels(config, other)


def _with_kernels(config: ResolvedConfig, kernels: tuple[tuple[str, str], ...]) -> ResolvedConfig:
    return replace(config, compile=replace(config.compile, kernels=kernels))


def say_where_flashinfer_does_not_fit(config: ResolvedConfig, choices: Iterable[str]) -> None:
    """A warning for each choice of another kernel where FlashInfer is to serve, with the reason."""
    if FLASHINFER not in config.compile.kernels:
        return
    for choice in choices:
        if choice.startswith(FLASHINFER[0]) and "(flashinfer: " in choice:
            _log.warning("attention_backend=flashinfer: %s", choice)
