"""Time per output token, defined as for vLLM's figures in docs/performance.md.

A batch of equal requests has 128 tokens in; the time is (time for 129 tokens out minus time for 1)
/ 128, each the best of two: of two differences the lower would be that with the slower first token.
On a machine that does other work meanwhile, even the best for 129 may be shorter than the best for
1; then both are measured again.
"""

from __future__ import annotations

from typing import Any

from ..engine.llm import LLM
from .serving import Run, check_length, run, warm_up
from .workloads import INPUT_LEN, OUTPUT_LEN, equal, tpot_ms

_MOST_AGAIN = 20
"""Most runs beyond those asked for, while a whole batch takes no longer than its first tokens."""


def measure_latency(
    llm: LLM,
    batch: int,
    *,
    input_len: int = INPUT_LEN,
    output_len: int = OUTPUT_LEN,
    repeats: int = 2,
) -> dict[str, Any]:
    """One batch size: ``tpot_ms`` as above, ``ttft_ms`` of all requests' first tokens, what a run's
    requests took by themselves, and by what share the slowest of ``n`` runs took longer.

    Raises:
        UserError: the machine is too busy to measure the difference.
    """
    engine = llm.engine
    check_length(engine, input_len + output_len)
    vocab_size = engine.inputs.vocab_size
    full = equal(batch, input_len, output_len, vocab_size)
    first = equal(batch, input_len, 1, vocab_size)
    warm_up(engine, full)
    wholes, firsts = list[Run](), list[Run]()
    while len(wholes) < repeats or (
        len(wholes) < repeats + _MOST_AGAIN and _best(wholes).seconds <= _best(firsts).seconds
    ):
        wholes.append(run(engine, full))
        firsts.append(run(engine, first))
    best, first_s = _best(wholes), _best(firsts).seconds
    slowest_s = max(each.seconds for each in wholes)
    return {
        "batch": batch,
        "input_len": input_len,
        "output_len": output_len,
        "tpot_ms": tpot_ms(best.seconds, first_s, output_len),
        "ttft_ms": round(first_s * 1e3, 3),
        "n": len(wholes),
        "spread": round(slowest_s / best.seconds - 1, 4),
        "run": best.to_json(),
    }


def _best(runs: list[Run]) -> Run:
    return min(runs, key=lambda each: each.seconds)
