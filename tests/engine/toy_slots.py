"""The toy device's steps, and what it knows of rows and slots: it accepts drafts, and places rows
behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from fusewright.config.step_fields import NOT_DRAFTED, REJECTED
from fusewright.engine.messages.sampling_params import SamplingParams
from fusewright.engine.messages.step import StepResult

Guess: TypeAlias = Callable[[list[int], int | None], list[int]]
"""Drafts of the device behind the tokens of a request with a seed."""


@dataclass
class Row:
    """What the runner was told of the request in a slot."""

    sampling_params: SamplingParams
    tables: list[list[int]]
    num_tokens: int | None = None
    """Computed so far; None before its first step."""
    num_drafts: int = 0  # guesses among these


@dataclass
class Entry:
    """All that the device knows of one row: copies, as a real runner makes."""

    slot: int
    tables: list[list[int]]
    start: int
    token_ids: list[int]
    feed: list[int]
    num_sampled: int
    seed: int | None
    number: int
    """Rows of the slot before it, if it samples."""
    ahead: int
    """-1, or the device places it, at most so many positions further."""


@dataclass
class ToyStep:
    runner: Any
    entries: list[Entry]
    begins: dict[int, list[int]]
    """The tokens that are told of slots that get a request."""
    output: StepResult | None = None
    read: bool = False

    @property
    def has_run(self) -> bool:
        return self.output is not None

    def result(self) -> StepResult:
        assert not self.read, "a step's result is read once"
        self.read = True
        while self.output is None:
            self.runner.run_next()
        return self.output


class Slots:
    """The newest token, all tokens and the next drafts of each slot."""

    def __init__(self, count: int, guess: Guess | None) -> None:
        self.last_tokens: list[int | None] = [None] * count
        self.history: list[list[int]] = [[] for _ in range(count)]
        self.drafts: list[list[int]] = [[] for _ in range(count)]
        self.guess = guess

    def place(self, entry: Entry) -> bool:
        """Place a row that the device alone can; returns whether it lacks its draft."""
        if entry.ahead < 0:
            return False
        known, drafts = self.history[entry.slot], self.drafts[entry.slot]
        place = len(known) - 1 + entry.number
        assert entry.start <= place <= entry.start + entry.ahead, "further than was reserved"
        entry.start = place
        if not entry.number:
            return False
        lacks = len(drafts) < entry.number
        entry.token_ids = [0 if lacks else drafts[entry.number - 1]]
        return lacks

    def accept(self, entries: list[Entry], token_ids: list[int], lacking: list[bool]) -> list[int]:
        """The tokens that are kept, and why others are not."""
        result, is_kept = [], False
        for row, (entry, token) in enumerate(zip(entries, token_ids, strict=True)):
            if not entry.num_sampled:
                result.append(token)
                continue
            right = entry.number == 0 or (is_kept and token_ids[row - 1] == entry.token_ids[0])
            is_kept = right and not lacking[row]
            result.append(token if is_kept else NOT_DRAFTED if lacking[row] else REJECTED)
            if is_kept:
                self.last_tokens[entry.slot] = token
                known, end = self.history[entry.slot], entry.start + len(entry.token_ids)
                known[end:] = [token]
        if self.guess is not None:
            for entry in entries:
                if entry.num_sampled and entry.number == 0:
                    known = self.history[entry.slot]
                    self.drafts[entry.slot] = self.guess(known, entry.seed)
        return result
