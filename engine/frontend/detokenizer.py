"""Turns the token ids of one output into text as they come.

``TextStream`` gives whole characters only, ``StopStrings`` cuts the text at the first stop string,
and ``Detokenizer`` joins the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..messages.sampling_params import SamplingParams

# Prompt tokens that the first output token is decoded with.
_CONTEXT_TOKENS = 6
# Only bytes that are no UTF-8, or special tokens, stay without certain text for so long.
_MAX_FRESH = 32
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Decodes(Protocol):
    """The part of a tokenizer that text output needs."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class TextStream:
    """Decodes ids incrementally, through a short window: ids whose text is out (the context, since
    decoders treat a first word differently), then fresh ones.

    The concatenation of everything returned equals decoding all ids at once, except where more
    bytes change the text before them (byte fallback on invalid UTF-8): text that is out is never
    taken back.
    """

    def __init__(
        self, tokenizer: Decodes, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []
        self._context_text = ""
        self._fresh: list[int] = []
        self._num_out = 0  # characters of the fresh ids' text that are out
        self._prompt_end = list(prompt_token_ids[-_CONTEXT_TOKENS:])  # read behind the first step

    def push(self, token_id: int) -> str:
        """The text that is certain after this id."""
        self._fresh.append(token_id)
        text = self._fresh_text()
        # Usually the bytes of an incomplete character.  All of them, since with byte fallback one
        # missing byte makes the whole run of bytes unreadable.
        certain = text.rstrip(_REPLACEMENT)
        # Ids without text (special tokens) stay fresh: as the whole context they would make the
        # next word a first one.
        complete = bool(text) and len(certain) == len(text)
        if not complete and len(self._fresh) <= _MAX_FRESH:
            new = certain[self._num_out :]
            self._num_out += len(new)
            return new
        new = text[self._num_out :]
        if text:
            self._set_context(self._fresh[-_MAX_FRESH:])
        self._fresh, self._num_out = [], 0
        return new

    def flush(self, token_ids: Sequence[int] = ()) -> str:
        """Return the rest of the text at the end: of the last ids, and of a character that never
        became complete."""
        self._fresh.extend(token_ids)
        new = self._fresh_text()[self._num_out :]
        self._num_out += len(new)
        return new

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens)

    def _fresh_text(self) -> str:
        if self._prompt_end:
            self._set_context(self._prompt_end)
            self._prompt_end = []
        text = self._decode(self._context + self._fresh)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        # The new ids change how the context reads: go on without it.
        self._context, self._context_text = [], ""
        return self._decode(self._fresh)

    def _set_context(self, token_ids: list[int]) -> None:
        """Take the longest end of ``token_ids`` that consists of whole characters."""
        for start in range(len(token_ids)):
            text = self._decode(token_ids[start:])
            if _REPLACEMENT not in text:
                self._context, self._context_text = token_ids[start:], text
                return
        self._context, self._context_text = [], ""


class StopStrings:
    """Finds the stop string that is complete first, as if text came character by character; so
    the result does not depend on where tokens end."""

    def __init__(self, stop: Sequence[str], include_in_output: bool) -> None:
        self._stop = stop
        self._include_in_output = include_in_output
        self._longest = max((len(s) for s in stop), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be shown, stop string found or None).

        Text that may be the beginning of a stop string is held back, everything else is shown.
        """
        text = self._held + text
        matches = [(at + len(s), at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if matches:
            end, start, stop = min(matches)
            self._held = ""
            return text[: end if self._include_in_output else start], stop
        shown = len(text)
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(s.startswith(text[-length:]) for s in self._stop):
                shown -= length
                break
        self._held = text[shown:]
        return text[:shown], None

    @property
    def num_held(self) -> int:
        """Characters that are held back."""
        return len(self._held)

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class Detokenizer:
    """The text of one output; ``text`` only ever grows."""

    def __init__(
        self, tokenizer: Decodes, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self.text = ""
        self._stream = TextStream(tokenizer, prompt_token_ids, params.skip_special_tokens)
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    @property
    def num_characters(self) -> int:
        """Number of complete characters, with those held back: the offset of the next token.  A
        token that continues a character begins where that character does."""
        return len(self.text) + self._stops.num_held

    def push(self, token_id: int) -> str | None:
        """Add a token; returns the stop string that it completes, if any.  Text of the first
        ``min_tokens`` tokens is no part of a stop string."""
        self._num_tokens += 1
        new = self._stream.push(token_id)
        if self._num_tokens <= self._min_tokens:
            self.text += new
            return None
        shown, stop = self._stops.push(new)
        self.text += shown
        return stop

    def finish(self, token_ids: Sequence[int] = ()) -> None:
        """Add the last tokens, unsearched, and the text held back: nothing more will come."""
        self.text += self._stops.flush() + self._stream.flush(token_ids)
