"""Time per output token, defined as for vLLM's figures in docs/performance.md.

A batch of equal requests has 128 tokens in; the time is (time for 129 tokens out minus time for 1)
/ 128, each the best of two: of two differences the lower would be that with the slower first token.
"""

from __future__ import annotations

from typing import Any

from ..engine.llm import LLM
from .serving import check_length, run, warm_up
from .workloads import INPUT_LEN, OUTPUT_LEN, equal, tpot_ms


def measure_latency(
    llm: LLM,
    batch: int,
    *,
    input_len: int = INPUT_LEN,
    output_len: int = OUTPUT_LEN,
    repeats: int = 2,
) -> dict[str, Any]:
    """One batch size: ``tpot_ms`` as above, ``ttft_ms`` of all requests' first tokens, what a run's
    requests took by themselves, and by what share the slowest of ``n`` runs took longer."""
    engine = llm.engine
    check_length(engine, input_len + output_len)
    vocab_size = engine.inputs.vocab_size
    full = equal(batch, input_len, output_len, vocab_size)
    first = equal(batch, input_len, 1, vocab_size)
    warm_up(engine, full)
    runs = [(run(engine, full), run(engine, first)) for _ in range(repeats)]
    best = min((whole for whole, _ in runs), key=lambda each: each.seconds)
    first_s = min(one.seconds for _, one in runs)
    slowest_s = max(whole.seconds for whole, _ in runs)
    return {
        "batch": batch,
        "input_len": input_len,
        "output_len": output_len,
        "tpot_ms": tpot_ms(best.seconds, first_s, output_len),
        "ttft_ms": round(first_s * 1e3, 3),
        "n": repeats,
        "spread": round(slowest_s / best.seconds - 1, 4),
        "run": best.to_json(),
    }
