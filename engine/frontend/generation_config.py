"""Reads from ``generation_config.json`` which ids end a request, and the model's defaults of
sampling.  Older folders have these ids in ``config.json``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...config import UserError
from ...model_executor.hf_config import model_folder
from ...model_executor.hf_json import HfConfig, read_json, read_json_if_there
from ..messages.sampling_params import SamplingParams
from .tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_FILE = "generation_config.json"
_DEFAULTS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Field of the file -> field of ``SamplingParams``, as in vLLM."""
_NOTHING = ("none", "vllm")
_MOST_NAMED = 5


def _file(folder: Path, generation_config: str) -> Path:
    named = generation_config == "auto" or generation_config in _NOTHING
    return (folder if named else Path(generation_config)) / _FILE


def default_sampling(model: str, generation_config: str) -> dict[str, Any]:
    """The fields of ``SamplingParams`` that a request which leaves them out has here.

    Args:
        model: the model's folder or name.
        generation_config: "auto" for the file in the model's folder, "none" (or vLLM's "vllm") for
            no file, else the folder of the file.

    Raises:
        UserError: the file cannot be read, or a value is out of range.
    """
    if generation_config in _NOTHING:
        return {}
    path = _file(model_folder(model), generation_config)
    values = read_json_if_there(path) if generation_config == "auto" else read_json(path)
    defaults = {
        field: values[name] for name, field in _DEFAULTS.items() if values.get(name) is not None
    }
    try:
        SamplingParams(**defaults)
    except UserError as error:
        raise UserError(
            f"{path}: {error}; correct it, or start with generation_config='none'"
        ) from error
    return defaults


def describe_default_sampling(defaults: Mapping[str, Any]) -> str:
    """A line on the defaults of requests that a file gives; "" if there are none."""
    if not defaults:
        return ""
    values = ", ".join(f"{name}={value}" for name, value in defaults.items())
    return (
        f"requests that leave them out have {values}, as {_FILE} says; generation_config='none' "
        "keeps the defaults of SamplingParams"
    )


def find_eos_token_ids(
    folder: Path, tokenizer: Tokenizer | None, generation_config: str = "auto"
) -> frozenset[int]:
    """Ids that end generation: of ``generation_config.json`` (else ``config.json``), which may list
    several, and the tokenizer's own.

    Args:
        folder: the model's.
        generation_config: as for ``default_sampling``; "none" changes nothing here.

    Raises:
        UserError: a file cannot be read, or holds something else than token ids.
    """
    paths = (_file(folder, generation_config), folder / "config.json")
    declared = (
        HfConfig(path, read_json_if_there(path)).token_ids("eos_token_id") for path in paths
    )
    ids = set(next(filter(None, declared), ()))
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)


def within_vocabulary(
    eos_token_ids: frozenset[int], tokenizer: Tokenizer | None, vocab_size: int
) -> frozenset[int]:
    """The end-of-sequence ids that the model can give; warns of others, and of tokens of the
    tokenizer that the model has no embedding for.

    Args:
        vocab_size: columns of the logits.
    """
    beyond = sorted(each for each in eos_token_ids if each >= vocab_size)
    if beyond:
        _log.warning(
            "end-of-sequence ids %s: the model gives 0..%d, so that they end nothing; check "
            "eos_token_id in %s and config.json",
            beyond[:_MOST_NAMED],
            vocab_size - 1,
            _FILE,
        )
    if tokenizer is not None and (without := tokenizer.tokens_from(vocab_size)):
        _log.warning(
            "%s: %d tokens have ids outside the model's vocabulary of %d, and prompts with them "
            "are refused: %s",
            tokenizer.folder,
            len(without),
            vocab_size,
            ", ".join(repr(text[:50]) for text in without[:_MOST_NAMED]),
        )
    return eos_token_ids.difference(beyond)
