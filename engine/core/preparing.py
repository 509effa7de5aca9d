"""``Preparing`` holds requests whose grammars are being compiled: others are not held up."""

from __future__ import annotations

from .request import Request, Siblings


class Preparing:
    """Requests that the scheduler does not have yet, by their ids."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        """Number of outputs that the held requests ask for."""
        return sum(Siblings.of(each).num_left for each in self._requests.values())

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def add(self, request: Request) -> None:
        """Hold a request until ``take_ready`` returns it."""
        self._requests[request.request_id] = request

    def abort(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def clear(self) -> None:
        self._requests.clear()

    def take_ready(self) -> list[Request]:
        """Remove and return the requests whose grammar is compiled or has failed, oldest first."""
        ready = [each for each in self._requests.values() if not each.waits]
        for each in ready:
            del self._requests[each.request_id]
        return ready
