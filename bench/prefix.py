"""What prefix caching saves: requests that begin alike, with and without."""

from __future__ import annotations

import random
import statistics
from typing import Any

from ..engine.engine import Engine
from .serving import Run, check_length, run, warm_up
from .workloads import Work


def shared_prefix(
    num_prompts: int,
    prefix_len: int,
    input_len: int,
    output_len: int,
    vocab_size: int,
) -> list[Work]:
    """Requests of one prefix with ``input_len`` tokens of their own behind it."""
    rng = random.Random(0)
    prefix = [rng.randrange(vocab_size) for _ in range(prefix_len)]
    return [
        Work(prefix + [rng.randrange(vocab_size) for _ in range(input_len)], output_len)
        for _ in range(num_prompts)
    ]


def measure_prefix(
    engine: Engine, num_prompts: int, prefix_len: int, input_len: int, output_len: int
) -> dict[str, Any]:
    """All requests at once: without prefix caching, with an empty cache, and with the prefix there
    from an earlier request.  ``speedup`` of the mean first-token time is the last against the
    first; ``identical`` counts requests with the same tokens in both.
    """
    scheduler = engine.core.scheduler
    check_length(engine, prefix_len + input_len + max(output_len, 2))
    works = shared_prefix(num_prompts, prefix_len, input_len, output_len, engine.inputs.vocab_size)
    had = scheduler.prefix_caching
    runs: dict[str, Run] = {}
    try:
        scheduler.prefix_caching = False
        warm_up(engine, works)
        runs["without"] = run(engine, works)
        scheduler.prefix_caching = True
        for name in ("cold", "cached"):
            if name == "cached":  # other requests, so that only the prefix is shared
                other = shared_prefix(1, prefix_len, input_len + 1, 1, engine.inputs.vocab_size)
                scheduler.pool.forget_all()
                run(engine, other)
            runs[name] = run(engine, works)
    finally:
        scheduler.pool.forget_all()
        scheduler.prefix_caching = had
    rows = [{"prefix": name, **found.to_json()} for name, found in runs.items()]
    ttft = {name: statistics.mean(r.ttft for r in found.requests) for name, found in runs.items()}
    pairs = zip(runs["without"].token_ids, runs["cached"].token_ids, strict=True)
    return {
        "num_prompts": num_prompts,
        "prefix_len": prefix_len,
        "input_len": input_len,
        "output_len": output_len,
        "ttft_mean_ms": {name: round(ms, 3) for name, ms in ttft.items()},
        "speedup": round(ttft["without"] / ttft["cached"], 2),
        "identical": sum(a == b for a, b in pairs),
        "rows": rows,
    }
