"""What commands that run a model share: engine options from flags, the model, greedy decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..config import UserError

if TYPE_CHECKING:
    from ..engine.llm import LLM


def merge(engine: dict[str, Any], **implied: Any) -> dict[str, Any]:
    """Options of ``engine`` plus those another argument implies (``None``: implies nothing).

    Raises:
        UserError: the argument and the flag disagree.
    """
    merged = dict(engine)
    for name, value in implied.items():
        if value is None:
            continue
        if merged.get(name, value) != value:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} {merged[name]} contradicts {value}: give one of them")
        merged[name] = value
    return merged


def load(options: dict[str, Any]) -> LLM:
    """An ``LLM``; imports torch."""
    from ..engine.llm import LLM

    return LLM(**options)
