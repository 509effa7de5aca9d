"""Which tokens a grammar permits next: structured output.

A request with a grammar is scheduled only when the host knows its last token, since the mask of the
next depends on it.  The mask is made while the step of the others runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from ...config import MachineError, UserError
from ..messages.step import Ints


class Matcher:
    """The state of one output within its grammar.

    Args:
        matcher: llguidance's.
        num_words: 32-bit words of a mask.
    """

    def __init__(self, matcher: Any, num_words: int) -> None:
        self._matcher, self._num_words = matcher, num_words

    def copy(self) -> Matcher:
        """Another one in the same state."""
        return Matcher(self._matcher.deep_copy(), self._num_words)

    def mask(self) -> Ints:
        """[num_words] a bit a token: whether it may come next."""
        mask = np.zeros(self._num_words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return mask

    def take(self, token_id: int) -> str:
        """Go on behind a token; returns why that is impossible, or ""."""
        if self._matcher.consume_token(token_id):
            return ""
        # Once it has failed, llguidance permits the end alone, which must not pass for one.
        message = self._matcher.get_error().splitlines()[0]
        return f"the grammar has failed: {message}"


class Grammars:
    """Makes matchers for one tokenizer, which is read when the first is made, or by ``load``.

    Args:
        tokenizer_file: ``tokenizer.json``.
        vocab_size: columns of the logits.
        eos_token_ids: ids that end an output.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._file, self._vocab_size = tokenizer_file, vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = Lock()
        self._tokenizer: Any = None

    def load(self) -> None:
        """Read the tokenizer, which takes tenths of a second if it is large.

        Raises:
            MachineError: llguidance is not installed.
            UserError: there is no tokenizer.
        """
        with self._lock:
            if self._tokenizer is not None:
                return
            try:
                from llguidance import LLTokenizer
            except ModuleNotFoundError as error:
                raise MachineError(
                    "a grammar needs the package llguidance: pip install 'fusewright[serve]'"
                ) from error
            if not self._file.is_file():
                raise UserError(f"grammar: {self._file}: no such file; a grammar needs a tokenizer")
            eos = self._eos_token_ids or None
            self._tokenizer = LLTokenizer(str(self._file), self._vocab_size, eos)

    def matcher(self, grammar: str) -> Matcher:
        """A matcher at the beginning of an output.

        Raises:
            UserError: the grammar is bad.
        """
        self.load()
        from llguidance import LLMatcher

        made = LLMatcher(self._tokenizer, grammar, log_level=0)
        if made.is_error():
            raise UserError(f"grammar: {made.get_error().splitlines()[0]}")
        return Matcher(made, -(-self._vocab_size // 32))
