"""Two halves of a step take turns, so that one computes while the sums of the other travel.

Each half runs in a thread and on a CUDA stream of its own.  When one has enqueued what comes up to
a collective, and the collective, it hands the turn to the other.  On the device, everything runs in
the order in which it was enqueued, except that a collective runs beside what the other half
computes next::

    compute  first 0 | second 0 | first 1 | second 1 | …
    sums               first 0  | second 0 | first 1 | …

So kernels that share a workspace never meet, a half sees what the other has stored before it, and
ranks call their collectives in one order.  Elsewhere ``collective`` costs a look at a variable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch

_T = TypeVar("_T")
_local = threading.local()

BLOCKS_BESIDE = 32
"""Blocks of a collective over peer memory that runs beside a GEMM: as many multiprocessors less for
the GEMM, and enough to keep NVLink busy."""


class _OtherFailedError(Exception):
    """Ends a half whose other half has failed."""


class _Half:
    """What one half tells the other: where its kernels are, and when it may enqueue."""

    other: _Half

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.stream = stream
        self.computed: torch.cuda.Event | None = None
        self.summed: torch.cuda.Event | None = None
        self.ended = self.failed = False
        self._turn = threading.Semaphore(0)

    def await_turn(self) -> None:
        if not self.other.ended:
            self._turn.acquire()
        if self.other.failed:
            raise _OtherFailedError
        self._wait_for(self.other.computed)

    def hand_over(self) -> None:
        self.other._turn.release()

    def begin_collective(self) -> None:
        self.computed = self._now()
        self._wait_for(self.other.summed)

    def end_collective(self) -> None:
        self.summed = self._now()
        self.hand_over()
        self.await_turn()

    def _now(self) -> torch.cuda.Event | None:
        if self.stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def _wait_for(self, event: torch.cuda.Event | None) -> None:
        if self.stream is not None and event is not None:
            self.stream.wait_event(event)


@contextmanager
def collective() -> Iterator[int]:
    """Around the launch of each collective: the other half's turn comes behind it.  The value is
    the most blocks that it may have, or 0 for as many as there are."""
    half: _Half | None = getattr(_local, "half", None)
    if half is None:
        yield 0
        return
    half.begin_collective()
    yield BLOCKS_BESIDE
    half.end_collective()


class Turns:
    """Runs two halves on a device, the second in a thread that lives as long as this object."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="second half")

    def run(self, first: Callable[[], _T], second: Callable[[], _T]) -> tuple[_T, _T]:
        """The results of both, which call as many collectives.  They may be used on the current
        stream.

        Raises:
            Exception: what one of them raised; the other then ends at its next collective.
        """
        current = torch.cuda.current_stream() if self._stream else None
        halves = _Half(current), _Half(self._stream)
        halves[0].other, halves[1].other = halves[1], halves[0]
        inference = torch.is_inference_mode_enabled()

        def in_thread() -> _T:
            stream = torch.cuda.stream(self._stream) if self._stream else nullcontext()
            with torch.inference_mode(inference), stream:
                halves[1].await_turn()
                return _run_half(halves[1], second)

        if self._stream is not None and current is not None:
            self._stream.wait_stream(current)
        later = self._pool.submit(in_thread)
        try:
            made = _run_half(halves[0], first)
        except _OtherFailedError:
            later.result()  # raises what the other half did
            raise
        finally:
            later.exception()  # the other half has ended
        result = later.result()
        if self._stream is not None and current is not None:
            current.wait_stream(self._stream)
        return made, result


def _run_half(half: _Half, run: Callable[[], _T]) -> _T:
    _local.half = half
    try:
        return run()
    except BaseException:
        half.failed = True
        raise
    finally:
        _local.half = None
        half.computed = half._now()
        half.ended = True
        half.hand_over()
