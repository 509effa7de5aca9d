"""Token ids of one output -> text, as they come: whole characters only, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .sampling_params import SamplingParams

# A character has at most 4 bytes, so at most 3 trailing replacement characters can still become one.
_MAX_INCOMPLETE = 3
# Prompt tokens in front of the output: decoders drop the space of a first word.
_CONTEXT_TOKENS = 6
# Only text that is not UTF-8 can keep the window open for so long.
_MAX_WINDOW = 32
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Decodes(Protocol):
    """The part of a tokenizer that text output needs."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class TextStream:
    """Decodes ids incrementally, through a short window of ids of which a part is already text.

    The concatenation of everything returned equals decoding all ids at once, except where decoding
    more bytes changes the text before them (byte fallback on invalid UTF-8): text that is out is
    never taken back.
    """

    def __init__(
        self, tokenizer: Decodes, context_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = list(context_ids[-_CONTEXT_TOKENS:])
        self._context_text = self._decode(self._window)
        self._num_context = len(self._window)
        self._fresh_text = ""  # returned already, of the ids after the context

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain after these ids."""
        self._window.extend(token_ids)
        fresh = self._decode_fresh()
        certain = fresh
        for _ in range(_MAX_INCOMPLETE):
            certain = certain.removesuffix(_REPLACEMENT)
        new = certain[len(self._fresh_text) :]
        self._fresh_text += new
        if len(certain) == len(fresh):
            self._advance(fresh, len(token_ids))
        elif len(self._window) - self._num_context > _MAX_WINDOW:
            new += fresh[len(self._fresh_text) :]
            self._advance(fresh, len(token_ids))
        return new

    def flush(self) -> str:
        """The rest at the end: the bytes of a character that never became whole."""
        fresh = self._decode_fresh()
        new = fresh[len(self._fresh_text) :]
        self._fresh_text = fresh
        return new

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens)

    def _decode_fresh(self) -> str:
        """Text of the ids after the context."""
        text = self._decode(self._window)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        # The new ids change how the context reads: go on without it.
        del self._window[: self._num_context]
        self._num_context, self._context_text = 0, ""
        return self._decode(self._window)

    def _advance(self, fresh: str, num_newest: int) -> None:
        """All text is out: what was fresh becomes context.  Ids without text (special tokens) do
        not, since a decoder would take the next word for the first one behind them."""
        if fresh:
            del self._window[: self._num_context]
            del self._window[:-_CONTEXT_TOKENS]
            self._context_text = self._decode(self._window)
        elif num_newest:
            del self._window[-num_newest:]
        self._num_context = len(self._window)
        self._fresh_text = ""


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
        found = [(at + len(s), at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return text[: end if self._include_in_output else start], stop
        shown = len(text)
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(s.startswith(text[-length:]) for s in self._stop):
                shown -= length
                break
        self._held = text[shown:]
        return text[:shown], None

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

    def push(self, token_ids: Sequence[int]) -> str | None:
        """Add tokens; returns the stop string that they complete, if any.  Text of the first
        ``min_tokens`` tokens is no part of a stop string: push those one at a time."""
        self._num_tokens += len(token_ids)
        new = self._stream.push(token_ids)
        if self._num_tokens <= self._min_tokens:
            self.text += new
            return None
        shown, stop = self._stops.push(new)
        self.text += shown
        return stop

    def finish(self) -> str | None:
        """Add the text held back; returns the stop string that an incomplete character's
        replacement completes, in practice never."""
        shown, stop = self._stops.push(self._stream.flush())
        self.text += shown + self._stops.flush()
        return stop
