"""Builds a model of ``transformers`` on the meta device, from its configuration alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...config import UserError
from .facts import CapturedFacts

REWRITTEN = "it would work in a version of the library that calls the interface there"


def version() -> str:
    """Name and version of the library.

    Raises:
        UserError: it is not installed.
    """
    try:
        from transformers import __version__
    except ImportError as error:
        raise UserError(
            "a model without an adapter is captured from its implementation in transformers, which "
            f"cannot be imported ({error}); install fusewright[transformers]"
        ) from error
    return f"transformers {__version__}"


def read_config(path: Path, values: Mapping[str, Any], architecture: str) -> Any:
    """The library's configuration object of a ``config.json``, its text decoder's where it has
    several parts.

    Raises:
        UserError: the library does not know the model, or refuses a value.
    """
    library = version()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        own = "; it is custom code (auto_map), which is never run" if values.get("auto_map") else ""
        raise UserError(
            f"{path}: architecture {architecture!r} is not supported: it has no adapter, and its "
            f"model_type {kind!r} is unknown to {library}{own}"
        )
    try:
        # How a checkpoint is quantized is for us to read; the library would look for its own code.
        plain = {name: value for name, value in values.items() if name != "quantization_config"}
        config = CONFIG_MAPPING[kind].from_dict(plain)
    except Exception as error:
        raise UserError(f"{path}: {library} refuses it: {first_line(error)}") from error
    implemented = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if architecture != implemented:
        _check_whole(f"{path}: {architecture!r}", config, architecture, implemented)
    config.architectures = [architecture]
    return config


def _check_whole(what: str, config: Any, architecture: str, implemented: str | None) -> None:
    """Check that an architecture which is no causal language model by its name may have one as its
    text decoder."""
    import transformers

    if config.is_encoder_decoder:
        raise UserError(
            f"{what} has an encoder and a decoder, which is not served: a decoder alone is; choose "
            "a causal language model"
        )
    whole = getattr(transformers, architecture, None)
    text = config.get_text_config(decoder=True)
    if whole is None or whole.config_class is not type(config):
        raise UserError(
            f"{what} is not supported: what {version()} has of model_type {config.model_type!r} as "
            f"a causal language model is {implemented!r}; config.json must be the model's own"
        )
    if type(text) is type(config) or not whole.can_generate():
        raise UserError(
            f"{what} generates no text: {version()} has no causal language model of model_type "
            f"{config.model_type!r}; choose a model that generates text"
        )


def class_of(config: Any) -> Any:
    """The library's class of a configuration: the one that it names, else its causal language
    model's."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = config.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    return getattr(transformers, names[0])


def unmodified(config: Any, dtype: torch.dtype, device: str = "cpu") -> nn.Module:
    """The library's model of a configuration, as it is, with random weights."""
    from transformers import AutoModelForCausalLM

    kind = class_of(config)
    own = kind.config_class is type(config)
    make = kind._from_config if own else AutoModelForCausalLM.from_config
    with torch.device(device), _quiet():
        model = make(config, attn_implementation="eager", dtype=dtype)
    return model.eval()  # type: ignore[no-any-return]


def canonical(config: Any) -> str:
    """A configuration as JSON from which ``build`` makes the model again."""
    return json.dumps(config.to_dict(), sort_keys=True, default=str)


def config_of(facts: CapturedFacts) -> Any:
    """The library's configuration object of a captured model."""
    return make_config(json.loads(facts.config))


def make_config(values: Mapping[str, Any]) -> Any:
    """The library's configuration object of what ``canonical`` wrote."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[values["model_type"]].from_dict(dict(values))


def build(facts: CapturedFacts, dtype: torch.dtype) -> nn.Module:
    """A causal language model without weights: parameters and persistent buffers are on the meta
    device; buffers that no checkpoint has are computed, on the CPU.  Tied parameters that a
    checkpoint has apart are apart.

    Raises:
        UserError: the library has no such causal language model, or cannot build it.
    """
    library = version()
    from transformers import AutoModelForCausalLM

    from .checkpoint_map import dtypes_of, separate
    from .interfaces import NAME, register

    register()
    config = config_of(facts)
    try:
        with torch.device("meta"), _quiet():
            model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)
            _compute_buffers(model)
            for name in facts.untied:
                separate(model, name)
            for name, kept in dtypes_of(model, dtype).items():
                _set_dtype(model, name, kept)
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (NAME,):
            raise UserError(
                f"{config.model_type!r} cannot be captured: its attention does not go through the "
                f"library's attention interface: {library} has classes of its own for each "
                f"implementation{place_of(error)}; {REWRITTEN}"
            ) from error
        raise UserError(
            f"{library} cannot build {config.model_type!r} as a causal language model: "
            f"{first_line(error)}"
        ) from error
    for module in model.modules():
        if hasattr(module, "config"):  # its setter knows the library's own names alone
            module.config._experts_implementation = NAME
    return model.eval()  # type: ignore[no-any-return]


def _set_dtype(model: nn.Module, name: str, dtype: torch.dtype) -> None:
    parent, _, kind = name.rpartition(".")
    tensor = getattr(model.get_submodule(parent), kind)
    if tensor.dtype != dtype:
        tensor.data = torch.empty_like(tensor, dtype=dtype)


def _compute_buffers(model: Any) -> None:
    """Compute the buffers that no checkpoint has, as the library does behind a load: its own
    initialization runs, and passes over whatever is marked as there."""
    persistent = set(model.state_dict(keep_vars=True))
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    for name, module in model.named_modules():
        for kind, buffer in list(module.named_buffers(recurse=False)):
            if f"{name}.{kind}".lstrip(".") in persistent:
                buffer._is_hf_initialized = True
                continue
            with torch.device("cpu"):
                empty = torch.empty(buffer.shape, dtype=buffer.dtype)
            module.register_buffer(kind, empty, persistent=False)
    with torch.device("cpu"), torch.no_grad():
        model.initialize_weights()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's advice on attention implementations that it does not know."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def place_of(error: BaseException) -> str:
    """The line of a model's source at which an error arose, and the layer: " (modeling_x.py, line
    1: Class of layer 0)"; "" if it arose elsewhere."""
    place, layer, frame = "", "", error.__traceback__
    while frame is not None:
        file = Path(frame.tb_frame.f_code.co_filename)
        if "transformers" in file.parts and file.stem.startswith("modeling_"):
            module = frame.tb_frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                number = getattr(module, "layer_idx", None)
                layer = type(module).__name__ + ("" if number is None else f" of layer {number}")
            place = f"{file.name}, line {frame.tb_lineno}"
        frame = frame.tb_next
    return f" ({place}{f': {layer}' if layer else ''})" if place else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its class."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
