"""The work that engines are compared by; its requests are those of ``bench/workloads.py``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ...bench.workloads import INPUT_LEN, OUTPUT_LEN, Work, equal, mix, tpot_ms
from ...config import UserError
from .peer import Peer, Sampling

GREEDY = Sampling()
# Key of the result -> mix, and how its tokens are chosen.
THROUGHPUTS: dict[str, tuple[str, Sampling]] = {
    "tput_sharegpt": ("chat", GREEDY),
    "tput_prefill": ("prefill-heavy", GREEDY),
    "tput_decode": ("decode-heavy", GREEDY),
    "tput_sampled": ("chat", Sampling(temperature=0.8, top_p=0.95, top_k=50)),
}


def seconds(peer: Peer, works: Sequence[Work], sampling: Sampling = GREEDY) -> float:
    """How long all of them take together.

    Raises:
        UserError: a request gave another number of tokens than it was asked for.
    """
    start = time.perf_counter()
    counts = peer.generate(works, sampling)
    took = time.perf_counter() - start
    asked = [work.output_len for work in works]
    if counts != asked:
        wrong = next(
            i for i, pair in enumerate(zip(counts, asked, strict=True)) if len({*pair}) > 1
        )
        raise UserError(
            f"{peer.name}: request {wrong} gave {counts[wrong]} tokens, expected {asked[wrong]}"
        )
    return took


def parse_size(text: str) -> tuple[int, int]:
    """Batch and tokens of context of ``17`` or ``17:3000``.

    Raises:
        UserError: it is neither.
    """
    batch, _, context = text.partition(":")
    if (
        not batch.isdigit()
        or not (context or "1").isdigit()
        or 0 in (int(batch), int(context or 1))
    ):
        raise UserError(f"batch {text!r}: expected a number, or batch:context as 17:3000")
    return int(batch), int(context or INPUT_LEN)


def longest_request(
    sizes: Sequence[str], names: Sequence[str], num_requests: int, vocab_size: int
) -> int:
    """Tokens of the longest request of all that is asked for, prompt and output."""
    works = [work for name in names for work in mix(THROUGHPUTS[name][0], num_requests, vocab_size)]
    contexts = [parse_size(size)[1] + OUTPUT_LEN for size in sizes]
    return max([*contexts, *(len(w.prompt_token_ids) + w.output_len for w in works)], default=0)


def latencies(peer: Peer, sizes: Sequence[str], vocab_size: int, repeats: int) -> dict[str, Any]:
    """``tpot_ms`` and ``ttft_ms`` by size, each the best of ``n`` after a warm-up; ``spread``: by
    what share the slowest took longer at most."""
    found: dict[str, Any] = {"tpot_ms": {}, "ttft_ms": {}, "n": repeats, "spread": 0.0}
    for size in sizes:
        batch, context = parse_size(size)
        full = equal(batch, context, OUTPUT_LEN, vocab_size)
        first = equal(batch, context, 1, vocab_size)
        seconds(peer, full)
        runs = [(seconds(peer, full), seconds(peer, first)) for _ in range(repeats)]
        wholes, firsts = zip(*runs, strict=True)
        whole_s, first_s = min(wholes), min(firsts)
        found["spread"] = max(found["spread"], round(max(wholes) / whole_s - 1, 4))
        found["tpot_ms"][size] = tpot_ms(whole_s, first_s, OUTPUT_LEN)
        found["ttft_ms"][size] = round(first_s * 1e3, 2)
    return found


def throughputs(
    peer: Peer, names: Sequence[str], num_requests: int, vocab_size: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Requests and output tokens a second, the better of ``repeats``."""
    found = {}
    for name in names:
        which, sampling = THROUGHPUTS[name]
        works = mix(which, num_requests, vocab_size)
        took = min(seconds(peer, works, sampling) for _ in range(repeats))
        out_tokens = sum(work.output_len for work in works)
        found[name] = {
            "req_s": round(num_requests / took, 2),
            "out_tok_s": round(out_tokens / took, 1),
        }
    return found
