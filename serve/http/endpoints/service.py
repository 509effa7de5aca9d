"""Answers the endpoints beside generation: models, tokens, health, metrics."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from .... import __version__
from ....config import UserError
from ....engine.process.wire import Kind
from ..intake.errors import ApiError, api_error, json_response
from ..intake.protocol import AbortRequest, DetokenizeRequest, TokenizeRequest
from ..jobs.metrics import PEERS_S
from ..jobs.state import ABORT, ADMIN, ALL, Phase, ServerState
from .api_page import page_of
from .body import read
from .generation import render

_T = TypeVar("_T")
_FEW_TOKENS = 1000
"""Tokens that are decoded at once, which takes a millisecond; more are in a thread."""


async def models(request: Request) -> Response:
    """``GET /v1/models``."""
    state = _state(request)
    return json_response(
        {
            "object": "list",
            "data": [_card(state, name) for name in state.settings.model_names],
            # Anthropic's clients read these.
            "has_more": False,
            "first_id": state.settings.model_names[0],
            "last_id": state.settings.model_names[-1],
        }
    )


async def model(request: Request) -> Response:
    """``GET /v1/models/NAME``."""
    state = _state(request)
    return json_response(_card(state, state.check_model(request.path_params["name"])))


def _card(state: ServerState, name: str) -> dict[str, Any]:
    ready = state.client.is_ready
    return {
        "id": name,
        "object": "model",
        "created": state.started_at,
        "owned_by": "fusewright",
        "root": state.settings.model_names[0],
        "parent": None,
        "max_model_len": state.client.inputs.max_model_len if ready else None,
        # Anthropic's clients read these.
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(state.started_at, UTC).isoformat(),
    }


async def tokenize(request: Request) -> Response:
    """``POST /tokenize``: the token ids of a prompt, or of a conversation."""
    state = _state(request)
    body = await read(request, TokenizeRequest)
    state.check_serving()
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "expected either prompt or messages", param="prompt")
    ids: list[int]
    if body.messages is not None:
        prompt: Any = await render(state, body, body.messages, body.tools)
        ids = prompt["prompt_token_ids"]
    else:
        special = body.add_special_tokens is not False
        try:
            ids = await state.client.encode(body.prompt or "", add_special_tokens=special)
        except UserError as error:
            raise api_error(error, "prompt") from error
    answer = {
        "count": len(ids),
        "max_model_len": state.client.inputs.max_model_len,
        "tokens": ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        text_of = state.client.inputs.require_tokenizer().token_text
        answer["token_strs"] = await state.client.in_thread(lambda: [text_of(each) for each in ids])
    return json_response(answer)


async def detokenize(request: Request) -> Response:
    """``POST /detokenize``: the text of token ids."""
    state = _state(request)
    body = await read(request, DetokenizeRequest)
    state.check_serving()
    state.check_model(body.model)
    inputs = state.client.inputs
    if body.tokens and max(body.tokens) >= inputs.vocab_size:
        raise ApiError(
            400,
            f"tokens has {max(body.tokens)}: outside the vocabulary, 0..{inputs.vocab_size - 1}",
            param="tokens",
        )
    decode = partial(inputs.require_tokenizer().decode, body.tokens, False)
    text = await state.client.in_thread(decode) if len(body.tokens) > _FEW_TOKENS else decode()
    return json_response({"prompt": text})


async def abort_requests(request: Request) -> Response:
    """``POST /abort_requests``: ends requests of the same API key by the ids that their answers
    carry, or with an admin key those of any, or "all"."""
    state, owner = _state(request), request.scope["owner"]
    body = await read(request, AbortRequest)
    if body.request_ids != ALL:
        asked = [each for each in body.request_ids if each != ALL]
    elif owner == ADMIN:
        asked = [ALL]
    else:
        raise ApiError(
            403,
            'request_ids="all" needs an admin key: start the server with --admin-api-key, and send '
            "it as the key",
            param="request_ids",
        )
    elsewhere = await _of_all(state.client.peers.ask(ABORT, [owner, *asked], PEERS_S))
    aborted = state.abort_named(asked, owner)
    return json_response({"aborted": [*aborted, *itertools.chain(*elsewhere)]})


async def reset_prefix_cache(request: Request) -> Response:
    """``POST /reset_prefix_cache``: every engine forgets the prefixes that it has cached; what runs
    goes on."""
    state = _state(request)
    state.check_serving()
    await state.client.ask(Kind.RESET)
    return json_response({})


async def load(request: Request) -> Response:
    """``GET /load``: how many calls are open, of all API processes."""
    return json_response({"server_load": _state(request).num_jobs})


async def server_info(request: Request) -> Response:
    """``GET /server_info``: the options, and what the engines report of themselves."""
    state = _state(request)
    state.check_serving()
    reports = await state.client.ask()
    options = asdict(state.client.options)
    answer = {"version": __version__, "models": state.settings.model_names, "options": options}
    return json_response({**answer, "engines": reports})


async def live(request: Request) -> Response:
    """``GET /live``: the process is up."""
    return json_response({"status": "live"})


async def health(request: Request) -> Response:
    """``GET /health``: 200 only while the engine moves and requests are taken."""
    reason = _state(request).health()
    return json_response({"status": reason or "ok"}, 503 if reason else 200)


async def status_page(request: Request) -> Response:
    """``GET /``: a page that looks at ``/health`` and ``/metrics`` every second."""
    page = files(__package__).joinpath("status.html").read_bytes()
    return Response(page, media_type="text/html")


async def api_page(request: Request) -> Response:
    """``GET /docs``: a page of the paths and of the fields of their bodies."""
    return Response(page_of(request.app.openapi()), media_type="text/html")


async def version(request: Request) -> Response:
    """``GET /version``."""
    return json_response({"version": __version__})


async def metrics(request: Request) -> Response:
    """``GET /metrics``, in Prometheus' text format."""
    state = _state(request)
    if state.phase is Phase.STARTING:
        raise ApiError(503, "the server is starting", headers={"retry-after": "1"})
    text = await _of_all(state.metrics.gather())
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def _of_all(answers: Awaitable[_T]) -> _T:
    """The answers of all API processes."""
    try:
        return await answers
    except TimeoutError:
        raise ApiError(503, "another API process does not answer; try again later") from None


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state
