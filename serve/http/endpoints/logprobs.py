"""Log probabilities in OpenAI's two forms: of completions and of chats.

Completions know a token by a name alone. Its name is its text; that of a part of a character is its
bytes, as ``bytes:\\xe2\\x80``. Where two of a step would have one name, the less likely is
``token_id:N``, as all are for who asks for ``return_tokens_as_token_ids``, which vLLM has too.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from ....engine.frontend.outputs import Logprob, RequestOutput
from ....engine.frontend.tokenizer import Tokenizer

Step = dict[int, Logprob]
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot hold; vLLM uses the same number."""


def completion_logprobs(
    steps: Sequence[Step], offsets: Sequence[int] | None, before: int = 0, as_ids: bool = False
) -> dict[str, Any]:
    """Log probabilities of a completion's tokens.  A step's first entry is the token itself.

    Args:
        offsets: where each token begins in its text; None without a tokenizer.
        before: characters before that text.
        as_ids: name the tokens by their ids.
    """
    lists: dict[str, list[Any]] = {name: [] for name in _LISTS}
    for step, offset in zip(steps, offsets or [0] * len(steps), strict=True):
        names = _names(step, as_ids)
        own = next(iter(step))
        lists["tokens"].append(names[own])
        lists["token_logprobs"].append(_finite(step[own].logprob))
        lists["top_logprobs"].append({names[id]: _finite(e.logprob) for id, e in step.items()})
        lists["text_offset"].append(before + offset)
    return lists


def _names(step: Step, as_ids: bool) -> dict[int, str]:
    """A name for each token of a step, all different.  The token itself comes first."""
    names: dict[int, str] = {}
    taken: set[str] = set()
    for token_id, entry in step.items():
        name = _name(token_id, None if as_ids else entry.token_bytes)
        names[token_id] = f"token_id:{token_id}" if name in taken else name
        taken.add(names[token_id])
    return names


def _name(token_id: int, token_bytes: bytes | None) -> str:
    if token_bytes is None:
        return f"token_id:{token_id}"
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def prompt_completion_logprobs(
    output: RequestOutput, tokenizer: Tokenizer | None, num_characters: int, as_ids: bool = False
) -> dict[str, Any]:
    """Log probabilities of a prompt's tokens, for ``echo``; the first has none.

    Args:
        num_characters: length of the text, which may lack a special token at its beginning.
    """
    steps = [step for step in output.prompt_logprobs or () if step is not None]
    first, *_ = ids = output.prompt_token_ids
    offsets = [0] * len(ids)
    if tokenizer is not None:
        offsets = _offsets([tokenizer.token_bytes(each) for each in ids], num_characters)
    own = None if as_ids or tokenizer is None else tokenizer.token_bytes(first)
    without = {
        "tokens": [_name(first, own)],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": offsets[:1],
    }
    return joined(without, completion_logprobs(steps, offsets[1:], as_ids=as_ids))


def _offsets(pieces: Sequence[bytes], num_characters: int) -> list[int]:
    """Where each piece begins in the text of them all; the text may lack a part of their beginning,
    such as a special token or a space."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, end = [], 0
    for piece in pieces:
        offsets.append(end)
        end += len(decoder.decode(piece))
    lacking = end + len(decoder.decode(b"", True)) - num_characters
    return [max(0, offset - lacking) for offset in offsets]


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


def chat_logprobs(
    steps: Sequence[Step], num_top: int, as_ids: bool | None = None
) -> dict[str, Any]:
    """Log probabilities of a chat's tokens, with the ``num_top`` likeliest of each in order."""
    content = []
    for step in steps:
        entries = [(entry.rank, _entry(id, entry, as_ids)) for id, entry in step.items()]
        own = entries[0][1]
        entries.sort(key=lambda ranked: -ranked[1]["logprob"])
        top = [entry for rank, entry in entries if rank <= num_top][:num_top]
        content.append({**own, "top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(token_id: int, entry: Logprob, as_ids: bool | None) -> dict[str, Any]:
    own = entry.token_bytes
    return {
        "token": f"token_id:{token_id}" if as_ids or own is None else entry.decoded_token,
        "logprob": _finite(entry.logprob),
        "bytes": None if own is None else list(own),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
