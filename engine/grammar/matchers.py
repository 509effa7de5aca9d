"""The states of outputs within their grammars, and the masks of their next tokens.

A mask is asked for when the last token is known, and read when it has come; nothing here waits
longer than it is told to.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace

from ..messages.step import Ints
from .process import HelperProcess
from .wire import Answer, Ask, Compile, Message, Setup

GRAMMAR_FAILED = "the grammar has failed"
"""First words of the error of an output that ended because its grammar failed."""
_MOST_KEPT = 256
"""Grammars whose first masks are kept for outputs to come."""
_GRACE_S = 0.004
"""Longest time in which a step waits for masks that are quick to make, in seconds."""
_PROVEN = 2
"""Factor on the time limit of a trial: a grammar that comes here has passed its trial."""


class Grammars:
    """Makes matchers for one tokenizer.  One thread at a time calls it and its matchers.

    Args:
        most_outputs: most outputs that run at once.
    """

    def __init__(self, setup: Setup, most_outputs: int) -> None:
        num_rows = 2 * most_outputs  # preempted outputs keep theirs
        self._setup = replace(setup, num_rows=num_rows, limit_s=_PROVEN * setup.limit_s)
        self._memory = os.memfd_create("masks")
        num_bytes = 4 * setup.num_words * num_rows
        os.ftruncate(self._memory, num_bytes)
        rows = np.frombuffer(mmap.mmap(self._memory, num_bytes), np.int32)
        self._rows = rows.reshape(num_rows, setup.num_words)
        self._free_rows = list(range(num_rows))
        self.process = HelperProcess(self._setup, self._memory)
        self.close = weakref.finalize(self, _close, self.process, self._memory)
        self._grammars: OrderedDict[str, _Grammar] = OrderedDict()
        self._num_outputs = self._num_grammars = 0
        self._to_ask: list[Matcher] = []  # what has taken tokens since the last ``flush``
        self.awaited: set[Matcher] = set()
        """Matchers that wait for a mask which is quick to make."""

    def start(self) -> None:
        """Start the helper process, without waiting for it."""
        self.process.start()

    def matcher(self, text: str) -> Matcher:
        grammar = self._grammars.get(text)
        if grammar is None or grammar.error:
            self._num_grammars += 1
            grammar = self._grammars[text] = _Grammar(self, text, self._num_grammars)
            grammar.compile()
            if len(self._grammars) > _MOST_KEPT:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(text)
        return Matcher(self, grammar)

    def settle(self) -> None:
        """Take what has come, and wait for masks that are quick to make, for a short time."""
        if self._to_ask:
            self.flush()
        if not self.process.is_owed:
            return
        self.process.read(0.0)
        deadline = time.monotonic() + _GRACE_S
        while self.awaited and (left := deadline - time.monotonic()) > 0:
            self.process.read(left)
        for matcher in self.awaited:
            matcher.is_slow = True
        self.awaited.clear()

    def flush(self) -> None:
        """Ask for the masks of all tokens that were taken, in one piece."""
        asking, self._to_ask = self._to_ask, []
        for matcher in asking:
            matcher.ask()
        self.process.flush()

    def ask_later(self, matcher: Matcher) -> None:
        """Ask for the matcher's mask with the next ``flush``: more tokens may come before."""
        self._to_ask.append(matcher)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the next answer; returns whether one came."""
        self.flush()
        return self.process.read(timeout_s)

    def new_output(self) -> int:
        """A number that no other output has."""
        self._num_outputs += 1
        return self._num_outputs

    def take_row(self) -> int:
        """A row of the masks' memory, for one output; -1 if all are taken."""
        return self._free_rows.pop() if self._free_rows else -1

    def free_row(self, row: int) -> None:
        """Take back a row."""
        self._free_rows.append(row)

    def row(self, row: int) -> Ints:
        """[words] of a row."""
        mask: Ints = self._rows[row]
        return mask


def _close(process: HelperProcess, memory: int) -> None:
    process.close()
    os.close(memory)


class _Grammar:
    """A grammar and the mask of its first token, which is None until it is compiled."""

    def __init__(self, grammars: Grammars, text: str, number: int) -> None:
        self._process, self._text, self.number = grammars.process, text, number
        self.mask: Ints | None = None
        self.error = ""
        self.is_slow = True
        self._is_compiling = False
        self._then: list[Callable[[], None]] = []

    def compile(self, then: Callable[[], None] | None = None) -> None:
        """Ask the helper to compile it, unless it does already; ``then`` is called afterwards."""
        if then is not None:
            self._then.append(then)
        if not self._is_compiling:
            self._is_compiling = True
            self._process.submit(self)

    def message(self, number: int) -> Message:
        return Compile(number, self.number, self._text)

    def done(self, answer: Answer) -> None:
        self._is_compiling, self.error, self.is_slow = False, answer.error, answer.is_slow
        if not answer.error:
            self.mask = np.frombuffer(answer.mask, np.int32)
        then, self._then = self._then, []
        for each in then:
            each()


