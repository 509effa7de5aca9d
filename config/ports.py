"""An ``LLM``'s keyword arguments as ``EngineOptions``, vLLM's dialect included: scripts that come
from there give options that have nothing to decide here, and other names of dtypes."""

from __future__ import annotations

import difflib
import os
from dataclasses import fields
from typing import Any

from .errors import UserError
from .options import EngineOptions

_FIXED: dict[str, tuple[Any, str]] = {
    "data_parallel_size": (
        1,
        "an engine is one replica; fusewright serve --data-parallel-size has several",
    ),
    "trust_remote_code": (False, "code that comes with a checkpoint is never run"),
    "swap_space": (0, "KV blocks are not swapped to the CPU: what is preempted is computed anew"),
    "cpu_offload_gb": (0, "weights stay on the device"),
    "enable_lora": (False, "LoRA adapters are not served"),
    "speculative_config": (None, "there is no speculative decoding"),
    "tokenizer_mode": ("auto", "tokenizer.json is the only tokenizer"),
}
"""Option of vLLM -> the only value it can have here, and why."""

_DTYPES = {"half": "float16", "float": "float32"}


def engine_options(model: str, keywords: dict[str, Any]) -> EngineOptions:
    """The options of ``LLM(model, **given)``.

    Raises:
        UserError: an option is unknown, of the wrong type, or asks for what is not there.
    """
    keywords = dict(keywords)
    if (revision := keywords.pop("revision", None)) is not None:
        model = _at_revision(model, revision)
    known = [f.name for f in fields(EngineOptions)]
    options: dict[str, Any] = {}
    for name, value in keywords.items():
        if name in _FIXED:
            _check_fixed(name, value)
        elif name in known:
            options[name] = value
        else:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else "see EngineOptions"
            raise UserError(f"unknown option {name!r}: {hint}")
    if "dtype" in options:
        dtype = str(options["dtype"]).removeprefix("torch.")
        options["dtype"] = _DTYPES.get(dtype, dtype)
    return EngineOptions(model=model, **options)


def _at_revision(model: str, revision: object) -> str:
    """``ORG/NAME@revision``, for vLLM's option of that name."""
    is_name = "/" in model and "@" not in model and not os.path.lexists(model)
    if not isinstance(revision, str) or not revision or not is_name:
        raise UserError(
            f"revision={revision!r}: expected a branch, tag or commit of a model on the Hub, and "
            f"model={model!r}; leave it out for a folder, a bundled model, or ORG/NAME@REVISION"
        )
    return f"{model}@{revision}"


def _check_fixed(name: str, value: Any) -> None:
    only, why = _FIXED[name]
    if value != only or isinstance(value, bool) != isinstance(only, bool):
        raise UserError(f"{name}={value!r}: {why}; expected {only!r}, or leave it out")
