"""Measures the first token of a lone request, and its parts, over HTTP and in the engine's process.

Both pause between requests: a lone request finds a device at rest, and what its return to work
takes is not what the server adds.  ``LLM.stream`` is measured without pauses too.
"""

from __future__ import annotations

import re
import time
from statistics import median
from typing import TYPE_CHECKING

from .http_load import HttpTarget, first_tokens, get
from .workloads import Work

if TYPE_CHECKING:
    from ..engine.llm import LLM

COUNT = 20
PAUSE_S = 0.01
"""Time between two requests, in seconds; a server at rest for longer would capture graphs."""
_COUNTERS_S = 0.2
"""Time after which a server's counters are up to date, in seconds."""
_SUMS = {
    "queued_ms": "vllm:request_queue_time_seconds_sum",
    "engine_ms": "fusewright:step_busy_seconds_total",
    "api_ms": "vllm:time_to_first_token_seconds_sum",
}


def over_http(target: HttpTarget, work: Work) -> dict[str, float]:
    """Times of a server's first token in milliseconds, over one connection.

    ``ttft_ms`` is the median that a client sees.  The others are means, each a part of the next:
    ``queued_ms`` from the API process until the engine has scheduled the prompt, ``engine_ms``
    from a prompt's launch to its result, ``api_ms`` from the API process until the token is back
    there.
    """
    first_tokens(target, work, 3, PAUSE_S)
    before = _sums(target)
    times = first_tokens(target, work, COUNT, PAUSE_S)
    parts = {name: after - before[name] for name, after in _sums(target).items()}
    means = {name: round(seconds / COUNT * 1e3, 3) for name, seconds in parts.items()}
    return {"ttft_ms": _ms(times), **means}


def _sums(target: HttpTarget) -> dict[str, float]:
    time.sleep(_COUNTERS_S)
    text = get(target, "/metrics").decode()
    found = dict.fromkeys(_SUMS, 0.0)
    for name, series in _SUMS.items():
        for labels, value in re.findall(rf"^{series}{{(.*)}} (\S+)$", text, re.MULTILINE):
            if 'step="decode"' not in labels:
                found[name] += float(value)
    return found


def in_process(llm: LLM, work: Work) -> dict[str, float]:
    """Time the first token of ``LLM.stream``.  ``engine_ms`` is a part of that time, and
    ``ttft_hot_ms`` the median without pauses."""
    _first_tokens(llm, work, 3, PAUSE_S)
    before = llm.engine.core.stats().busy_s["mixed"]
    times = _first_tokens(llm, work, COUNT, PAUSE_S)
    engine_s = llm.engine.core.stats().busy_s["mixed"] - before
    hot = _first_tokens(llm, work, COUNT, 0.0)
    engine_ms = round(engine_s / COUNT * 1e3, 3)
    return {"ttft_ms": _ms(times), "engine_ms": engine_ms, "ttft_hot_ms": _ms(hot)}


def _first_tokens(llm: LLM, work: Work, count: int, pause_s: float) -> list[float]:
    from ..engine.messages.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=work.output_len, ignore_eos=True)
    times = []
    for _ in range(count):
        time.sleep(pause_s)
        start = time.perf_counter()
        stream = llm.stream({"prompt_token_ids": work.prompt_token_ids}, params)
        next(stream)
        times.append(time.perf_counter() - start)
        for _ in stream:
            pass
    return times


def _ms(times: list[float]) -> float:
    return round(median(times) * 1e3, 3)
