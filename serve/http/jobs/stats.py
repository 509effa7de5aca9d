"""Logs the load of a whole server whenever an interval has passed in which it did something."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from ....engine.frontend.engine_log import Load, log_load
from .state import ServerState


async def log_loads(state: ServerState, every_s: float) -> None:
    """Log a line each ``every_s`` seconds until this is cancelled, and none while nothing runs, but
    for the one that says so."""
    loop = asyncio.get_running_loop()
    before, since = Load(), loop.time()
    while True:
        await asyncio.sleep(every_s)
        with suppress(TimeoutError):  # of another API process; the next line has its share
            now, at = await load_of(state), loop.time()
            # Engines tell that nothing runs a moment behind the last token.
            if not (now.is_idle and before.is_idle) or now[:2] != before[:2]:
                log_load(now, before, at - since)
            before, since = now, at


async def load_of(state: ServerState) -> Load:
    """The load of all engines, whose tokens all API processes have counted.

    Raises:
        TimeoutError: an API process has not answered.
    """
    tally = await state.metrics.total()
    own = Load(tally.num_prompt_tokens, tally.num_output_tokens)
    loads = [Load.of(each.core) for each in state.client.counters]
    sums = map(sum, zip(own, *loads, strict=True))
    return Load(*sums)
