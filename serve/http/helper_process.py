"""An API process that is not the first: ``python -m fusewright.serve.http.helper_process``.

It reads its ``Orders`` as a line of JSON on stdin, which no list of processes shows.  Each further
line there is a signal that the first process got, and the end of stdin is the end.  It writes READY
and DRAINED to stdout.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from typing import Any

import msgspec
import uvloop

from ...config import UserError
from ...engine.ranks.lifetime import end_with, leave_signals_to_the_parent
from .helper import Orders


async def _main() -> None:
    # Not sooner: the import takes long, and only now are signals left to the first process.
    from .life import Endpoint, Life

    orders_in: Any = asyncio.StreamReader(limit=2**24)
    loop = asyncio.get_running_loop()
    protocol = asyncio.StreamReaderProtocol(orders_in)
    await loop.connect_read_pipe(lambda: protocol, os.fdopen(0, "rb"))
    orders = msgspec.json.decode(await orders_in.readline(), type=Orders)
    end_with(orders.parent_pid)
    say_to_first = os.fdopen(1, "wb", buffering=0)
    listening = socket.socket(fileno=orders.listening)
    endpoint = Endpoint("", 0, orders.certificate, orders.private_key)
    life = Life(orders.options, orders.settings, orders.seat, [listening], endpoint)
    life.tell = say_to_first.write

    async def obey() -> None:
        while await orders_in.readline():
            life.on_signal()
        life.release()

    obeying = asyncio.ensure_future(obey())
    with suppress(UserError):  # the first process tells what it is, and ends this one
        await life.run()
    await obeying


if __name__ == "__main__":
    leave_signals_to_the_parent()
    uvloop.run(_main())
