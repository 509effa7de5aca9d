"""``StepClock``: where the host's time goes in steps, and how long none was in flight."""

from __future__ import annotations

from time import perf_counter

PHASES = ("schedule", "launch", "wait", "update")
"""Choosing the work, preparing and launching it, waiting for its result, applying that.  A CPU
computes within the launch; a GPU does meanwhile, and who waits for it is bound by it."""


class StepClock:
    """Sums in seconds since the start."""

    def __init__(self) -> None:
        self.phase_s = dict.fromkeys(PHASES, 0.0)
        self._at = self._idle_since = perf_counter()
        self._idle_s, self._num_in_flight = 0.0, 0

    def start(self) -> None:
        """A step of the core begins."""
        self._at = perf_counter()

    def lap(self, phase: str) -> None:
        """What was done since the last call was ``phase``."""
        now = perf_counter()
        self.phase_s[phase] += now - self._at
        self._at = now

    def in_flight(self, count: int) -> None:
        """``count`` steps are launched, or about to be, and have not been waited for."""
        if not self._num_in_flight and count:
            self._idle_s += perf_counter() - self._idle_since
        elif self._num_in_flight and not count:
            self._idle_since = perf_counter()
        self._num_in_flight = count

    @property
    def idle_s(self) -> float:
        """Time in which no step was in flight, which a device has spent idle; it may have spent
        more."""
        now = self._idle_since if self._num_in_flight else perf_counter()
        return self._idle_s + now - self._idle_since
