"""Measures a whole engine beside latency and throughput, in cases that differ in one thing: the
frontend, what the prefix cache holds, the context, or the number of requests.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..config import UserError
from ..engine.async_llm import AsyncLLM
from ..engine.core.prefix_cache import extend_keys
from ..engine.core.request import Request
from ..engine.engine import Engine
from ..engine.llm import LLM
from ..engine.messages.sampling_params import SamplingParams
from ..graph_capture import GraphKind
from .profile_options import ProfileOptions
from .profiling import drive
from .serving import Run, check_length, greedy, run, warm_up
from .workloads import Work, equal

_FRONTEND_REPEATS = 3
FIRST_TOKENS = 20
PAUSE_S = 0.01
"""Seconds between two requests whose first token is timed: a lone request finds a device at
rest.  A server at rest for longer would capture graphs."""


def measure_frontends(llm: LLM, works: Sequence[Work]) -> list[dict[str, Any]]:
    """The best time of each frontend in seconds, and its throughput as a share of the batch's.

    They run by turns.  "async" reads every output of a request, "async, final only" just the last.
    """
    asynchronous = AsyncLLM.from_engine(llm.engine)
    asks = [greedy(work) for work in works]
    prompts, params = [prompt for prompt, _ in asks], [params for _, params in asks]

    async def read(index: int, final_only: bool) -> None:
        generator = asynchronous.generate(prompts[index], params[index], final_only=final_only)
        async for _ in generator:
            pass

    async def read_all(final_only: bool) -> None:
        await asyncio.gather(*(read(index, final_only) for index in range(len(works))))

    cases: dict[str, Callable[[], Any]] = {
        "batch": lambda: llm.generate(prompts, params, use_tqdm=False),
        "async": lambda: asyncio.run(read_all(False)),
        "async, final only": lambda: asyncio.run(read_all(True)),
    }
    best = dict.fromkeys(cases, float("inf"))
    for turn in range(_FRONTEND_REPEATS + 1):  # the first warms up
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            if turn:
                best[name] = min(best[name], time.perf_counter() - start)
    num_tokens = sum(work.output_len for work in works)
    return [
        {
            "frontend": name,
            "seconds": round(seconds, 4),
            "output_tokens_per_s": round(num_tokens / seconds, 1),
            "of_batch": round(best["batch"] / seconds, 4),
        }
        for name, seconds in best.items()
    ]


def measure_first_token(llm: LLM, work: Work) -> dict[str, float]:
    """Median time to the first token of ``LLM.stream`` in milliseconds.  ``engine_ms`` is a part of
    that time, and ``ttft_hot_ms`` the median without pauses."""
    _first_tokens(llm, work, 3, PAUSE_S)
    before = llm.engine.core.stats().busy_s["mixed"]
    times = _first_tokens(llm, work, FIRST_TOKENS, PAUSE_S)
    engine_s = llm.engine.core.stats().busy_s["mixed"] - before
    hot = _first_tokens(llm, work, FIRST_TOKENS, 0.0)
    figures = {"ttft_ms": times, "engine_ms": [engine_s / FIRST_TOKENS], "ttft_hot_ms": hot}
    return {name: round(statistics.median(each) * 1e3, 3) for name, each in figures.items()}


def _first_tokens(llm: LLM, work: Work, count: int, pause_s: float) -> list[float]:
    times = []
    for _ in range(count):
        time.sleep(pause_s)
        start = time.perf_counter()
        stream = llm.stream(*greedy(work))
        next(stream)
        times.append(time.perf_counter() - start)
        for _ in stream:
            pass
    return times


def shared_prefix(
    num_prompts: int, prefix_len: int, input_len: int, output_len: int, vocab_size: int
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
    scheduler, vocab_size = engine.core.scheduler, engine.inputs.vocab_size
    check_length(engine, prefix_len + input_len + max(output_len, 2))
    works = shared_prefix(num_prompts, prefix_len, input_len, output_len, vocab_size)
    other = shared_prefix(1, prefix_len, input_len + 1, 1, vocab_size)  # shares the prefix alone
    # Case -> whether prefixes are cached, and what runs before it.
    cases = {"without": (False, works), "cold": (True, []), "cached": (True, other)}
    had = scheduler.prefix_caching
    runs: dict[str, Run] = {}
    try:
        for name, (cached, before) in cases.items():
            scheduler.prefix_caching = cached
            scheduler.pool.forget_all()
            if before:
                warm_up(engine, before)
            runs[name] = run(engine, works)
    finally:
        scheduler.pool.forget_all()
        scheduler.prefix_caching = had
    ttft = {name: statistics.mean(r.ttft for r in each.requests) for name, each in runs.items()}
    pairs = zip(runs["without"].token_ids, runs["cached"].token_ids, strict=True)
    return {
        "num_prompts": num_prompts,
        "prefix_len": prefix_len,
        "input_len": input_len,
        "output_len": output_len,
        "ttft_mean_ms": {name: round(ms, 3) for name, ms in ttft.items()},
        "speedup": round(ttft["without"] / ttft["cached"], 2),
        "identical": sum(a == b for a, b in pairs),
        "rows": [{"prefix": name, **each.to_json()} for name, each in runs.items()],
    }


_REPLAYS = 20


def fill_caches(engine: Engine) -> None:
    """Random values in every KV block, since zeros would be attended to faster than real ones."""
    for cache in engine.kv_caches:
        if cache.dtype.itemsize == 1:
            cache.view(torch.uint8).random_(0, 120)  # finite numbers of e4m3
        else:
            cache.normal_()


def pretend_computed(engine: Engine, works: Sequence[Work]) -> None:
    """Let the prefix cache find every full block of these prompts, whatever lies there: the time
    of a decode does not depend on values, and prompts of 64 x 32k tokens take long to compute.

    Raises:
        UserError: the KV cache does not hold them all, with what they will generate.
    """
    pool = engine.core.scheduler.pool
    lengths = [len(work.prompt_token_ids) + work.output_len for work in works]
    needed = sum(pool.most_blocks(length, length) + len(pool.groups) for length in lengths)
    if needed > pool.num_blocks:
        raise UserError(f"{needed} KV blocks are needed, the cache has {pool.num_blocks}")
    pool.forget_all()
    for work in works:
        tokens = len(work.prompt_token_ids)
        request = Request("", work.prompt_token_ids, SamplingParams(), tokens, frozenset())
        keys = extend_keys(request, pool.block_size)
        for group in range(len(pool.groups)):
            blocks = pool.allocate(len(keys), group)
            for block_id, key in zip(blocks, keys, strict=True):
                pool.cache(block_id, key)
            pool.free(blocks)


def bytes_to_read(engine: Engine, batch: int, context: int) -> int:
    """Bytes that a decode step of ``batch`` requests behind ``context`` tokens each has to read."""
    ones = np.ones(batch, np.int32)
    return int(engine.core.reads.count(ones * (context - 1), ones))


def measure_context(engine: Engine, batch: int, context: int, steps: int) -> dict[str, Any]:
    """Median time between tokens of ``batch`` requests behind ``context`` tokens each.

    Raises:
        UserError: the engine is too small for them; it has no prefix cache.
    """
    if not engine.core.scheduler.prefix_caching:
        raise UserError("enable_prefix_caching=False: growth needs it, to skip prefills; drop it")
    works = equal(batch, context, steps + 1, engine.inputs.vocab_size, seed=context)
    pretend_computed(engine, works)
    measured = run(engine, works)
    nbytes = bytes_to_read(engine, batch, context + steps // 2)
    tpot_ms = statistics.median(measured.gaps)
    row = {
        "batch": batch,
        "context": context,
        "tpot_ms": round(tpot_ms, 4),
        "gigabytes": round(nbytes / 1e9, 3),
    }
    if engine.copy_ceiling:
        limit_ms = nbytes / engine.copy_ceiling / 1e9
        row |= {"limit_ms": round(limit_ms, 4), "of_limit": round(limit_ms / tpot_ms, 3)}
    return row


def measure_requests(engine: Engine, num_requests: int, steps: int) -> dict[str, Any]:
    """Median us of a decode step of so many requests: all of it, the CPU's part of it, and where
    it is one graph the replay by itself; ``overhead_us`` is the step without the replay."""
    options = ProfileOptions(
        "decode", num_requests, 32, steps + 12, delay_iterations=4, max_iterations=steps
    )
    taken = drive(engine, options)
    step_us = statistics.median(step.wall_us for step in taken)
    host_us = statistics.median(sum(s.cpu_us.values()) - s.cpu_us["wait"] for s in taken)
    row = {"requests": num_requests, "step_us": round(step_us, 1), "host_us": round(host_us, 1)}
    dispatch = engine.dispatcher.choose(num_requests, num_requests, query_len=1)
    if engine.config.hardware.graphs == "cuda" and dispatch.kind is GraphKind.FULL:
        graph_us = _replay_us(engine, dispatch.num_tokens)
        row |= {"graph_us": round(graph_us, 1), "overhead_us": round(step_us - graph_us, 1)}
    return row


def _replay_us(engine: Engine, size: int) -> float:
    """Time of a replay of the graph on the inputs that the last step left."""
    times = []
    with torch.inference_mode():
        for _ in range(_REPLAYS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(4):
                engine.graphs.replay_full(size, size)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) / 4 * 1e6)
    return statistics.median(times)


def measure_growth(
    engine: Engine,
    batches: Sequence[int],
    contexts: Sequence[int],
    requests: Sequence[int],
    steps: int,
) -> dict[str, Any]:
    """``context``: a row for each batch and context that the engine has room for; ``requests``: one
    for each number of requests; ``skipped``: what there was no room for, and why; ``has_limit``:
    whether the rows of ``context`` have a limit by bytes."""
    fill_caches(engine)
    warm_up(engine, equal(1, 8, 4, engine.inputs.vocab_size))
    growth: dict[str, Any] = {"context": [], "requests": [], "skipped": []}
    growth["has_limit"] = engine.copy_ceiling > 0
    for batch in batches:
        for context in contexts:
            try:
                check_length(engine, context + steps + 1)
                row = measure_context(engine, batch, context, steps)
            except UserError as error:
                growth["skipped"].append({"batch": batch, "context": context, "why": str(error)})
            else:
                growth["context"].append(row)
    engine.core.scheduler.pool.forget_all()
    for count in requests:
        if count > engine.core.scheduler.step_limits.max_num_seqs:
            why = f"max_num_seqs is {engine.core.scheduler.step_limits.max_num_seqs}"
            growth["skipped"].append({"requests": count, "why": why})
        else:
            growth["requests"].append(measure_requests(engine, count, steps))
    return growth
