"""``RemoteCore`` stands where the core would: it sends requests and aborts to the replicas of the
engine, and hands over the message of each of their steps as it comes."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from msgspec import Struct, structs

from ...config import UserError
from ..messages.requests import AbortRequests, AddRequest, CoreStats, RequestLimits, StepOutputs
from .router import Router
from .wire import Kind, Queued


class RemoteCore:
    """A ``Core`` in other processes.  ``step`` takes a message that has come and waits for none.

    Args:
        send: sends a message to a replica.
        limits: what a request must keep to.
        stats: the newest that the replicas have told of themselves.
    """

    def __init__(
        self,
        send: Callable[[int, Kind, Struct], None],
        router: Router,
        limits: RequestLimits,
        stats: Callable[[], CoreStats],
    ) -> None:
        self._send, self._router, self._limits, self._stats = send, router, limits, stats
        self.arrived: deque[StepOutputs] = deque()
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
        chosen = self._router.choose(request)
        for replica, indices in chosen.items():
            part = request
            if len(chosen) > 1:
                part = structs.replace(request, outputs=(indices.start, indices.stop))
            self._send(replica, Kind.ADD, Queued.of(part))

    def abort(self, request: AbortRequests) -> None:
        """End requests or outputs; ids of what does not run are not sent."""
        running = defaultdict(list)
        for name in request.request_ids:
            for replica in self._router.close(name):
                running[replica].append(name)
        for replica, names in running.items() if self._closed is None else ():
            self._send(replica, Kind.ABORT, AbortRequests(names))

    def step(self) -> StepOutputs:
        outputs = self.arrived.popleft()
        for each in outputs.finished:
            self._router.close(each.request_id)
        return outputs

    def stats(self) -> CoreStats:
        """The newest counts; a tenth of a second old, or less."""
        return self._stats()

    @property
    def num_unfinished(self) -> int:
        return len(self._router)

    def num_open_at(self, replica: int) -> int:
        return self._router.num_open(replica)

    @property
    def is_busy(self) -> bool:
        return len(self._router) > 0

    def fail(self, error: Exception) -> None:
        """Have every later request raise ``error``."""
        self._closed = error
        self._router.clear()

    def close(self) -> Exception:
        """Refuse every later request; the client ends the processes."""
        if self._closed is None:
            self.fail(UserError("the engine is closed, and serves no request any more"))
        assert self._closed is not None
        return self._closed
