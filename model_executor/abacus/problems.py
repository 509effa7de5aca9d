"""Problems for abacus: what it is trained on and, disjoint from that, what it is measured on.

A problem is a prompt such as `37+58=` and the exact text that must follow it before the
end-of-sequence token. A hash of the prompt alone decides the side of the split, so it needs no
list, and no generator or seed can move a held-out prompt into the training data.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from random import Random
from string import ascii_lowercase

# One prompt in this many is held out.
SPLIT_BUCKETS = 10
# The smallest task has about this many held-out prompts that its sampler reaches in little time.
MAX_HELD_OUT_PER_TASK = 10_000

# Numbers of one digit are few; long ones are where carries happen.
_DIGITS, _DIGIT_WEIGHTS = (1, 2, 3), (1, 3, 6)
_NEAR = 20


@dataclass(frozen=True, slots=True)
class Problem:
    task: str
    prompt: str
    answer: str


def _number(rng: Random) -> int:
    digits = rng.choices(_DIGITS, _DIGIT_WEIGHTS)[0]
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def _near(center: int, rng: Random) -> int:
    return min(999, max(0, center + rng.randint(-_NEAR, _NEAR)))


def _add(rng: Random) -> tuple[str, str]:
    a, b = _number(rng), _number(rng)
    return f"{a}+{b}=", str(a + b)


def _sub(rng: Random) -> tuple[str, str]:
    """A tenth of the pairs lie close together, where signs change and borrows run far."""
    a = _number(rng)
    b = _near(a, rng) if rng.random() < 0.1 else _number(rng)
    return f"{a}-{b}=", str(a - b)


def _sort(rng: Random) -> tuple[str, str]:
    digits = rng.choices("0123456789", k=rng.choices((2, 3, 4, 5, 6), (1, 2, 3, 4, 6))[0])
    return f"sort {' '.join(digits)}=", " ".join(sorted(digits))


def _reverse(rng: Random) -> tuple[str, str]:
    word = "".join(rng.choices(ascii_lowercase, k=rng.choices(range(1, 9), range(1, 9))[0]))
    return f"reverse {word}=", word[::-1]


def _extreme(name: str, pick: Callable[[list[int]], int], rng: Random) -> tuple[str, str]:
    """Three lists in ten are near one center, so that the last digits decide."""
    count = rng.choices((2, 3, 4, 5), (2, 3, 4, 5))[0]
    if rng.random() < 0.3:
        center = _number(rng)
        numbers = [_near(center, rng) for _ in range(count)]
    else:
        numbers = [_number(rng) for _ in range(count)]
    return f"{name} {' '.join(map(str, numbers))}=", str(pick(numbers))


_SAMPLERS: dict[str, Callable[[Random], tuple[str, str]]] = {
    "add": _add,
    "sub": _sub,
    "sort": _sort,
    "reverse": _reverse,
    "min": lambda rng: _extreme("min", min, rng),
    "max": lambda rng: _extreme("max", max, rng),
}
TASKS = tuple(_SAMPLERS)

# Arithmetic needs the most examples to learn.
TRAINING_WEIGHTS: Mapping[str, float] = {
    "add": 6,
    "sub": 7,
    "sort": 4,
    "reverse": 4,
    "min": 3,
    "max": 3,
}


def is_held_out(prompt: str) -> bool:
    return int.from_bytes(sha256(prompt.encode()).digest()[:8], "big") % SPLIT_BUCKETS == 0


def held_out(n: int, seed: int = 0) -> list[Problem]:
    """`n` distinct held-out problems, tasks in turn, so that their counts differ by one at most.

    The first `m` of `held_out(n, seed)` are `held_out(m, seed)`.
    Raises ValueError for more than `MAX_HELD_OUT_PER_TASK` a task.
    """
    limit = MAX_HELD_OUT_PER_TASK * len(TASKS)
    if not 0 <= n <= limit:
        raise ValueError(f"held_out problems: n is {n}, expected 0 to {limit}")
    rngs = {task: Random(f"held out {seed} {task}") for task in TASKS}
    seen: set[str] = set()
    problems = []
    for i in range(n):
        task = TASKS[i % len(TASKS)]
        while True:
            prompt, answer = _SAMPLERS[task](rngs[task])
            if prompt not in seen and is_held_out(prompt):
                break
        seen.add(prompt)
        problems.append(Problem(task, prompt, answer))
    return problems


def training(
    n: int, seed: int, weights: Mapping[str, float] = TRAINING_WEIGHTS
) -> Iterator[Problem]:
    """`n` problems to learn from, never held-out ones; repeats occur. `weights` mix the tasks."""
    rng = Random(f"training {seed}")
    tasks = tuple(weights)
    cumulative = list(accumulate(weights.values()))
    for _ in range(n):
        task = rng.choices(tasks, cum_weights=cumulative)[0]
        while True:
            prompt, answer = _SAMPLERS[task](rng)
            if not is_held_out(prompt):
                break
        yield Problem(task, prompt, answer)
