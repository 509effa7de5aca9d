"""Logs a line every ten seconds of generating: requests, throughput, and use of the KV cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from ...config.logs import facts
from ..messages.requests import CoreStats
from .output_processor import OutputProcessor

_log = logging.getLogger(__name__)
EVERY_S = 10.0


class Load(NamedTuple):
    """What engines have done since their start, and what they do now.  Loads may be subtracted."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_prefix_tokens: int = 0
    num_prefix_hits: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_kv_blocks: int = 0
    num_free_kv_blocks: int = 0

    @classmethod
    def of(cls, stats: CoreStats, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> Load:
        """The load of one core, and the tokens that were counted elsewhere."""
        own = (getattr(stats, name) for name in cls._fields[2:])
        return cls(num_prompt_tokens, num_output_tokens, *own)

    @property
    def is_idle(self) -> bool:
        return not (self.num_running or self.num_waiting)


def log_load(now: Load, before: Load, seconds: float) -> None:
    """Log the line of an interval: rates and the share of prompt tokens found in the prefix cache
    are those of the interval, all else is as it is at its end."""
    looked_up = now.num_prefix_tokens - before.num_prefix_tokens
    hits = 100 * (now.num_prefix_hits - before.num_prefix_hits) / looked_up if looked_up else None
    used = 100 * (1 - now.num_free_kv_blocks / max(now.num_kv_blocks, 1))
    prompt = (now.num_prompt_tokens - before.num_prompt_tokens) / seconds
    output = (now.num_output_tokens - before.num_output_tokens) / seconds
    _log.info(
        "running %d, waiting %d; in %.1f tokens/s, out %.1f tokens/s; KV cache %.1f %% in use, "
        "prefix cache hits %s",
        now.num_running,
        now.num_waiting,
        prompt,
        output,
        used,
        "-" if hits is None else f"{hits:.1f} %",
        extra=facts(
            running=now.num_running,
            waiting=now.num_waiting,
            prompt_tokens_per_s=round(prompt, 1),
            output_tokens_per_s=round(output, 1),
            kv_cache_percent=round(used, 1),
            prefix_hit_percent=None if hits is None else round(hits, 1),
        ),
    )


class StatsLog:
    """Counts the time in steps, so that what an engine does at rest is in no average."""

    def __init__(self, stats: Callable[[], CoreStats], outputs: OutputProcessor) -> None:
        self._stats, self._outputs = stats, outputs
        self._seconds = 0.0
        self._before = Load()

    def add_step(self, seconds: float) -> None:
        self._seconds += seconds
        if self._seconds >= EVERY_S:
            self._write()

    def _write(self) -> None:
        outputs = self._outputs
        now = Load.of(self._stats(), outputs.num_prompt_tokens, outputs.num_output_tokens)
        log_load(now, self._before, self._seconds)
        self._before, self._seconds = now, 0.0
