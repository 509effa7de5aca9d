"""Says in one line why a grammar or a tokenizer does not work, from what llguidance says."""

from __future__ import annotations

import re
from typing import Any


def said(matcher: Any) -> str:
    """The error of a matcher, in one line."""
    message = " ".join(matcher.get_error().partition("<state>")[0].split())
    if message.startswith("NoExtension"):
        return "no text satisfies it"
    if "fuel exhausted" in message or "TooComplex" in message:
        return f"it is too complex ({message[:200]}); simplify it"
    return message[:500] or "it failed"


def why_no_tokenizer(path: str, error: BaseException) -> str:
    message = str(error)
    if "decoder type" in message:
        kind = re.search(r"Some\((\w+)", message)
        message = (
            f"{path} has {f'a {kind[1]} decoder' if kind else 'no decoder'}, expected ByteLevel or "
            "ByteFallback: what a grammar permits is known by the bytes of tokens"
        )
    return f"structured output does not work with this tokenizer: {message}"[:500]
