"""Tries grammars before their requests are queued, so that a bad one is its caller's mistake.

A grammar is compiled with the model's tokenizer, and the mask of its first token is made, all in a
process where that may fail, hang or grow.  Verdicts are kept.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path

from ...config import BusyError, MachineError, UserError
from .bounds import check_bounds
from .process import HelperProcess, read_for_ever
from .wire import Answer, Compile, Message, Setup

_MOST_VERDICTS = 1024
_MOST_OPEN = 64
"""Grammars that are tried at once; only those that take long are ever many."""


def grammar_setup(tokenizer_file: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> Setup:
    """What helper processes of a model are started with."""
    return Setup(str(tokenizer_file), vocab_size, sorted(eos_token_ids))


def is_installed() -> bool:
    return find_spec("llguidance") is not None


class GrammarChecks:
    """Says whether grammars are good; any thread may ask.  Its helper process is started by the
    first question, or by ``start``."""

    def __init__(self, setup: Setup) -> None:
        self._process = HelperProcess(setup)
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[str, str] = OrderedDict()
        self._open: dict[str, _Trial] = {}
        self._thread: threading.Thread | None = None
        self.close = weakref.finalize(self, self._process.close)

    def start(self) -> None:
        """Start the helper process, without waiting for it."""
        with self._lock:
            if self._thread is None:
                args = (weakref.ref(self._process),)
                self._thread = threading.Thread(target=read_for_ever, args=args, daemon=True)
                self._process.start()
                self._thread.start()

    def check(self, text: str) -> None:
        """Wait until a grammar has been tried.

        Raises:
            UserError: it is bad, too large, or takes too long.
            MachineError: llguidance is not installed.
            BusyError: too many grammars are tried already.
        """
        self.soon(text).result()

    def soon(self, text: str) -> Future[None]:
        """Start a check, and return a future that ends as ``check`` would."""
        future: Future[None] = Future()
        try:
            if not self._is_told(text, future):
                check_bounds(text)
                if (trial := self._trial(text, future)) is not None:
                    self.start()
                    self._process.submit(trial)
        except UserError as error:
            future.set_exception(error)
        return future

    def _is_told(self, text: str, future: Future[None]) -> bool:
        """Whether the verdict is known, which the future has then."""
        with self._lock:
            verdict = self._verdicts.get(text)
            if verdict is not None:
                self._verdicts.move_to_end(text)
        if verdict is not None:
            _tell(future, verdict)
        return verdict is not None

    def _trial(self, text: str, future: Future[None]) -> _Trial | None:
        with self._lock:
            if (trial := self._open.get(text)) is not None:
                trial.futures.append(future)
                return None
            if not is_installed():
                raise MachineError(
                    "a grammar needs the package llguidance: pip install 'fusewright[serve]'"
                )
            if len(self._open) >= _MOST_OPEN:
                raise BusyError(
                    f"grammar: {_MOST_OPEN} others are being compiled; send it again later"
                )
            trial = self._open[text] = _Trial(self, text, future)
            return trial

    def settle(self, trial: _Trial, error: str) -> None:
        with self._lock:
            self._open.pop(trial.text, None)
            self._verdicts[trial.text] = error
            if len(self._verdicts) > _MOST_VERDICTS:
                self._verdicts.popitem(last=False)
        for future in trial.futures:
            _tell(future, error)


class _Trial:
    def __init__(self, checks: GrammarChecks, text: str, future: Future[None]) -> None:
        self._checks, self.text, self.futures = checks, text, [future]

    def message(self, number: int) -> Message:
        return Compile(number, number, self.text)

    def done(self, answer: Answer) -> None:
        self._checks.settle(self, answer.error)


def _tell(future: Future[None], error: str) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if error:
        future.set_exception(UserError(f"grammar: {error}"))
    else:
        future.set_result(None)
