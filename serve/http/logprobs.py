"""Log probabilities in OpenAI's two forms: of completions and of chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...engine.frontend.outputs import Logprob, RequestOutput

Step = dict[int, Logprob]
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
_LEAST = -9999.0
"""In place of minus infinity, which JSON does not have; vLLM has the same."""


def completion_logprobs(steps: Sequence[Step], offset: int = 0) -> dict[str, Any]:
    """Log probabilities of a completion's tokens.  A step's first entry is the token itself.

    Args:
        offset: characters before the first token.
    """
    found: dict[str, list[Any]] = {name: [] for name in _LISTS}
    for step in steps:
        first = next(iter(step.values()))
        text = first.decoded_token or ""
        top = {(e.decoded_token or ""): _finite(e.logprob) for e in step.values()}
        _append(found, text, _finite(first.logprob), top, offset)
        offset += len(text)
    return found


def prompt_completion_logprobs(
    output: RequestOutput, first: str, num_characters: int
) -> dict[str, Any]:
    """Log probabilities of a prompt's tokens, for ``echo``.

    Args:
        first: text of the first token, which has no log probability.
        num_characters: of the text, which may lack a special token that it begins with.
    """
    steps = [step for step in output.prompt_logprobs or () if step is not None]
    found: dict[str, list[Any]] = {name: [] for name in _LISTS}
    _append(found, first, None, None, 0)
    rest = completion_logprobs(steps)
    start = max(0, num_characters - sum(map(len, rest["tokens"])))
    rest["text_offset"] = [start + offset for offset in rest["text_offset"]]
    return joined(found, rest)


def joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The log probabilities of one text and another behind it."""
    return {name: one[name] + other[name] for name in _LISTS}


def prompt_entries(output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """``prompt_logprobs`` in vLLM's form: token id -> log probability, rank and text."""
    if output.prompt_logprobs is None:
        return None
    return [
        None
        if step is None
        else {
            str(token_id): {
                "logprob": _finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in step.items()
        }
        for step in output.prompt_logprobs
    ]


def _append(
    found: dict[str, list[Any]],
    text: str,
    logprob: float | None,
    top: dict[str, float] | None,
    offset: int,
) -> None:
    for name, value in zip(_LISTS, (text, logprob, top, offset), strict=True):
        found[name].append(value)


def chat_logprobs(steps: Sequence[Step], num_top: int) -> dict[str, Any]:
    """Log probabilities of a chat's tokens, with the ``num_top`` likeliest of each."""
    content = []
    for step in steps:
        entries = list(step.values())
        top = [_entry(entry) for entry in entries if entry.rank <= num_top][:num_top]
        content.append({**_entry(entries[0]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(entry: Logprob) -> dict[str, Any]:
    text = entry.decoded_token or ""
    return {
        "token": text,
        "logprob": _finite(entry.logprob),
        "bytes": list(text.encode("utf-8", "replace")),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
