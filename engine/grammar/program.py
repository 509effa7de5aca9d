"""The program of a helper process: compiles grammars and makes masks for the process that started
it, and ends with it.

Run as ``python -m fusewright.engine.grammar.program SOCKET MEMORY SETUP``, with the descriptors
of a socket and of the masks' memory, and a ``Setup`` as JSON. Whatever can be slow has a thread
of its own, with a large stack, as llguidance's work is as deep as a grammar's references; it lets
other threads run meanwhile. The thread that reads makes quick masks itself; when one turns out
slow, the watchdog has another thread go on reading.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from .drafts import look_ahead
from .reasons import said, why_no_tokenizer
from .wire import BYTES, RECYCLED, UP, Answer, Ask, Compile, Message, Setup, bodies, framed

_STACK_BYTES = 256 << 20
"""Size of each thread's stack, in bytes.  Only pages that are touched take memory."""
_MOST_GRAMMARS = 256
_MOST_CHARACTERS = 2 << 20
"""Most characters of all cached grammars together; one may take 400 bytes when compiled."""
_LOOK_S = 0.01
"""Time between two looks of the watchdog while something runs, in seconds."""
_QUICK_S = 0.005
"""Processor time beyond which a mask is slow, in seconds."""
_TOGETHER_S = 0.001
"""Time in which the answers of quick masks are sent in one piece, in seconds."""
_PATIENCE_S = 0.05
"""Processor time behind which a job has the lowest priority, in seconds."""
_MOST_WAITED = 4
"""Times the limit of its processor time that a job may take in all, on a machine that is busy."""
_ITEMS_IN_ROW, _ITEMS_IN_STEP = 20_000, 200_000
"""Limits of llguidance, ten and four times its defaults: thousands of choices have as many."""
_MOST_ABANDONED = 4
"""Jobs beyond their limit that go on, as no thread can be ended, until the process is."""


_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class _Compiled:
    """A compiled grammar; ``debt_s`` is by how much its masks were slow lately, in seconds."""

    def __init__(self, matcher: Any, num_characters: int) -> None:
        self.matcher, self.num_characters, self.debt_s = matcher, num_characters, 0.0

    @property
    def is_slow(self) -> bool:
        return self.debt_s > _QUICK_S

    def took(self, seconds: float) -> None:
        self.debt_s = max(0.0, 0.9 * self.debt_s + seconds - _QUICK_S / 5)


class _Output:
    def __init__(self, matcher: Any, compiled: _Compiled) -> None:
        self.matcher, self.compiled, self.num_tokens = matcher, compiled, 0


class _Running:
    """A job that a thread runs."""

    def __init__(self, job: int, reads: bool) -> None:
        self.job, self.reads = job, reads
        self.native_id = threading.get_native_id()
        self.clock = time.pthread_getcpuclockid(threading.get_ident())
        self.start_s, self.spent_s = time.clock_gettime(self.clock), 0.0
        self.began_s = time.monotonic()
        self.has_yielded = False


