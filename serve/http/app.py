"""``make_app``: the routes, and what becomes of errors that they let through."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Scope

from ... import __version__
from ...config import UserError
from .endpoints.chat import chat_completions
from .endpoints.completions import completions
from .endpoints.events import ClientGone
from .endpoints.messages import count_tokens, messages
from .endpoints.responses import responses
from .endpoints.service import (
    abort_requests,
    api_page,
    detokenize,
    health,
    live,
    load,
    metrics,
    model,
    models,
    reset_prefix_cache,
    server_info,
    status_page,
    tokenize,
    version,
)
from .endpoints.sleep import is_sleeping, sleep, wake_up
from .guard import Guard
from .intake.answer_log import GONE, REASON
from .intake.errors import ApiError, api_error, json_response
from .intake.fields import why_no_path
from .intake.protocol import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    MessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from .jobs.state import ServerState

_Endpoint = Callable[[Request], Awaitable[Response]]

POSTS: tuple[tuple[str, _Endpoint, type[BaseModel]], ...] = (
    ("/v1/completions", completions, CompletionRequest),
    ("/v1/chat/completions", chat_completions, ChatRequest),
    ("/v1/responses", responses, ResponsesRequest),
    ("/v1/messages", messages, MessagesRequest),
    ("/v1/messages/count_tokens", count_tokens, CountTokensRequest),
    ("/tokenize", tokenize, TokenizeRequest),
    ("/detokenize", detokenize, DetokenizeRequest),
    ("/abort_requests", abort_requests, AbortRequest),
)
GETS: tuple[tuple[str, _Endpoint], ...] = (
    ("/v1/models", models),
    ("/v1/models/{name:path}", model),
    ("/live", live),
    ("/health", health),
    ("/is_sleeping", is_sleeping),
    ("/ping", health),
    ("/load", load),
    ("/version", version),
    ("/server_info", server_info),
    ("/docs", api_page),
    ("/", status_page),
    ("/metrics", metrics),
)


BARE_POSTS: tuple[tuple[str, _Endpoint], ...] = (
    ("/ping", health),
    ("/reset_prefix_cache", reset_prefix_cache),
    ("/sleep", sleep),
    ("/wake_up", wake_up),
)
"""Those that take no body."""

_NAME = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]


class _Direct(Route):
    """A route that calls its endpoint, where FastAPI's would first look for what to inject.

    It comes before the route of the same path that describes it in the OpenAPI schema.  A request
    reaches its endpoint 60 to 80 us earlier (docs/lab/engine.md).
    """

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return match, {**child, "route": self}


def make_app(state: ServerState) -> ASGIApp:
    """The application over an engine, inside what guards it."""
    app = FastAPI(title="fusewright", version=__version__, docs_url=None, redoc_url=None)
    app.state.server = state
    app.router.routes += [_Direct(path, endpoint, methods=["POST"]) for path, endpoint, _ in POSTS]
    for path, endpoint, kind in POSTS:
        app.add_api_route(
            path, endpoint, methods=["POST"], response_model=None, openapi_extra=_takes(kind)
        )
    for path, read in GETS:
        extra = {"parameters": _NAME} if "{name" in path else None
        app.add_api_route(path, read, methods=["GET"], response_model=None, openapi_extra=extra)
    for path, act in BARE_POSTS:
        app.add_api_route(path, act, methods=["POST"], response_model=None)
    for kind_of_error in (ApiError, UserError, HTTPException, Exception):
        app.add_exception_handler(kind_of_error, _answer)
    for gone in (ClientGone, ClientDisconnect):
        app.add_exception_handler(gone, _nobody)
    guarded: ASGIApp = Guard(app, state)
    if state.settings.allowed_origins:
        from starlette.middleware.cors import CORSMiddleware

        guarded = CORSMiddleware(
            guarded,
            allow_origins=state.settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return guarded


def _takes(kind: type[BaseModel]) -> dict[str, Any]:
    """The part of the OpenAPI schema that describes a body."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    nested = schema.pop("$defs", {})
    text = {"application/json": {"schema": _inlined(schema, nested)}}
    return {"requestBody": {"required": True, "content": text}}


def _inlined(schema: Any, nested: dict[str, Any]) -> Any:
    """A schema without references, as each body is described apart from the others."""
    if isinstance(schema, list):
        return [_inlined(each, nested) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(nested[schema["$ref"].rpartition("/")[2]], nested)
    return {name: _inlined(value, nested) for name, value in schema.items()}


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        status, what = error.status_code, error.detail
        if status == 404 and (why := why_no_path(request.url.path)):
            # LiteLLM takes a server that answers 404 out of service for all its clients.
            status, what = 400, why
        elif status == 404:
            what = "no such path; /docs lists those that are served"
        error = ApiError(status, f"{request.method} {request.url.path[:200]}: {what}")
    answer = api_error(error)
    request.scope[REASON] = answer.message
    return answer.response(request.url.path)


async def _nobody(request: Request, error: Exception) -> Response:
    """The answer to a client that is gone; 499 is how proxies log it."""
    request.scope[REASON] = GONE
    return json_response(None, 499)
