"""Logs a line every ten seconds of generating: throughput, requests and use of the KV cache."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..messages.requests import CoreStats
from .output_processor import OutputProcessor

_log = logging.getLogger(__name__)
_EVERY_S = 10.0


class StatsLog:
    """Counts the time in steps, so that what an engine does at rest is in no average."""

    def __init__(self, stats: Callable[[], CoreStats], outputs: OutputProcessor) -> None:
        self._stats, self._outputs = stats, outputs
        self._seconds = 0.0
        self._before = (0, 0)

    def add_step(self, seconds: float) -> None:
        self._seconds += seconds
        if self._seconds >= _EVERY_S:
            self._write()

    def _write(self) -> None:
        now = (self._outputs.num_prompt_tokens, self._outputs.num_output_tokens)
        prompt, output = ((a - b) / self._seconds for a, b in zip(now, self._before, strict=True))
        self._before, self._seconds = now, 0.0
        stats = self._stats()
        used = 1 - stats.num_free_kv_blocks / stats.num_kv_blocks
        hits = stats.num_prefix_hits / max(stats.num_prefix_tokens, 1)
        _log.info(
            "prompts %.1f tokens/s, output %.1f tokens/s; %d requests running, %d waiting; "
            "KV cache %.1f %% in use, %.1f %% of prompt tokens found in it",
            prompt,
            output,
            stats.num_running,
            stats.num_waiting,
            100 * used,
            100 * hits,
        )
