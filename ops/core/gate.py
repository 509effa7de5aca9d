"""Options of gated activations as data, and the text by which a layer names its activation."""

from __future__ import annotations

import ast
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True)
class Gate:
    """Options of a gated activation beside ``act(gate) * up``, applied in this order.

    Attributes:
        alpha: the gate is multiplied by it inside of the logistic function.
        limit: the gate is clamped from above and ``up`` on both sides, before all else; None: not.
        up_offset: is added to ``up``.
        interleaved: columns of a packed tensor are pairs of a gate and its ``up``, not two halves.
    """

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    interleaved: bool = False


PLAIN = Gate()


def spelled(activation: str, how: Gate = PLAIN) -> str:
    """The text by which a layer names its activation: ``silu``, or with the options that differ
    from those of ``PLAIN``, ``silu(alpha=1.702, limit=7.0, up_offset=1.0, interleaved=True)``."""
    plain = asdict(PLAIN)
    options = (f"{name}={value!r}" for name, value in asdict(how).items() if value != plain[name])
    shown = ", ".join(options)
    return f"{activation}({shown})" if shown else activation


@lru_cache
def read_spelled(text: str) -> tuple[str, Gate]:
    """The activation's name and options: the inverse of ``spelled``.

    Raises:
        ValueError: the text is none that ``spelled`` writes.
    """
    name, _, options = text.partition("(")
    if not options:
        return text, PLAIN
    try:
        call: Any = ast.parse(text, mode="eval").body
        how = Gate(**{option.arg: ast.literal_eval(option.value) for option in call.keywords})
    except (SyntaxError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"activation {text!r}: expected such as {spelled('silu')!r}") from error
    if spelled(name, how) != text:
        raise ValueError(f"activation {text!r}, expected {spelled(name, how)!r}")
    return name, how


def name_of(activation: str | None) -> str:
    """The name of an activation in such a text, "" for None."""
    return (activation or "").partition("(")[0]
