"""vLLM's dialect: keywords of an ``LLM`` as ``EngineOptions``, and arguments that are not there, by
the tables of ``vllm/``.  The command line reads its flags by the same functions."""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from .errors import UserError
from .option_types import read_text
from .options import EngineOptions
from .vllm import CALLS, ENGINE, SAMPLING, Argument, Port

_log = logging.getLogger(__name__)
_LEVELS = {"0": 0, "NONE": 0, "3": None, "VLLM_COMPILE": None}
"""``mode`` of vLLM's ``compilation_config`` -> our level; None: the default one."""
_COMPILED = ("cudagraph_mode", "cudagraph_capture_sizes")


def engine_options(model: str, keywords: Mapping[str, Any]) -> EngineOptions:
    """The options of ``LLM(model, **keywords)``.

    Raises:
        UserError: an option is unknown, of the wrong type, or asks for what is not there.
    """
    known = {f.name: f for f in fields(EngineOptions)}
    options: dict[str, Any] = {}
    for name, value in keywords.items():
        if name == "revision":
            model = at_revision(model, value)
        elif name in known:
            if value is not None:  # vLLM's word for a default
                options[name] = _OURS.get(name, lambda same: same)(value)
        elif name in ENGINE:
            options |= ported(ENGINE[name], value)
        else:
            raise unknown(f"unknown option {name!r}", name, known, "see EngineOptions")
    return EngineOptions(model=model, **options)


def ported(argument: Argument, value: Any) -> dict[str, Any]:
    """Our keywords for an argument of vLLM's that is not one of ours.

    Raises:
        UserError: it asks for what is not there.
    """
    if value is not None and argument.name in _READERS:
        return _READERS[argument.name](value)
    if value is None or argument.asks_nothing(value):
        return {}
    if argument.port is Port.OTHER and argument.says.isidentifier():
        return {argument.says: value}
    if argument.port is Port.REFUSED:
        raise UserError(f"{argument.name}={value!r}: {argument.says}")
    _log.info("%s=%r has no effect: %s", argument.name, value, argument.says)
    return {}


def sampling_fields(keywords: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The fields of ``SamplingParams(**keywords)``.

    Raises:
        UserError: one is unknown, or asks for what is not there.
    """
    taken: dict[str, Any] = {}
    for name, value in keywords.items():
        if name in known:
            taken[name] = value
        elif name in SAMPLING:
            taken |= ported(SAMPLING[name], value)
        else:
            raise unknown(f"SamplingParams: unknown field {name!r}", name, known)
    return taken


def check_call(call: str, keywords: Mapping[str, Any]) -> None:
    """Refuse arguments of a call that ask for what is not there.

    Raises:
        UserError: one is unknown, or does.
    """
    for name, value in keywords.items():
        if name not in CALLS:
            raise unknown(f"{call}: unknown argument {name!r}", name, CALLS)
        try:
            ported(CALLS[name], value)
        except UserError as error:
            raise UserError(f"{call}: {error}") from error


def unknown(what: str, name: str, known: Iterable[str], else_: str = "") -> UserError:
    known = [*known]
    close = nearest(name, known)
    hint = f"did you mean {close}?" if close else else_ or f"known: {', '.join(known)}"
    return UserError(f"{what}: {hint}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The one of ``known`` that a wrong name may have meant: one spelt alike, else the first that
    begins with it, as ``temperature`` does with ``temp``; "" if there is none."""
    known = [*known]
    close = difflib.get_close_matches(name, known, 1)
    begun = [other for other in known if len(name) >= 3 and other.startswith(name)]
    return next(iter([*close, *begun]), "")


def at_revision(model: str, revision: object) -> str:
    """``ORG/NAME@revision``, for vLLM's option of that name; the model itself if it is None.

    Raises:
        UserError: the model is none on the Hub, or the revision is no text.
    """
    if revision is None:
        return model
    is_name = "/" in model and "@" not in model and not os.path.lexists(model)
    if not isinstance(revision, str) or not revision or not is_name:
        raise UserError(
            f"revision={revision!r}: expected a branch, tag or commit of a model on the Hub, and "
            f"model={model!r}; leave it out for a folder, a bundled model, or ORG/NAME@REVISION"
        )
    return f"{model}@{revision}"


def _executor(backend: Any) -> dict[str, Any]:
    if str(backend) in ("uni", "mp"):
        return {}  # who starts the others is decided by how many there are
    if backend == "ray":
        return {"distributed_executor": backend}
    raise UserError(
        f"distributed_executor_backend={backend!r}: expected mp, uni or ray; under torchrun the "
        "ranks find each other without it"
    )


def _compilation(config: Any) -> dict[str, Any]:
    """Our options for vLLM's compilation config: a level, or a dict or JSON text of its fields."""
    if isinstance(config, str):
        config = read_text("compilation_config", config)
    if isinstance(config, int):
        return {"optimization_level": config}
    if not isinstance(config, Mapping):
        raise UserError(
            f"compilation_config is of type {type(config).__name__}: expected a level of 0 to 3, "
            f"or a dict with {' or '.join(_COMPILED)}"
        )
    options: dict[str, Any] = {}
    for name, value in config.items():
        if name in _COMPILED:
            options[name] = getattr(value, "name", value)  # of an Enum
        elif name == "level":
            options["optimization_level"] = value
        elif name == "mode" and str(getattr(value, "name", value)) in _LEVELS:
            level = _LEVELS[str(getattr(value, "name", value))]
            options |= {} if level is None else {"optimization_level": level}
        else:
            raise UserError(
                f"compilation_config: {name}={value!r} has no counterpart; {', '.join(_COMPILED)} "
                "and level have; passes, kernels and require_fusion say what is compiled and fused"
            )
    return options


def _json_text(name: str, value: Any) -> Any:
    """A dict as JSON text, as the command line has it.

    Raises:
        UserError: something in it is not JSON.
    """
    if not isinstance(value, Mapping):
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}={value!r}: not JSON: {error}") from None
    except RecursionError:
        raise UserError(f"{name}: nested too deeply; expected the fields of an object") from None


_OURS: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda value: str(value).removeprefix("torch."),
    "hf_overrides": partial(_json_text, "hf_overrides"),
    "speculative_config": partial(_json_text, "speculative_config"),
}
"""Options that vLLM takes as objects of other types too."""


def _dataset(name: Any) -> dict[str, Any]:
    return {"dataset": {"custom": "jsonl", "prefix_repetition": "prefix"}.get(name, name)}


_READERS = {
    "compilation_config": _compilation,
    "distributed_executor_backend": _executor,
    "dataset_name": _dataset,
}
