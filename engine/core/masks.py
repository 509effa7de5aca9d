"""Decides what a request with a grammar may sample next, where other wishes contradict the form.

The form is kept whatever else is asked. A form that may end here ends if ``bad_words`` leave
nothing else, and ``min_tokens`` gives way before it would leave nothing. Within a form that must go
on, bans that leave nothing end the request with an error.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ..grammar.matchers import Matcher
from ..messages.step import Ints
from .request import Request


def permitted(request: Request, matcher: Matcher, drafts: Sequence[int] = ()) -> Ints:
    """[num_words] a bit a token: whether it may come behind ``drafts``, by all that the request
    asks for.  No bit is set if nothing may, which ends the request alone."""
    mask = matcher.mask(len(drafts))
    banned = request.banned_ids(drafts)
    left = _without(mask, banned) if banned else mask
    if not left.any():
        return mask & ~_without(mask, request.eos_token_ids)
    if len(request.output_token_ids) + len(drafts) < request.sampling_params.min_tokens:
        # A stop id that the form demands does not end the output yet.
        for ends in (request.stop_ids | request.eos_token_ids, request.eos_token_ids):
            longer = _without(left, ends)
            if longer.any():
                return longer
    return left


def only(token_id: int, vocab_size: int) -> Ints:
    """[num_words] a bit a token: none but one."""
    mask = np.zeros((vocab_size + 31) // 32, np.uint32)
    mask[token_id >> 5] = np.uint32(1) << np.uint32(token_id & 31)
    return mask.view(np.int32)


def _without(mask: Ints, token_ids: Collection[int]) -> Ints:
    ids = np.fromiter((each for each in token_ids if each < 32 * mask.size), np.int64)
    words = mask.view(np.uint32).copy()
    np.bitwise_and.at(words, ids >> 5, ~(np.uint32(1) << (ids & 31).astype(np.uint32)))
    return words.view(np.int32)
