"""``StepTimes`` learns from measured steps how long the next one takes; ``StepPace`` bounds steps.

Neither has a clock: times come in from outside, so that equal steps that took equally long are
followed by equal ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log2
from typing import TypeVar

from msgspec import Struct

from .batch import ScheduledStep
from .request import Request

_WEIGHT = 0.2
"""Of a new measurement in the moving average."""
_FIRST = 3
"""Of so many first measurements the shortest counts: one may have captured a graph."""
_OUTLIER = 2.0
"""A later measurement counts as this multiple of the average at most."""
_UNTRIED = 256
"""Prompt tokens of a step where no step with a prompt has been measured."""
_LEAST = 16
"""Prompt tokens of a step whose decodes alone take as long as the bound: prompts go on."""


_Key = TypeVar("_Key")


class _Average(Struct):
    """A moving average of seconds, and of the number of tokens that they were measured at."""

    seconds: float
    tokens: float
    count: int = 1

    def add(self, seconds: float, tokens: float) -> None:
        self.count += 1
        if self.count <= _FIRST:
            self.seconds, self.tokens = min(self.seconds, seconds), (self.tokens + tokens) / 2
            return
        limited = min(seconds, _OUTLIER * self.seconds) if self.seconds else seconds
        self.seconds += _WEIGHT * (limited - self.seconds)
        self.tokens += _WEIGHT * (tokens - self.tokens)


class StepTimes:
    """Predicts the time of a step from the moving averages of those before it.

    A step takes the time of its decodes alone, and more for the tokens of prompts.  The first is
    averaged for sizes in quarters of an octave, by number of decodes and positions of context; the
    second in octaves, by number of decodes and prompt tokens, and is in proportion between two
    sizes and beyond the largest.  A prediction does not fall as decodes, tokens or context grow.
    """

    def __init__(self) -> None:
        self._alone: dict[tuple[int, int], _Average] = {}
        self._more: dict[int, dict[int, _Average]] = {}

    def add(self, num_decodes: int, prompt_tokens: int, context: int, seconds: float) -> None:
        """Learn from a step; ``context`` are the KV positions of all its sequences."""
        if num_decodes < 1:
            return
        if not prompt_tokens:
            _add(self._alone, (_quarter(num_decodes), _quarter(context)), seconds, num_decodes)
        else:
            sizes = self._more.setdefault(num_decodes.bit_length(), {})
            more = max(0.0, seconds - self._of_decodes(num_decodes, context))
            _add(sizes, prompt_tokens.bit_length(), more, prompt_tokens)

    def predict(self, num_decodes: int, prompt_tokens: int, context: int) -> float | None:
        """Seconds of a step with decodes and a prompt; None if no such step has been measured."""
        more = self._of_prompts(num_decodes, prompt_tokens)
        return None if more is None else self._of_decodes(num_decodes, context) + more

    def most_tokens(self, num_decodes: int, context: int, seconds: float, most: int) -> int:
        """The most prompt tokens, up to ``most``, of a step that is predicted to take no longer:
        twice the largest number that was measured at most, and ``_LEAST`` in any case."""
        known = self._known(num_decodes)
        tried = max((each.tokens for sizes in known for each in sizes.values()), default=0.0)
        most = min(most, int(2 * tried) if tried else _UNTRIED)
        left = seconds - self._of_decodes(num_decodes, context + most)
        low, high = min(_LEAST, most), most if left > 0 else min(_LEAST, most)
        while low < high:
            middle = (low + high + 1) // 2
            more = self._of_prompts(num_decodes, middle)
            if more is None or more <= left:
                low = middle
            else:
                high = middle - 1
        return low

    def _of_decodes(self, num_decodes: int, context: int) -> float:
        """Seconds of the longest step of fewer decodes and less context, or else of the shortest of
        all; 0 if none has been measured, so that prompts are taken to need the whole time."""
        rows, positions = _quarter(num_decodes), _quarter(context)
        times = [
            average.seconds
            for (known_rows, known), average in self._alone.items()
            if known_rows <= rows and known <= positions
        ]
        if times:
            return max(times)
        return min((average.seconds for average in self._alone.values()), default=0.0)

    def _of_prompts(self, num_decodes: int, prompt_tokens: int) -> float | None:
        """The longest of what fewer decodes, or else the shortest of what more, have shown."""
        times = [_between(sizes, prompt_tokens) for sizes in self._known(num_decodes)]
        if not times:
            return None
        return max(times) if min(self._more) <= num_decodes.bit_length() else min(times)

    def _known(self, num_decodes: int) -> list[dict[int, _Average]]:
        """What prompts took beside so many decodes or fewer, or else beside more."""
        own = [sizes for key, sizes in self._more.items() if key <= num_decodes.bit_length()]
        return own or list(self._more.values())


def _add(averages: dict[_Key, _Average], key: _Key, seconds: float, tokens: int) -> None:
    if (average := averages.get(key)) is None:
        averages[key] = _Average(seconds, tokens)
    else:
        average.add(seconds, tokens)


def _quarter(count: int) -> int:
    return int(4 * log2(max(1, count)))


def _between(sizes: dict[int, _Average], tokens: int) -> float:
    """What so many prompt tokens add, in seconds."""
    before_tokens = before = 0.0
    for average in sorted(sizes.values(), key=lambda each: each.tokens):
        seconds = max(before, average.seconds)
        if tokens <= average.tokens:
            share = (tokens - before_tokens) / (average.tokens - before_tokens)
            return before + share * (seconds - before)
        before_tokens, before = average.tokens, seconds
    return before * tokens / before_tokens


class StepPace:
    """Bounds the predicted time of steps with decodes, by the prompt tokens that they take in.

    Attributes:
        sizes: prompt tokens, rounded up to a power of two -> the steps beside decodes that had so
            many.
        num_over: those that took longer than the bound.
    """

    def __init__(self, max_step_s: float = 0.0) -> None:
        """``max_step_s``: longest step with decodes, in seconds; 0: no bound."""
        self.max_step_s = max_step_s
        self.sizes: dict[int, int] = {}
        self.num_over = 0
        self._times = StepTimes()

    def room(self, running: Iterable[Request], most: int) -> int:
        """The prompt tokens of the next step, ``most`` at most: all of them if nothing decodes."""
        if not self.max_step_s:
            return most
        num_decodes = context = 0
        for request in running:
            left = request.num_tokens - request.num_computed_tokens
            context += request.num_computed_tokens + min(left, 1)
            num_decodes += left == 1
        if num_decodes == 0:
            return most
        return self._times.most_tokens(num_decodes, context, self.max_step_s, most)

    def note(self, step: ScheduledStep, seconds: float | None) -> None:
        """Learn from a step that has ended; ``seconds``: None if its time is not known."""
        batch = step.batch
        if batch.query_len == 1 and not self.max_step_s:
            return
        num_decodes = sum(entry.num_tokens == 1 for entry in step.scheduled)
        prompt_tokens = batch.num_tokens - num_decodes
        if num_decodes and prompt_tokens:
            size = 1 << (prompt_tokens - 1).bit_length()
            self.sizes[size] = self.sizes.get(size, 0) + 1
        if not self.max_step_s or seconds is None or not num_decodes:
            return
        self.num_over += bool(prompt_tokens) and seconds > self.max_step_s
        context = int(batch.starts.sum()) + batch.num_tokens
        self._times.add(num_decodes, prompt_tokens, context, seconds)
