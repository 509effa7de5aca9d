"""A toy engine with drafts, of a drafter that now and then says what the toy will."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fusewright.engine.core.drafts import Drafts
from fusewright.engine.core.request import Request
from fusewright.engine.core.scheduler import Scheduler

from .toy import ALPHABET, Setup, ToyRunner, in_windows, next_token


@dataclass
class Guesser:
    """Drafts what the toy model will say, each token with a probability.

    Attributes:
        rate: the probability of a right draft.
        asked: drafts that were proposed to each request, for what it is told later.
    """

    rate: float
    windows: tuple[int, ...] = (0,)
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    method: str = "guess"
    stores_drafts: bool = False
    told: list[tuple[int, int]] = field(default_factory=list)
    open: set[str] = field(default_factory=set)

    def wants(self, request: Request) -> bool:
        self.open.add(request.request_id)
        return self.rng.random() < 0.7

    def propose(self, requests: Sequence[Request], most: int) -> list[list[int]]:
        proposals = []
        for request in requests:
            assert not request.is_finished and request.num_known_tokens == request.num_tokens - 1
            self.open.add(request.request_id)
            tokens = request.tokens(0, request.num_known_tokens)
            proposals.append(self.behind(tokens, request.sampling_params.seed, most))
        return proposals

    def behind(self, tokens: Sequence[int], seed: int | None, most: int) -> list[int]:
        """Drafts behind these tokens."""
        known, drafts = [*tokens], list[int]()
        for _ in range(self.rng.randint(0, most)):
            right = next_token(in_windows(known, self.windows), seed)
            drafts.append(right if self.rng.random() < self.rate else self.rng.choice(ALPHABET))
            known.append(drafts[-1])
        return drafts

    def settle(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafts > 0
        self.told.append((num_drafts, num_accepted))

    def forget(self, request: Request) -> None:
        self.open.discard(request.request_id)


@dataclass(frozen=True)
class DraftSetup(Setup):
    """A toy engine whose requests have drafts."""

    rate: float = 0.7
    most: int = 4
    on_device: bool = False

    def scheduler(self) -> Scheduler:
        scheduler = super().scheduler()
        guesser = Guesser(self.rate, self.windows)
        scheduler.drafts = Drafts(guesser, self.most, on_device=self.on_device)
        return scheduler

    def runner(self, kind: type[ToyRunner] = ToyRunner, **faults: Any) -> ToyRunner:
        guesser = Guesser(self.rate, self.windows)

        def guess(tokens: list[int], seed: int | None) -> list[int]:
            return guesser.behind(tokens, seed, self.most)

        return super().runner(kind, guess=guess if self.on_device else None, **faults)
