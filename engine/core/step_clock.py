"""``StepClock``: where the host's time goes in steps, how long none was in flight, and how many
bytes the steps had to read in the time that they took."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from ..messages.step_reads import StepReads
from .batch import ScheduledStep

PHASES = ("schedule", "launch", "wait", "update")
"""Choosing the work, preparing and launching it, waiting for its result, applying that.  A CPU
computes within the launch; a GPU does meanwhile, and who waits for it is bound by it."""
KINDS = ("decode", "mixed")
"""Steps of decodes alone, and those that compute a part of a prompt."""


class StepClock:
    """Sums since the start, in seconds and bytes.

    ``busy_s`` and ``read_bytes`` have the time of each kind of step and the least bytes that it had
    to read.  The time of a step is from its launch, or the end of the step before if that comes
    later, until its result is there: behind its launch if that has run it, as on a CPU, whose
    results are asked for behind the launch of the next step.

    Args:
        reads: tells the bytes of a step.
        now: the time in seconds.
    """

    def __init__(self, reads: StepReads, now: Callable[[], float] = perf_counter) -> None:
        self._reads, self._now = reads, now
        self.busy_s, self.read_bytes = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0)
        self._busy_since = self._ended_at = 0.0
        self.phase_s = dict.fromkeys(PHASES, 0.0)
        self._at = self._idle_since = now()
        self._idle_s, self._num_in_flight = 0.0, 0
        self._rested, self._outside_s = True, 0.0

    def start(self) -> None:
        """A step of the core begins."""
        now = self._now()
        self._outside_s += now - self._at
        self._at = now

    def rest(self) -> None:
        """No request is left."""
        self._rested = True

    def lap(self, phase: str) -> None:
        now = self._now()
        self.phase_s[phase] += now - self._at
        self._at = now

    def in_flight(self, count: int) -> None:
        """``count`` steps are launched, or about to be, and have not been waited for."""
        if not self._num_in_flight and count:
            self._busy_since = self._now()
            self._idle_s += self._busy_since - self._idle_since
        elif self._num_in_flight and not count:
            self._idle_since = self._now()
        self._num_in_flight = count

    def launching(self, step: ScheduledStep) -> None:
        """``step`` is about to be launched, and counted as in flight already."""
        step.launched_at = self._now()

    def launched(self, step: ScheduledStep, has_run: bool) -> None:
        """``step`` is on its way, or ``has_run``.  Its bytes are counted now, while the device
        computes."""
        self.lap("launch")
        if has_run:
            self._end(step)
        step.read_bytes = self._reads.count(step.batch.starts, step.batch.query_lens)

    def ended(self, step: ScheduledStep, kind: str) -> tuple[float | None, float | None]:
        """The result of ``step`` is there, by the last lap.

        Returns:
            its time, None if that is not known; and the time since the end of the step before, with
            what the core did in between and without what others did, None if there was no step
            since the last rest.
        """
        if step.seconds is None:
            self._end(step)
        # A step that nobody waited for ended unseen, some time before those that came after it.
        if step.seconds is None or step.launched_at < self._busy_since:
            return None, step.whole_s
        self.busy_s[kind] += step.seconds
        self.read_bytes[kind] += step.read_bytes
        return step.seconds, step.whole_s

    def _end(self, step: ScheduledStep) -> None:
        """``step`` has ended, by the last lap."""
        now = self._at
        step.seconds = now - max(step.launched_at, self._ended_at)
        step.whole_s = None if self._rested else now - self._ended_at - self._outside_s
        self._rested, self._outside_s, self._ended_at = False, 0.0, now

    @property
    def idle_s(self) -> float:
        """Time in which no step was in flight, which a device has spent idle; it may have spent
        more."""
        now = self._idle_since if self._num_in_flight else self._now()
        return self._idle_s + now - self._idle_since