class _Lane:
    """Runs work in threads, ``most`` at once."""

    def __init__(self, most: int) -> None:
        self._most, self._num = most, 0
        self._work: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()

    def run(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._work.append(work)
            if self._num == self._most:
                return
            self._num += 1
        threading.Thread(target=self._loop, daemon=True).start()

    def _loop(self) -> None:
        _be_nice(threading.get_native_id(), 10)
        while True:
            with self._lock:
                if not self._work:
                    self._num -= 1
                    return
                work = self._work.popleft()
            work()


class Helper:
    """Does the jobs that come through a socket.

    Args:
        memory: holds the masks, ``num_rows`` of them.
    """

    def __init__(self, connection: socket.socket, memory: Any, setup: Setup) -> None:
        self._connection, self._memory, self._setup = connection, memory, setup
        self._sending = threading.Lock()
        self._to_send, self._sent_s = bytearray(), 0.0
        self._tokenizer: Any = None
        self._why_none = "the tokenizer is not loaded"
        self._grammars: OrderedDict[int, _Compiled] = OrderedDict()
        self._outputs: dict[int, _Output] = {}
        self._changing = threading.Lock()
        self._running: dict[int, _Running] = {}
        self._is_busy = threading.Event()
        self._num_abandoned = 0
        self._compiling, self._asking = _Lane(32), _Lane(16)
        self._reader: object = None
        self._reading = threading.Lock()
        self._data = bytearray()
        self._read: deque[Message] = deque()
        self._base_bytes = 0
        self._last_word = (1 << ((setup.vocab_size - 1) % 32 + 1)) - 1
        self._limits = LLParserLimits(
            verbose_errors=False, max_items_in_row=_ITEMS_IN_ROW, step_max_items=_ITEMS_IN_STEP
        )

    def load(self) -> None:
        """Read the tokenizer.  Its vocabulary may be smaller or larger than the logits."""
        setup = self._setup
        eos = sorted({i for i in setup.eos_token_ids if i < setup.vocab_size}) or None
        try:
            if setup.tokenizer_file != BYTES and not Path(setup.tokenizer_file).is_file():
                raise ValueError(f"{setup.tokenizer_file}: no such file")
            try:
                self._tokenizer = LLTokenizer(setup.tokenizer_file, setup.vocab_size, eos)
            except ValueError as error:
                if "vocab size too small" not in str(error):
                    raise
                self._tokenizer = LLTokenizer(setup.tokenizer_file, None, eos)
        except BaseException as error:  # a panic of Rust is no Exception
            self._why_none = why_no_tokenizer(setup.tokenizer_file, error)
        self._base_bytes = _resident_bytes()

    def serve(self) -> None:
        """Do what comes, and watch over it; never returns."""
        self._send(Answer(UP))
        self._read_on()
        while True:
            self._is_busy.wait()
            time.sleep(_LOOK_S)
            self._look()

    def _read_on(self) -> None:
        """Have a new thread read, instead of one that is held up."""
        self._reader = token = object()
        threading.Thread(target=self._read_loop, args=(token,), daemon=True).start()

    def _read_loop(self, token: object) -> None:
        try:
            while True:
                with self._reading:
                    if self._reader is not token:
                        return
                    message = self._next()
                self._handle(message)
                if not self._read or time.monotonic() - self._sent_s > _TOGETHER_S:
                    self._flush()
        except (ConnectionResetError, BrokenPipeError):
            os._exit(0)  # whoever started this has ended, and left something unread
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _next(self) -> Message:
        while not self._read:
            received = self._connection.recv(1 << 20)
            if not received:
                os._exit(0)  # whoever started this has ended
            self._data += received
            self._read.extend(_decoder.decode(body) for body in bodies(self._data))
        return self._read.popleft()

    def _handle(self, message: Message) -> None:
        if isinstance(message, Compile):
            self._compiling.run(lambda: self._do(message.job, lambda: self._compile(message)))
        elif isinstance(message, Ask):
            compiled = self._compiled_of(message)
            if compiled is None:
                self._send(Answer(message.job, is_lost=True))
            elif compiled.is_slow:
                self._asking.run(lambda: self._do(message.job, lambda: self._ask(message)))
            else:
                self._do(message.job, lambda: self._ask(message), reads=True)
        else:
            for output in message.outputs:
                self._outputs.pop(output, None)

    def _compiled_of(self, ask: Ask) -> _Compiled | None:
        if ask.num_before == 0:
            with self._changing:
                compiled = self._grammars.get(ask.grammar)
                if compiled is not None:
                    self._grammars.move_to_end(ask.grammar)
            return compiled
        output = self._outputs.get(ask.output)
        is_there = output is not None and output.num_tokens == ask.num_before
        return output.compiled if output is not None and is_there else None

    def _do(self, job: int, work: Callable[[], Answer], *, reads: bool = False) -> None:
        """Run a job and send its answer, unless it has been abandoned."""
        running = _Running(job, reads)
        with self._changing:
            self._running[job] = running
            if not self._is_busy.is_set():
                self._is_busy.set()
        try:
            answer = work()
        except BaseException as error:  # a panic of Rust is no Exception
            answer = Answer(job, f"{type(error).__name__}: {error}"[:500])
        with self._changing:
            if self._running.pop(job, None) is None:
                self._num_abandoned -= 1
                return
        self._send(answer, flush=not reads)

    def _send(self, answer: Answer, *, flush: bool = True) -> None:
        with self._sending:
            self._to_send += framed(answer)
        if flush:
            self._flush()

    def _flush(self) -> None:
        self._sent_s = time.monotonic()
        with self._sending:
            try:
                self._connection.sendall(self._to_send)
            except OSError:
                os._exit(0)
            self._to_send.clear()

    def _compile(self, message: Compile) -> Answer:
        if self._tokenizer is None:
            return Answer(message.job, self._why_none)
        matcher = LLMatcher(self._tokenizer, message.text, log_level=0, limits=self._limits)
        if matcher.is_error():
            return Answer(message.job, said(matcher))
        compiled = _Compiled(matcher, len(message.text))
        start = time.thread_time()
        mask = self._mask(matcher)
        compiled.took(time.thread_time() - start)
        if matcher.is_error():
            return Answer(message.job, said(matcher))
        if not any(mask):
            return Answer(message.job, "no token of the model can begin it")
        with self._changing:
            self._grammars[message.grammar] = compiled
            kept = self._grammars.values()
            while len(kept) > _MOST_GRAMMARS or (
                len(kept) > 1 and sum(each.num_characters for each in kept) > _MOST_CHARACTERS
            ):
                self._grammars.popitem(last=False)
        return Answer(message.job, mask=mask, is_slow=compiled.is_slow)

    def _ask(self, ask: Ask) -> Answer:
        start = time.thread_time()
        if ask.num_before == 0:
            compiled = self._grammars.get(ask.grammar)
            if compiled is None:
                return Answer(ask.job, is_lost=True)
            output = _Output(compiled.matcher.deep_copy(), compiled)
        else:
            output = self._outputs[ask.output]
        matcher, compiled = output.matcher, output.compiled
        for token_id in ask.tokens:
            if not matcher.consume_token(token_id):
                return Answer(ask.job, said(matcher))
        output.num_tokens = ask.num_before + len(ask.tokens)
        mask = self._mask(matcher)
        compiled.took(time.thread_time() - start)
        if matcher.is_error():
            return Answer(ask.job, said(matcher))
        ends = self._setup.eos_token_ids
        ahead = ([], []) if compiled.is_slow else look_ahead(matcher, mask, ask, ends, self._mask)
        if ahead is None:
            return Answer(ask.job, is_lost=True)
        with self._changing:
            if ask.job in self._running:  # else its row may be another's by now
                self._outputs[ask.output] = output
                if ask.row >= 0:
                    begin = ask.row * len(mask)
                    self._memory[begin : begin + len(mask)] = mask
                    mask = b""
        drafts, masks = ahead
        return Answer(
            ask.job,
            mask=mask,
            is_slow=compiled.is_slow,
            drafts=drafts,
            draft_masks=b"".join(masks),
        )

    def _mask(self, matcher: Any) -> bytes:
        """A bit for each column of the logits, whatever the tokenizer's vocabulary is."""
        num_bytes = 4 * self._setup.num_words
        mask: bytes = matcher.compute_bitmask()[:num_bytes].ljust(num_bytes, b"\0")
        last = int.from_bytes(mask[-4:], "little") & self._last_word
        return mask[:-4] + last.to_bytes(4, "little")

    def _look(self) -> None:
        """Let slow jobs yield, answer for those beyond their limit, and end the process if too much
        is left over."""
        limit_s = self._setup.limit_s
        with self._changing:
            running = list(self._running.values())
            for each in running:
                each.spent_s = time.clock_gettime(each.clock) - each.start_s
            if not running and not self._num_abandoned:
                self._is_busy.clear()
        for each in running:
            if each.reads and each.spent_s > _QUICK_S:
                each.reads = False
                self._read_on()
            is_late = time.monotonic() - each.began_s > _MOST_WAITED * limit_s
            if each.spent_s > limit_s or is_late:
                self._abandon(
                    each,
                    f"it takes more than {limit_s:g} s of processor time, "
                    f"or {_MOST_WAITED * limit_s:g} s in all; simplify it",
                )
            elif each.spent_s > _PATIENCE_S and not each.has_yielded:
                each.has_yielded = True
                _be_nice(each.native_id, 19)
        if _resident_bytes() - self._base_bytes > self._setup.most_bytes:
            if running:
                worst = max(running, key=lambda each: each.spent_s)
                most = self._setup.most_bytes / 2**30
                self._abandon(worst, f"it takes more than {most:g} GiB of memory; simplify it")
            self._end()
        if self._num_abandoned >= (_MOST_ABANDONED if self._running else 1):
            self._end()

    def _abandon(self, running: _Running, why: str) -> None:
        with self._changing:
            if self._running.pop(running.job, None) is None:
                return
            self._num_abandoned += 1
        self._send(Answer(running.job, why))

    def _end(self) -> None:
        with self._sending:
            os._exit(RECYCLED)


def _be_nice(native_id: int, nice: int) -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, native_id, nice)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def main(argv: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    connection = socket.socket(fileno=int(argv[0]))
    setup = msgspec.json.decode(argv[2], type=Setup)
    num_bytes = 4 * setup.num_words * setup.num_rows
    memory = mmap.mmap(int(argv[1]), num_bytes) if num_bytes else None
    threading.stack_size(_STACK_BYTES)
    helper = Helper(connection, memory, setup)
    helper.load()
    helper.serve()


if __name__ == "__main__":
    main(sys.argv[1:])
