"""``DraftPolicy`` chooses how many tokens are drafted in each step, 0 included.

A draft of position j is right if those before it are.  So of k drafts E(k) = a1 + a1 a2 + … are
accepted, and a step of n requests makes n (1 + E(k)) tokens in the time of n (1 + k) rows.  The
policy takes the k with the most tokens a second, by times that ``StepCosts`` measures and by the
acceptance of each position, measured for each class of requests.

What has not been measured is tried if it might be better by what is known.  Tries are paid from a
budget, a share of the time that steps have taken, so a server that gains nothing from drafts loses
no more than that share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import sqrt

from .step_costs import StepCosts, bucket_of

_BUDGET = 0.01
"""Share of the time of all steps that tries may lose, by what was known when they were made."""
_FIRST_STEPS = 4.0
"""Steps whose time the tries of the start may lose beyond that."""
_MARGIN = 0.01
"""Drafts must promise so much more than none, since what they promise has errors of its own."""
_WORTH_A_TRY = 1.03
"""A try must promise so many times the best, if all goes as well as is possible."""
_KNOWN = 0.7
"""A time is known if its lower bound is so much of it."""
_WINDOW = 160.0
"""Drafts of a position that its acceptance remembers: older ones fade."""
_PRIOR, _PRIOR_WEIGHT = 0.6, 2.0
_FORGET = 0.998
"""Share of the certainty about a class's acceptance that is left after a step without drafts."""


_REUSE = 11
"""Steps of the same kind that take over a choice, which takes longer than to schedule a step."""


