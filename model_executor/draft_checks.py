"""Says which models can draft for which, by their specs alone."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import UserError
from .cache_spec import LayerGroup
from .spec import ModelSpec


def check_draft_model(name: str, draft: ModelSpec, target: ModelSpec) -> None:
    """Refuse a draft model, called ``name``, that cannot draft for ``target``.

    Raises:
        UserError: says why.
    """
    what = f"speculative_config: model={name}"
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
    if whole_group(target.cache_groups) is None:
        raise UserError(
            f"{what}: no layer of the model ({target.architecture}) keeps all tokens, and a draft "
            "model uses the blocks of such a layer; use method='ngram'"
        )


def whole_group(groups: Sequence[LayerGroup]) -> int | None:
    """The number of the first group that keeps all tokens of a sequence; None if none does."""
    for number, group in enumerate(groups):
        if not (group.spec.window or group.spec.kind.per_sequence):
            return number
    return None
