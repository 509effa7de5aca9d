"""How a decode step grows: with the context, against the bytes that it must read, and with the
number of requests, against what its graph alone takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..config import UserError
from ..engine.core.prefix_cache import extend_keys
from ..engine.core.request import Request
from ..engine.engine import Engine
from ..engine.messages.sampling_params import SamplingParams
from ..graph_capture import GraphKind
from .profile_options import ProfileOptions
from .profiling import drive
from .serving import check_length, run, warm_up
from .workloads import Work, equal

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
    found = run(engine, works)
    nbytes = bytes_to_read(engine, batch, context + steps // 2)
    tpot_ms = statistics.median(found.gaps)
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
    found = drive(engine, options)
    step_us = statistics.median(step.wall_us for step in found)
    host_us = statistics.median(sum(s.cpu_us.values()) - s.cpu_us["wait"] for s in found)
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
    found: dict[str, Any] = {"context": [], "requests": [], "skipped": []}
    found["has_limit"] = engine.copy_ceiling > 0
    for batch in batches:
        for context in contexts:
            try:
                check_length(engine, context + steps + 1)
                row = measure_context(engine, batch, context, steps)
            except UserError as error:
                found["skipped"].append({"batch": batch, "context": context, "why": str(error)})
            else:
                found["context"].append(row)
    engine.core.scheduler.pool.forget_all()
    for count in requests:
        if count > engine.core.scheduler.max_num_seqs:
            why = f"max_num_seqs is {engine.core.scheduler.max_num_seqs}"
            found["skipped"].append({"requests": count, "why": why})
        else:
            found["requests"].append(measure_requests(engine, count, steps))
    return found
