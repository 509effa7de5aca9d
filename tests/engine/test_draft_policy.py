"""The policy of drafts over synthetic clocks: it is near the best fixed number of drafts, and never
much behind none."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from random import Random

import pytest

from fusewright.engine.core.draft_policy import DraftPolicy
from fusewright.engine.core.step_costs import StepCosts, bucket_of, knee

MAX_K = 5
COSTS: dict[str, Callable[[int], float]] = {
    "flat": lambda rows: 0.004 + 1e-6 * rows,
    "linear": lambda rows: 0.0005 + 0.0005 * rows,
    "step": lambda rows: 0.004 if rows <= 16 else 0.009,
    "bend": lambda rows: 0.004 * max(1.0, rows / 40),
}
ACCEPTANCES = (0.0, 0.3, 0.6, 0.8, 0.95)
NUM_STEPS = 2000


def tokens_per_step(random: Random, num_seqs: int, k: int, acceptance: float) -> list[int]:
    """How many of ``k`` drafts are accepted, of each request."""
    accepted = []
    for _ in range(num_seqs):
        count = 0
        while count < k and random.random() < acceptance:
            count += 1
        accepted.append(count)
    return accepted


def best_fixed(
    cost: Callable[[int], float], num_seqs: int, acceptance: float, draft_s: float = 0.0
) -> tuple[float, float]:
    """Tokens a second of the best k that never changes, and of no drafts."""
    rates = []
    for k in range(MAX_K + 1):
        expected = sum(acceptance**i for i in range(k + 1))
        rates.append(num_seqs * expected / (cost(num_seqs * (k + 1)) + k * draft_s))
    return max(rates), rates[0]


def run(
    cost: Callable[[int], float],
    num_seqs: int,
    acceptance_at: Callable[[int], float],
    *,
    num_steps: int = NUM_STEPS,
    draft_s: float = 0.0,
    noise: float = 0.03,
) -> tuple[float, DraftPolicy]:
    """Tokens a second of the policy, and the policy."""
    random = Random(7)
    share = draft_s / cost(1)
    policy = DraftPolicy(MAX_K, StepCosts(knee(200), share))
    tokens, seconds = 0, 0.0
    for step in range(num_steps):
        k = policy.choose({"": num_seqs})[""]
        accepted = tokens_per_step(random, num_seqs, k, acceptance_at(step))
        took = cost(num_seqs * (k + 1)) + k * draft_s
        seconds += took
        tokens += num_seqs + sum(accepted)
        policy.observe_step(num_seqs * (k + 1), k, took * (1 + noise * (random.random() - 0.5)))
        for count in accepted:
            policy.observe_drafts("", k, k, count)
    return tokens / seconds, policy


CASES = list(product(COSTS, ACCEPTANCES, (1, 4, 32)))


@pytest.mark.product
@pytest.mark.parametrize(("shape", "acceptance", "num_seqs"), CASES)
def test_it_is_within_three_percent_of_the_best_fixed_number(
    shape: str, acceptance: float, num_seqs: int
) -> None:
    cost = COSTS[shape]
    best, none = best_fixed(cost, num_seqs, acceptance)
    rate, policy = run(cost, num_seqs, lambda step: acceptance)
    assert rate >= 0.97 * best, (rate / best, policy.report())
    assert rate >= 0.98 * none


CHANGES: dict[str, Callable[[int], float]] = {
    "rises late": lambda step: 0.05 if step < NUM_STEPS // 2 else 0.9,
    "falls early": lambda step: 0.9 if step < NUM_STEPS // 4 else 0.0,
    "comes and goes": lambda step: 0.9 if step // 500 % 2 else 0.1,
}


@pytest.mark.parametrize(("shape", "change"), list(product(COSTS, CHANGES)))
def test_it_follows_an_acceptance_that_changes(shape: str, change: str) -> None:
    cost, at = COSTS[shape], CHANGES[change]
    fixed = []
    for k in range(MAX_K + 1):
        expected = sum(sum(at(step) ** i for i in range(k + 1)) for step in range(NUM_STEPS))
        fixed.append(4 * expected / (NUM_STEPS * cost(4 * (k + 1))))
    rate, policy = run(cost, 4, at)
    assert rate >= 0.97 * max(fixed), (rate / max(fixed), policy.report())
    assert rate >= 0.98 * fixed[0]


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 0.95])
@pytest.mark.parametrize("draft_s", [0.0005, 0.002])
def test_the_time_of_drafting_counts(acceptance: float, draft_s: float) -> None:
    cost = COSTS["bend"]
    best, none = best_fixed(cost, 4, acceptance, draft_s)
    rate, policy = run(cost, 4, lambda step: acceptance, draft_s=draft_s)
    assert rate >= 0.97 * best, (rate / best, policy.report())
    assert rate >= 0.98 * none


def test_a_loaded_server_drafts_nothing_and_a_quiet_one_does_again() -> None:
    cost, random = COSTS["bend"], Random(3)
    policy = DraftPolicy(MAX_K, StepCosts(knee(200)))
    means = []
    for num_seqs in (2, 64, 2):
        chosen = []
        for _ in range(400):
            k = policy.choose({"": num_seqs})[""]
            chosen.append(k)
            policy.observe_step(num_seqs * (k + 1), k, cost(num_seqs * (k + 1)))
            for count in tokens_per_step(random, num_seqs, k, 0.5):
                policy.observe_drafts("", k, k, count)
        means.append(sum(chosen[50:]) / 350)
    assert means[0] > 3
    assert means[1] < 0.2
    assert means[2] > 3


def test_each_class_of_requests_has_its_own_drafts() -> None:
    cost, random = COSTS["linear"], Random(3)
    policy = DraftPolicy(MAX_K, StepCosts(knee(200)))
    acceptance = {"edits": 0.97, "prose": 0.05}
    sums = dict.fromkeys(acceptance, 0)
    for step in range(2000):
        drafts = policy.choose({"edits": 1, "prose": 1})
        rows = 2 + sum(drafts.values())
        policy.observe_step(rows, max(drafts.values()), cost(rows))
        for name, k in drafts.items():
            sums[name] += k if step >= 500 else 0
            for count in tokens_per_step(random, 1, k, acceptance[name]):
                policy.observe_drafts(name, k, k, count)
    assert sums["edits"] > 2 * 1500
    assert sums["prose"] < 0.1 * 1500


def test_a_drafter_that_proposes_rarely_is_asked_for_more_than_it_proposes() -> None:
    """Rows that no draft fills cost nothing, so few drafts that are right are worth asking for."""
    cost, random = COSTS["linear"], Random(5)
    policy = DraftPolicy(MAX_K, StepCosts(knee(200)))
    asked = 0
    for step in range(2000):
        k = policy.choose({"": 1})[""]
        drafts = k if random.random() < 0.2 else 0
        policy.observe_step(1 + drafts, k, cost(1 + drafts))
        policy.observe_drafts("", k, drafts, tokens_per_step(random, 1, drafts, 0.97)[0])
        asked += k if step >= 500 else 0
    assert asked > 3 * 1500


def test_the_first_time_of_a_bucket_may_hold_a_capture() -> None:
    costs = StepCosts(knee(200))
    costs.observe(4, 0, 5.0)
    costs.observe(4, 0, 0.01)
    assert costs.estimate(4) == 0.01
    costs.observe(4, 0, 60.0)  # a pause
    assert costs.estimate(4) < 0.02


def test_times_do_not_fall_with_the_rows() -> None:
    costs, random = StepCosts(knee(64)), Random(1)
    for _ in range(500):
        rows = random.choice([1, 2, 3, 8, 40, 100, 500])
        costs.observe(rows, 0, 0.01 * max(1, rows / 64) * random.uniform(0.8, 1.2))
    times = [costs.estimate(rows) for rows in (1, 2, 3, 8, 40, 100, 500)]
    assert all(b >= 0.999 * a for a, b in pairwise(times)), times


def test_buckets_hold_rows_that_differ_by_an_eighth() -> None:
    for rows in range(1, 5000):
        assert rows <= bucket_of(rows) <= rows * 9 / 8 + 1
        assert bucket_of(bucket_of(rows)) == bucket_of(rows)
