"""Says which models and heads can draft for which, by their specs alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..config import UserError
from .heads.mtp import read_mtp
from .heads.read import read_head
from .heads.spec import is_head
from .hf_config import read_spec
from .hf_json import read_json
from .spec import ModelSpec


def drafter_reader(method: str, target: ModelSpec) -> Callable[..., ModelSpec]:
    """What reads the folder of a drafter for ``target``, called as ``read_spec``."""
    return partial(_READERS[method], target=target)


def _read_model(folder: Path, *others: Any, target: ModelSpec) -> ModelSpec:
    config = folder / "config.json"
    if config.is_file() and is_head(read_json(config)):
        raise UserError(f"{folder} is an EAGLE-3 head; say method='eagle3'")
    return read_spec(folder, *others)


_READERS: dict[str, Callable[..., ModelSpec]] = {
    "draft_model": _read_model,
    "eagle3": read_head,
    "mtp": read_mtp,
}
"""Method -> its reader."""


def check_drafter(method: str, folder: Path, draft: ModelSpec, target: ModelSpec) -> None:
    """Refuse a drafter, in ``folder``, that cannot draft for ``target``.

    Raises:
        UserError: says why.
    """
    what = f"speculative_config: method={method!r}: {folder.name}"
    if draft.vocab_size != target.vocab_size:
        raise UserError(
            f"{what} has a vocabulary of {draft.vocab_size} tokens, and the model one of "
            f"{target.vocab_size}: a draft's tokens must be those of the model; use a smaller "
            "model of the same family, or method='ngram'"
        )
    if any(group.spec.kind.per_sequence for group in draft.cache_groups):
        raise UserError(
            f"{what} ({draft.architecture}) keeps states of whole sequences, which cannot go back "
            "behind a wrong draft; use a model of attention layers, or method='ngram'"
        )
    if target.whole_group is None:
        raise UserError(
            f"{what}: no layer of the model ({target.architecture}) keeps all tokens, and a draft "
            "model uses the blocks of such a layer; use method='ngram'"
        )
    if draft.head is not None and target.pipeline_parallel_size > 1:
        raise UserError(
            f"{what} reads hidden states of layers that other stages have; "
            "leave pipeline_parallel_size out, or use a draft_model or ngram"
        )
