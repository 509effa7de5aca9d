"""Measures what it costs to stream every token to an event loop.  The same requests run through
``LLM.generate`` as one batch, and through ``AsyncLLM`` as a coroutine each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..engine.async_llm import AsyncLLM
from ..engine.llm import LLM
from ..engine.messages.sampling_params import SamplingParams
from .workloads import Work

_REPEATS = 3


def measure_frontends(llm: LLM, works: Sequence[Work]) -> list[dict[str, Any]]:
    """The best time of each frontend in seconds, and its throughput as a share of the batch's.

    They run by turns.  "async" reads every output of a request, "async, final only" just the last.
    """
    asynchronous = AsyncLLM.from_engine(llm.engine)
    prompts = [{"prompt_token_ids": work.prompt_token_ids} for work in works]
    params = [
        SamplingParams(temperature=0.0, max_tokens=work.output_len, ignore_eos=True)
        for work in works
    ]

    def batch() -> None:
        llm.generate(prompts, params, use_tqdm=False)

    async def read(index: int, final_only: bool) -> None:
        generator = asynchronous.generate(prompts[index], params[index], final_only=final_only)
        async for _ in generator:
            pass

    async def read_all(final_only: bool) -> None:
        await asyncio.gather(*(read(index, final_only) for index in range(len(works))))

    runs: dict[str, Callable[[], None]] = {
        "batch": batch,
        "async": lambda: asyncio.run(read_all(False)),
        "async, final only": lambda: asyncio.run(read_all(True)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(_REPEATS):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    num_tokens = sum(work.output_len for work in works)
    best = {name: min(times) for name, times in seconds.items()}
    return [
        {
            "frontend": name,
            "seconds": round(best[name], 4),
            "output_tokens_per_s": round(num_tokens / best[name], 1),
            "of_batch": round(best["batch"] / best[name], 4),
        }
        for name in runs
    ]
