"""``OutputStream`` takes the outputs of a caller's requests to the coroutine that waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ..frontend.outputs import CompletionOutput, RequestOutput


class OutputStream:
    """The outputs of a caller's requests, for one coroutine.  It takes the newest of each: what
    came while it was busy is one item."""

    def __init__(self, request_ids: Sequence[str]) -> None:
        self.open = set(request_ids)
        """The requests that have not finished."""
        self._newest: dict[str, RequestOutput] = {}
        # Where several outputs of a request wait to be taken: their completions by index.
        self._several: dict[str, dict[int, CompletionOutput]] = {}
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def show(self, output: RequestOutput) -> None:
        """Replace the output of its request that waits to be taken.  Before it has finished, it has
        the completions that have changed, which join those that wait."""
        request_id = output.request_id
        if output.finished:
            self.open.discard(request_id)
            self._several.pop(request_id, None)
        elif (before := self._newest.get(request_id)) is not None:
            waiting = self._several.setdefault(request_id, {})
            for each in (*(() if waiting else before.outputs), *output.outputs):
                waiting[each.index] = each
        self._newest[request_id] = output
        self._wake()

    def fail(self, error: Exception) -> None:
        """Have ``next`` raise ``error``, now and for good."""
        self._error = error
        self.open.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def is_done(self) -> bool:
        return not self.open and not self._newest and self._error is None

    async def next(self) -> list[RequestOutput]:
        """Wait for outputs that are newer than those taken; not to be called when ``is_done``.

        Raises:
            EngineDeadError: none will come.
        """
        while not self._newest:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        taken, self._newest = self._newest, {}
        several, self._several = self._several, {}
        for request_id, completions in several.items():
            taken[request_id].outputs = list(completions.values())
        return list(taken.values())