@dataclass
class Acceptance:
    """How often the drafts of each position are right if all before them are.

    ``tries`` and ``hits`` fade, so that they follow a text that changes.
    """

    tries: list[float]
    hits: list[float]

    @classmethod
    def of(cls, max_k: int) -> Acceptance:
        return cls([0.0] * max_k, [0.0] * max_k)

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Of ``num_drafts`` drafts of a request the first ``num_accepted`` were right."""
        for position in range(min(num_drafts, num_accepted + 1)):
            kept = 1.0 - 1.0 / _WINDOW
            self.tries[position] = self.tries[position] * kept + 1.0
            self.hits[position] = self.hits[position] * kept + (position < num_accepted)

    def forget(self, num_steps: int) -> None:
        """Steps went by without drafts: what is known becomes less certain, but stays."""
        left = _FORGET**num_steps
        for position, tries in enumerate(self.tries):
            if tries > 1.0:
                self.tries[position] *= left
                self.hits[position] *= left

    def rates(self, hopeful: bool = False) -> Iterator[float]:
        """The rate of each position; of one that was tried little, that of the position before.

        Args:
            hopeful: as high as it may well be, by two standard errors.
        """
        before = _PRIOR
        for tries, hits in zip(self.tries, self.hits, strict=True):
            weight = tries + _PRIOR_WEIGHT
            rate = (hits + _PRIOR_WEIGHT * before) / weight
            before = rate
            if hopeful:
                rate = min(1.0, rate + 2.0 * sqrt(max(rate * (1.0 - rate), 0.02) / weight))
            yield rate


@dataclass(frozen=True)
class _Plan:
    """Drafts for each class, and what they promise."""

    drafts: dict[str, int]
    tokens: float
    rows: float

    @property
    def depth(self) -> int:
        return max(self.drafts.values(), default=0)


@dataclass
class DraftPolicy:
    """Chooses the drafts of a step.  All of its state is what ``observe_step`` and
    ``observe_drafts`` are told.

    Attributes:
        max_k: most drafts a request.
        costs: times of steps.
        num_chosen: how many steps had 0, 1, … ``max_k`` drafts at most.
    """

    max_k: int
    costs: StepCosts
    num_chosen: list[int] = field(init=False)
    _classes: dict[str, Acceptance] = field(default_factory=dict)
    _coverage: dict[str, float] = field(default_factory=dict)
    _seconds: float = 0.0
    _lost: float = 0.0
    _first_s: float = 0.0
    _last_key: tuple[object, ...] = ()
    _last: dict[str, int] = field(default_factory=dict)
    _uses_left: int = 0

    def __post_init__(self) -> None:
        self.num_chosen = [0] * (self.max_k + 1)

    def choose(self, requests: Mapping[str, int], other_rows: int = 0) -> dict[str, int]:
        """The most drafts for a request of each class.

        Args:
            requests: how many requests of each class decode in this step.
            other_rows: rows of the step that are parts of prompts.
        """
        key = (*((name, bucket_of(count)) for name, count in requests.items()), other_rows > 0)
        if key == self._last_key and self._uses_left:
            self._uses_left -= 1
            self.num_chosen[max(self._last.values(), default=0)] += 1
            return self._last
        self._last_key, self._last = key, self._choose(requests, other_rows)
        return self._last

    def _choose(self, requests: Mapping[str, int], other_rows: int) -> dict[str, int]:
        for name in requests:
            self._classes.setdefault(name, Acceptance.of(self.max_k))
        plans = list(self._plans(requests, other_rows))
        none, rates = plans[0], [self._rate(plan) for plan in plans]
        best = max(range(len(plans)), key=lambda i: rates[i])
        if rates[best] <= rates[0] * (1.0 + _MARGIN) or self._is_unknown(none):
            best = 0
        chosen, tried = plans[best], None
        if not self._is_unknown(none):
            tried = self._try(requests, other_rows, chosen, rates[best])
        settled = tried is None and self.costs.is_measured(chosen.rows, chosen.depth)
        self._uses_left = _REUSE if settled else 0
        chosen = tried or chosen
        self.num_chosen[chosen.depth] += 1
        for name in none.drafts:
            if not chosen.drafts[name]:
                self._classes[name].forget(1 + self._uses_left)
        return chosen.drafts

    def _is_unknown(self, none: _Plan) -> bool:
        """Whether the time of a step without drafts is little more than a guess: then it is
        measured first, which costs nothing."""
        return self.costs.least(none.rows) < _KNOWN * self.costs.estimate(none.rows)

    def observe_step(self, rows: int, depth: int, seconds: float) -> None:
        """A step of ``rows`` rows in which ``depth`` tokens a request were drafted at most took
        ``seconds``, from the end of the step before."""
        self._first_s = self._first_s or seconds
        self._seconds += (
            min(seconds, 2.0 * self.costs.estimate(rows, depth))
            if (self.costs.is_measured(rows, depth))
            else 0.0
        )
        self.costs.observe(rows, depth, seconds)

    def observe_drafts(self, name: str, asked: int, num_drafts: int, num_accepted: int) -> None:
        """Of a request of class ``name``, ``num_accepted`` of ``num_drafts`` drafts were right;
        ``asked`` were allowed, of which a drafter may make fewer."""
        self._classes.setdefault(name, Acceptance.of(self.max_k)).add(num_drafts, num_accepted)
        if asked:
            now = self._coverage.get(name, 1.0)
            self._coverage[name] = now + (num_drafts / asked - now) / 64.0

    def report(self) -> dict[str, object]:
        """Plain data: what was chosen, the acceptance by class and position, and the times."""
        return {
            "max": self.max_k,
            "chosen": list(self.num_chosen),
            "acceptance": {
                name: [round(rate, 3) for rate in each.rates()]
                for name, each in self._classes.items()
            },
            "step_s": self.costs.table(),
            "tries_lost_s": self._lost,
        }

    def _plans(
        self, requests: Mapping[str, int], other_rows: int, hopeful: bool = False
    ) -> Iterator[_Plan]:
        """The plans worth looking at: none, and then one draft more for the class whose next draft
        is likeliest to be accepted.  For a given number of rows no plan promises more tokens."""
        steps: list[tuple[float, int, str]] = []
        for name, count in requests.items():
            survives = 1.0
            for position, rate in enumerate(self._classes[name].rates(hopeful)):
                survives *= rate
                if count:
                    steps.append((survives, position, name))
        steps.sort(key=lambda step: (-step[0], step[1]))
        drafts = dict.fromkeys(requests, 0)
        tokens = float(sum(requests.values()))
        rows = tokens + other_rows
        yield _Plan(dict(drafts), tokens, rows)
        for survives, _, name in steps:
            covered = requests[name] * self._coverage.get(name, 1.0)
            drafts[name] += 1
            tokens += covered * survives
            rows += covered
            yield _Plan(dict(drafts), tokens, rows)

    def _rate(self, plan: _Plan) -> float:
        return plan.tokens / self.costs.estimate(plan.rows, plan.depth)

    def _try(
        self, requests: Mapping[str, int], other_rows: int, best: _Plan, best_rate: float
    ) -> _Plan | None:
        """The plan that would be the best if all goes as well as is possible, if that is worth a
        try and the budget has what it may lose; None if there is none."""
        budget = _FIRST_STEPS * self._first_s + _BUDGET * self._seconds - self._lost
        if budget <= 0.0 and self._first_s:
            return None
        hoped: list[tuple[float, _Plan]] = []
        for plan in self._plans(requests, other_rows, hopeful=True):
            if plan.drafts == best.drafts:
                continue
            seconds = max(self.costs.least(plan.rows, plan.depth), 1e-12)
            hoped.append((plan.tokens / seconds, plan))
        if not hoped:
            return None
        promise, plan = max(hoped, key=lambda each: each[0])
        if promise < best_rate * _WORTH_A_TRY:
            return None
        seconds = self.costs.estimate(plan.rows, plan.depth)
        expected = self._expected_tokens(requests, plan)
        lost = max(seconds - expected / best_rate, 0.0)
        if self._first_s and lost > budget:
            return None
        self._lost += lost
        return plan

    def _expected_tokens(self, requests: Mapping[str, int], plan: _Plan) -> float:
        tokens = float(sum(requests.values()))
        for name, count in plan.drafts.items():
            survives = 1.0
            covered = requests[name] * self._coverage.get(name, 1.0)
            for rate, _ in zip(self._classes[name].rates(), range(count), strict=False):
                survives *= rate
                tokens += covered * survives
        return tokens
