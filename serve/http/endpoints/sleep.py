"""``/sleep``, ``/wake_up`` and ``/is_sleeping``, which take their arguments from the query, as in
vLLM.  They concern everybody, so they need an admin key."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from ....engine.process.wire import Kind, Sleep
from ..intake.errors import ApiError, json_response
from ..jobs.metrics import PEERS_S
from ..jobs.state import ABORT, ADMIN, ALL, ServerState

_LOOK_S = 0.05


async def sleep(request: Request) -> Response:
    """``POST /sleep?level=1&mode=abort``: frees the device's memory; 503 meets requests then."""
    state = _state_of_admin(request)
    level, mode = request.query_params.get("level", "1"), request.query_params.get("mode", "abort")
    if level not in ("1", "2"):
        raise ApiError(400, f"level={level[:20]!r}: expected 1 or 2", param="level")
    if mode not in ("abort", "wait"):
        raise ApiError(
            400,
            f"mode={mode[:20]!r}: expected abort, which ends the requests that run, or wait, which "
            "lets them finish",
            param="mode",
        )
    if mode == "abort":
        try:
            await state.client.peers.ask(ABORT, [ADMIN, ALL], PEERS_S)
        except TimeoutError:
            raise ApiError(503, "another API process does not answer; try again later") from None
        state.abort_named([ALL], ADMIN)
    while state.num_jobs:
        await asyncio.sleep(_LOOK_S)
    await _ask(state, Sleep(int(level)))
    return Response()


async def wake_up(request: Request) -> Response:
    """``POST /wake_up?tags=weights&tags=kv_cache``: ends the sleep; without tags, of both."""
    state = _state_of_admin(request)
    await _ask(state, Sleep(0, request.query_params.getlist("tags") or None))
    return Response()


async def is_sleeping(request: Request) -> Response:
    """``GET /is_sleeping``."""
    state: ServerState = request.app.state.server
    return json_response({"is_sleeping": state.client.is_sleeping})


def _state_of_admin(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    if request.scope["owner"] != ADMIN:
        raise ApiError(
            403,
            f"{request.url.path} needs an admin key: start the server with --admin-api-key, and "
            "send it as the key",
        )
    state.check_serving(may_sleep=True)
    return state


async def _ask(state: ServerState, asked: Sleep) -> None:
    told = await state.client.ask(Kind.SLEEP, asked)
    if errors := [facts["error"] for facts in told if facts["error"]]:
        raise ApiError(400, errors[0])
