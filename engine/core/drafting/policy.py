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
_WINDOW = 160.0
"""Drafts of a position that its acceptance remembers: older ones fade."""
_PRIOR, _PRIOR_WEIGHT = 0.6, 2.0
_FORGET = 0.998
"""Share of the certainty about a class's acceptance that is left after a step without drafts."""


_KEPT = 0.996
"""Share of the steps with drafts whose tokens and time are remembered after another such step."""
_NEAR_ENOUGH = 0.95
"""Share of what was promised that is taken for all of it: promises are measured too."""
_REUSE = 11
"""Steps of the same kind that take over a choice, which takes longer than to schedule a step."""


class Acceptance:
    """How often the drafts of each position are right if all before them are.

    Older drafts fade, so that it follows a text that changes.
    """

    def __init__(self, max_k: int) -> None:
        self._rates: list[float | None] = [None] * max_k
        self._weights = [_PRIOR_WEIGHT] * max_k  # drafts that a rate stands for

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Of ``num_drafts`` drafts of a request the first ``num_accepted`` were right."""
        before = _PRIOR
        for position in range(min(num_drafts, num_accepted + 1)):
            rate = self._rates[position]
            rate = before if rate is None else rate
            weight = min(self._weights[position] + 1.0, _WINDOW)
            before = rate + ((position < num_accepted) - rate) / weight
            self._rates[position], self._weights[position] = before, weight

    def forget(self, num_steps: int) -> None:
        """Steps went by without drafts: what is known stays, but becomes less certain."""
        left = _FORGET**num_steps
        self._weights = [max(weight * left, _PRIOR_WEIGHT) for weight in self._weights]

    def rates(self, hopeful: bool = False) -> Iterator[float]:
        """The rate of each position; of one that was never tried, that of the position before.

        Args:
            hopeful: as high as it may well be, by two standard errors.
        """
        before = _PRIOR
        for known, weight in zip(self._rates, self._weights, strict=True):
            rate = before = before if known is None else known
            if hopeful:
                rate = min(1.0, rate + 2.0 * sqrt(max(rate * (1.0 - rate), 0.02) / weight))
            yield rate


@dataclass
class _Kept:
    """What steps brought while drafts were asked for, by what was promised of them.

    A request whose tokens must be known before it has drafts may sit out a step that others run in,
    and drafts may come late or not at all: the sums have it, whatever the reason.
    """

    steps: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    promised_tokens: float = 0.0
    promised_s: float = 0.0

    def add(self, tokens: float, seconds: float, promised_tokens: float, promised_s: float) -> None:
        self.steps = self.steps * _KEPT + 1.0
        self.tokens = self.tokens * _KEPT + tokens
        self.seconds = self.seconds * _KEPT + seconds
        self.promised_tokens = self.promised_tokens * _KEPT + promised_tokens
        self.promised_s = self.promised_s * _KEPT + promised_s

    def forget(self, num_steps: int) -> None:
        left = _FORGET**num_steps
        for name, value in vars(self).items():
            setattr(self, name, value * left)

    @property
    def likely(self) -> float:
        """The share of the promised rate that came."""
        if self.steps < 1.0 or not (self.seconds and self.promised_tokens):
            return 1.0
        return self.tokens / self.seconds * self.promised_s / self.promised_tokens

    @property
    def share(self) -> float:
        """``likely``, and so much more as chance can explain; 1 if that is near enough."""
        share = self.likely + 1.5 / sqrt(max(self.tokens, 1.0))
        return share if share < _NEAR_ENOUGH else 1.0


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
    _promised: tuple[float, float] = (0.0, 0.0)
    _kept: _Kept = field(default_factory=_Kept)

    def __post_init__(self) -> None:
        self.num_chosen = [0] * (self.max_k + 1)

    def choose(self, requests: Mapping[str, int], other_rows: int = 0) -> Mapping[str, int]:
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
            self._classes.setdefault(name, Acceptance(self.max_k))
        plans = list(self._plans(requests, other_rows))
        none, rates = plans[0], [self._rate(plan) for plan in plans]
        share = self._kept.share
        rates = [rates[0], *(rate * share for rate in rates[1:])]
        # What a step without drafts takes is measured first: that costs nothing.
        knows_none = self.costs.is_known(none.rows)
        best = max(range(len(plans)), key=lambda i: rates[i])
        if rates[best] <= rates[0] * (1.0 + _MARGIN) or not knows_none:
            best = 0
        chosen, tried = plans[best], None
        if knows_none:
            tried = self._try(requests, other_rows, chosen, rates[best])
        settled = tried is None and self.costs.is_known(chosen.rows, chosen.depth)
        self._uses_left = _REUSE if settled else 0
        chosen = tried or chosen
        seconds = self.costs.estimate(chosen.rows, chosen.depth)
        self._promised = (chosen.tokens, seconds) if chosen.depth and settled else (0.0, 0.0)
        if not chosen.depth:
            self._kept.forget(1 + self._uses_left)
        self.num_chosen[chosen.depth] += 1
        for name in none.drafts:
            if not chosen.drafts[name]:
                self._classes[name].forget(1 + self._uses_left)
        return chosen.drafts

    def observe_step(self, rows: int, depth: int, seconds: float, tokens: int) -> None:
        """A step of ``rows`` rows in which ``depth`` tokens a request were drafted at most took
        ``seconds``, from the end of the step before, and brought ``tokens``."""
        if self._promised[0]:
            self._kept.add(tokens, seconds, *self._promised)
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
        self._classes.setdefault(name, Acceptance(self.max_k)).add(num_drafts, num_accepted)
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
            "kept_share": round(self._kept.share, 3),
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
        """Of the plans that would be the best if all goes as well as is possible, the one that is
        expected to lose least, if the budget has that; None if there is none."""
        budget = _FIRST_STEPS * self._first_s + _BUDGET * self._seconds - self._lost
        if budget <= 0.0:
            return None
        tries: list[tuple[float, float, _Plan]] = []
        share = self._kept.share
        likely = self._kept.likely if share < 1.0 else 1.0
        for plan in self._plans(requests, other_rows, hopeful=True):
            deeper = any(count > best.drafts[name] for name, count in plan.drafts.items())
            if not deeper and self.costs.is_known(plan.rows, plan.depth):
                continue  # nothing would be learned
            promise = share * plan.tokens / max(self.costs.least(plan.rows, plan.depth), 1e-12)
            if promise >= best_rate * _WORTH_A_TRY:
                seconds = self.costs.estimate(plan.rows, plan.depth)
                expected = likely * self._expected_tokens(requests, plan)
                lost = max(seconds - expected / best_rate, 0.0)
                tries.append((lost, -promise, plan))
        if not tries:
            return None
        lost, _, plan = min(tries, key=lambda each: each[:2])
        if lost > budget:
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
