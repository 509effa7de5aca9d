"""``Peers``: the other frontends of the same engines, which one may ask for what it cannot know."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from ..messages.codec import decode
from .wire import Answer, Kind, Question, Seat, frame, make_socket, outputs_address


class Peers:
    """Asks all other frontends at once, and answers what they ask.

    Args:
        seat: this frontend's place among all.
        folder: where their sockets are.
    """

    def __init__(self, seat: Seat, folder: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._index = seat.index
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        for other in range(seat.count):
            if other != seat.index:
                self._sockets[other] = make_socket(context, zmq.PUSH)
                self._sockets[other].connect(outputs_address(folder, other))
        self._numbers = itertools.count()
        self._waiting: dict[tuple[int, int], asyncio.Future[Any]] = {}
        self.answer: Callable[[str, list[str]], Any] = lambda what, names: None
        """Answers a question of another frontend."""

    async def ask(self, what: str, names: list[str], timeout_s: float | None) -> list[Any]:
        """The answers of all others to a question.

        Raises:
            TimeoutError: one has not answered in time.
        """
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        keys = [(number, other) for other in self._sockets]
        self._waiting |= {key: loop.create_future() for key in keys}
        try:
            for socket in self._sockets.values():
                question = Question(number, what, names)
                socket.send(frame(Kind.QUESTION, self._index, question), zmq.NOBLOCK)
            async with asyncio.timeout(timeout_s):
                return [await self._waiting[key] for key in keys]
        finally:
            for key in keys:
                del self._waiting[key]

    def handle(self, kind: Kind, sender: int, body: memoryview) -> None:
        if kind is Kind.QUESTION:
            asked = decode(body, Question)
            answer = Answer(asked.number, self.answer(asked.what, asked.names))
            self._sockets[sender].send(frame(Kind.ANSWER, self._index, answer), zmq.NOBLOCK)
            return
        received = decode(body, Answer)
        waiting = self._waiting.get((received.number, sender))
        if waiting is not None and not waiting.done():
            waiting.set_result(received.facts)