class Matcher:
    """The state of one output within its grammar."""

    def __init__(self, grammars: Grammars, grammar: _Grammar) -> None:
        self._grammars, self._grammar = grammars, grammar
        self._tokens: list[int] = []
        self._error = ""
        self._mask: Ints | None = None
        self.is_slow = True
        # What the helper knows of it, and where its masks are; nothing before the first token.
        self._output, self._row, self._num_told, self._generation = 0, -1, 0, -1
        self._is_asking = self._is_closed = False
        self.drafts: list[int] = []
        """Tokens that may come next, one behind the other, and whose masks are known."""
        self._draft_masks: Sequence[Ints] = ()
        self._guess: Sequence[int] = ()
        self._most_drafts = 0

    def copy(self) -> Matcher:
        """Another one at the beginning of an output."""
        return Matcher(self._grammars, self._grammar)

    @property
    def error(self) -> str:
        """Why nothing can come next, or ""."""
        error = self._error or ("" if self._tokens else self._grammar.error)
        return error and f"{GRAMMAR_FAILED}: {error}"

    @property
    def is_ready(self) -> bool:
        """Whether the mask of the next token is known, or an error."""
        if not self._tokens:
            return self._grammar.mask is not None or self._grammar.error != ""
        return self._mask is not None or self._error != ""

    def mask(self, num_drafts: int = 0) -> Ints:
        """[words] a bit a token: whether it may come behind the first ``num_drafts`` of ``drafts``;
        valid until the next ``take``."""
        if num_drafts:
            return self._draft_masks[num_drafts - 1]
        mask = self._mask if self._tokens else self._grammar.mask
        assert mask is not None
        return mask

    def take(self, token_id: int) -> None:
        if not self._tokens:
            self._output, self._row = self._grammars.new_output(), self._grammars.take_row()
            self.is_slow = self._grammar.is_slow
        self._tokens.append(token_id)
        self._mask, self.drafts, self._draft_masks = None, [], ()
        self._guess, self._most_drafts = (), 0
        if not self._is_asking:
            self._is_asking = True
            self._grammars.ask_later(self)

    def guess(self, drafts: Sequence[int], most: int) -> None:
        """Ask, with the mask, for up to ``most`` ``drafts``: what the grammar forces, or what it
        permits of these."""
        self._guess, self._most_drafts = drafts, most

    def ask(self) -> None:
        """Ask for the mask, for ``Grammars``."""
        if self._is_closed:
            self._is_asking = False
            self._forget()
        else:
            self._ask()

    def close(self) -> None:
        """The output has ended."""
        self._is_closed = True
        self._grammars.awaited.discard(self)
        if self._tokens and not self._is_asking:
            self._forget()

    def _forget(self) -> None:
        self._grammars.process.drop([self._output])
        if self._row >= 0:
            self._grammars.free_row(self._row)
            self._row = -1

    def _ask(self) -> None:
        self._is_asking = True
        if not self.is_slow:
            self._grammars.awaited.add(self)
        self._grammars.process.submit(self, flush=False)

    def message(self, number: int) -> Message:
        generation = self._grammars.process.generation
        if generation != self._generation:
            self._generation, self._num_told = generation, 0
        before, tokens = self._num_told, self._tokens[self._num_told :]
        self._num_told = len(self._tokens)
        wish = [*self._guess], self._most_drafts
        return Ask(number, self._output, self._grammar.number, before, tokens, self._row, *wish)

    def done(self, answer: Answer) -> None:
        if answer.is_lost and not self._is_closed:
            self._num_told = self._most_drafts = 0
            self._grammars.awaited.discard(self)
            self._grammar.compile(self._ask_again)
            return
        self._is_asking = False
        self._grammars.awaited.discard(self)
        self.is_slow = answer.is_slow
        self._error = answer.error
        if self._is_closed:
            self._forget()
        elif not self._error and self._num_told < len(self._tokens):
            self._ask()
        else:
            in_row = self._row >= 0
            row = self._grammars.row(self._row) if in_row else np.frombuffer(answer.mask, np.int32)
            self._mask, self.drafts = row, answer.drafts
            if answer.drafts:
                masks = np.frombuffer(answer.draft_masks, np.int32)
                self._draft_masks = [*masks.reshape(len(answer.drafts), -1)]

    def _ask_again(self) -> None:
        if self._grammar.error or self._is_closed:
            self.done(Answer(0, self._grammar.error or "it has ended"))
        else:
            self._ask()
