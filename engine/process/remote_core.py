"""``RemoteCore`` stands where the core would: it sends requests and aborts, and hands over the
message of each step as it comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ...config import UserError
from ..messages.requests import AbortRequests, AddRequest, CoreStats, RequestLimits, StepOutputs
from .wire import Kind, frame


class RemoteCore:
    """A ``Core`` in another process.  ``step`` takes a message that has come and waits for none.

    Args:
        send: sends a frame.
        limits: what a request must keep to.
        stats: the newest that the core has told of itself.
    """

    def __init__(
        self, send: Callable[[bytes], None], limits: RequestLimits, stats: Callable[[], CoreStats]
    ) -> None:
        self._send, self._limits, self._stats = send, limits, stats
        self.arrived: deque[StepOutputs] = deque()
        self._unfinished: set[str] = set()
        self._closed: Exception | None = None

    def check_size(self, request: AddRequest) -> None:
        """Raise ``UserError`` if the request can never run there."""
        self._limits.check(request)

    def add(self, request: AddRequest) -> None:
        """Send a request.

        Raises:
            EngineDeadError: the process has ended.
        """
        if self._closed is not None:
            raise self._closed
        self._unfinished.add(request.request_id)
        self._send(frame(Kind.ADD, request))

    def abort(self, request: AbortRequests) -> None:
        """End requests; ids that do not run are not sent."""
        known = [name for name in request.request_ids if name in self._unfinished]
        self._unfinished.difference_update(known)
        if known and self._closed is None:
            self._send(frame(Kind.ABORT, AbortRequests(known)))

    def step(self) -> StepOutputs:
        """The oldest message that has come."""
        outputs = self.arrived.popleft()
        self._unfinished.difference_update(each.request_id for each in outputs.finished)
        return outputs

    def stats(self) -> CoreStats:
        """The newest counts; a tenth of a second old, or less."""
        return self._stats()

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    @property
    def is_busy(self) -> bool:
        return bool(self._unfinished)

    def fail(self, error: Exception) -> None:
        """Have every later request raise ``error``."""
        self._closed = error
        self._unfinished.clear()

    def close(self) -> Exception:
        """Refuse every later request; the client ends the process."""
        if self._closed is None:
            self.fail(UserError("the engine is closed, and serves no request any more"))
        assert self._closed is not None
        return self._closed
