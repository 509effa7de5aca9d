"""Drafts that a grammar permits: the tokens that it forces, or the first ones of a guess."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from .wire import Ask


def look_ahead(
    matcher: Any, mask: bytes, ask: Ask, ends: Container[int], mask_of: Callable[[Any], bytes]
) -> tuple[list[int], list[bytes]] | None:
    """The drafts that are asked for, and the mask behind each; the matcher stays where it is.

    Args:
        matcher: llguidance's, behind all tokens of an output.
        mask: of the next token, a bit a token.
        ends: tokens behind which nothing comes.
        mask_of: the mask of a matcher's next token.

    Returns:
        None if the matcher cannot go back to where it was.
    """
    drafts: list[int] = []
    masks: list[bytes] = []
    if not ask.most_drafts:
        return drafts, masks
    num_taken = 0
    for token_id in (matcher.compute_ff_tokens() or ask.drafts)[: ask.most_drafts]:
        is_permitted = mask[token_id >> 3] >> (token_id & 7) & 1
        if token_id in ends or not is_permitted or not matcher.consume_token(token_id):
            break
        num_taken += 1
        mask = mask_of(matcher)
        if matcher.is_error() or not any(mask):
            break
        drafts.append(token_id)
        masks.append(mask)
    if num_taken and not matcher.rollback(num_taken):
        return None
    return drafts, masks
