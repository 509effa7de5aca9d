"""Draws the requests that vLLM was measured with: fixed seeds decide lengths and tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf

from ..config import UserError

MIXES: dict[str, tuple[int, int]] = {
    "chat": (202, 179),
    "prefill-heavy": (462, 16),
    "decode-heavy": (462, 256),
}
"""Nominal mean lengths of inputs and outputs."""
INPUT_LEN = 128
OUTPUT_LEN = 129
"""Lengths of equal requests, whose time per output token is measured."""
_SPREAD, _SCALE = 0.9, 0.667
_MOST_INPUT, _MOST_OUTPUT, _LEAST = 2000, 1000, 4


@dataclass(frozen=True)
class Work:
    """One request: its prompt and how many tokens it generates."""

    prompt_token_ids: list[int]
    output_len: int


def mix(name: str, num_prompts: int, vocab_size: int) -> list[Work]:
    """Requests of a mix: log-normal lengths, uniform tokens.

    Raises:
        UserError: no mix has that name.
    """
    if name not in MIXES:
        raise UserError(f"dataset={name}: expected one of {', '.join(MIXES)}")
    rng = random.Random(1)

    def length(mean: int, most: int) -> int:
        return max(_LEAST, min(most, int(rng.lognormvariate(0, _SPREAD) * mean * _SCALE)))

    mean_in, mean_out = MIXES[name]
    inputs = [length(mean_in, _MOST_INPUT) for _ in range(num_prompts)]
    outputs = [length(mean_out, _MOST_OUTPUT) for _ in range(num_prompts)]
    return [
        Work([rng.randrange(vocab_size) for _ in range(n)], output_len)
        for n, output_len in zip(inputs, outputs, strict=True)
    ]


def fitting(works: list[Work], most_tokens: int) -> tuple[list[Work], float]:
    """``works`` with all lengths scaled down alike until the longest has ``most_tokens``, and the
    scale: 1 where they fit as they are."""
    longest = max(len(work.prompt_token_ids) + work.output_len for work in works)
    if longest <= most_tokens:
        return works, 1.0
    scale = most_tokens / longest
    return [
        Work(
            work.prompt_token_ids[: max(1, int(len(work.prompt_token_ids) * scale))],
            max(1, int(work.output_len * scale)),
        )
        for work in works
    ], scale


def equal(
    batch: int, input_len: int, output_len: int, vocab_size: int, seed: int = 0
) -> list[Work]:
    rng = random.Random(f"{seed}/{batch}")
    return [
        Work([rng.randrange(vocab_size) for _ in range(input_len)], output_len)
        for _ in range(batch)
    ]


def tpot_ms(whole_s: float, first_s: float, output_len: int) -> float:
    """Time per output token: that of a batch, less that of the same batch for one token.

    Raises:
        UserError: the whole took no longer, as on a machine that does other work meanwhile.
    """
    if whole_s <= first_s:
        raise UserError(
            f"{output_len} tokens took {whole_s * 1e3:.1f} ms and one took {first_s * 1e3:.1f}: "
            "something else keeps this machine busy; measure more tokens or repeat more often"
        )
    return round((whole_s - first_s) / (output_len - 1) * 1e3, 4)


def arrivals(count: int, rate: float, burstiness: float, seed: int = 0) -> list[float]:
    """Seconds at which requests come, from 0.

    Args:
        rate: requests a second; infinite: all at once.
        burstiness: shape of the gamma distribution of the gaps: 1 is a Poisson process, less
            comes in bursts, and infinite is constant.
    """
    if rate == inf:
        return [0.0] * count
    rng, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(now)
        gap = 1.0 if burstiness == inf else rng.gammavariate(burstiness, 1 / burstiness)
        now += gap / rate
    return times
