"""Who serves attention until FlashInfer's modules are compiled: a start never compiles them."""

from __future__ import annotations

import logging
from dataclasses import replace

from ..compiler.store import Store
from ..config import ResolvedConfig
from ..model_executor.spec import ModelSpec
from .source import artifact_key, keys_as_good

_log = logging.getLogger(__name__)
_CHOICE = ("paged_attention", "flashinfer")


def until_compiled(spec: ModelSpec, config: ResolvedConfig, store: Store) -> ResolvedConfig:
    """``config``; where it wants FlashInfer and no artifact has its modules, without that choice,
    which a warning says."""
    kernels = config.compile.kernels
    wanted = _CHOICE in kernels and config.hardware.device == "cuda"
    keys = artifact_key(spec, config), *keys_as_good(spec, config)
    if not wanted or config.store.require or store.find(*keys):
        return config
    _log.warning(
        "attention_backend=flashinfer: its modules are not compiled, so our own kernels serve; "
        "`fusewright compile` with the options of this start builds them"
    )
    own = tuple(choice for choice in kernels if choice != _CHOICE)
    return replace(config, compile=replace(config.compile, kernels=own))
