"""``ApiError``: an error as OpenAI's clients read it, with the field that is wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from reprlib import Repr
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

from ....config import BusyError, EngineDeadError, UserError

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_denied_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    431: "invalid_request_error",
    499: "aborted_error",
    500: "server_error",
    503: "service_unavailable",
}
_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
}
ANTHROPIC = "/v1/messages"
"""The paths that begin so answer in Anthropic's form."""
_FIELDS = re.compile(r"^(\w+)(?:=| has )")
_MOST_MESSAGE = 2000
"""Characters of a message: some repeat what is wrong, which may be all of the body."""
_MOST_SHOWN = 100
"""Characters of a wrong value that an error repeats."""
_SHORT = Repr()
_SHORT.maxstring = _MOST_SHOWN


class ApiError(Exception):
    """An answer that is no success.

    Args:
        status: the HTTP status.
        param: the field of the body that is wrong, if one is.
        code: a short name that clients may compare.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > _MOST_MESSAGE:
            message = message[:_MOST_MESSAGE] + "…"
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code if self.code is not None else self.status,
            }
        }

    def response(self, path: str = "") -> Response:
        """The answer on a path."""
        is_anthropic = path == ANTHROPIC or path.startswith(ANTHROPIC + "/")
        body = in_anthropic_form(self) if is_anthropic else self.body()
        return json_response(body, self.status, self.headers)


def in_anthropic_form(error: ApiError) -> dict[str, Any]:
    """The body of an error as Anthropic's clients read it; the message names the field."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ANTHROPIC_KINDS.get(error.status, other)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def overloaded(message: str, *, closes: bool = False) -> ApiError:
    """The answer to whoever comes while there is too much to do.

    Args:
        closes: the connection ends with the answer.
    """
    headers = {"retry-after": "1"} | ({"connection": "close"} if closes else {})
    return ApiError(503, message, code="overloaded", headers=headers)


def body_too_large(most: int) -> ApiError:
    return ApiError(
        413, f"the body is larger than {most} bytes; send less", headers={"connection": "close"}
    )


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    data = msgspec.json.encode(content)
    return Response(data, status, headers, media_type="application/json")


def as_json(content: Any) -> Any:
    """``content`` as a part of a response that is JSON already.  Log probabilities take several
    times as much room before that."""
    return msgspec.Raw(msgspec.json.encode(content))


def api_error(error: Exception, param: str | None = None) -> ApiError:
    """The answer to an exception that a request raised.  ``param`` is the field at fault, for
    messages that do not name it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return ApiError(500, str(error), code="engine_dead")
    if isinstance(error, BusyError):
        return overloaded(str(error))
    if isinstance(error, UserError):
        message = str(error).removeprefix("SamplingParams: ")
        if message.startswith("grammar: "):
            param = "response_format"
        field = _FIELDS.match(message)
        return ApiError(400, message, param=field[1] if field else param)
    return ApiError(500, f"internal error: {type(error).__name__}; please report")


def invalid(error: ValidationError) -> ApiError:
    """The answer to a body of another form; it names the field."""
    errors = error.errors(include_url=False, include_context=False)
    first = errors[0]
    if first["type"].startswith("json_"):
        return ApiError(400, f"the body is not JSON: {first['msg']}")
    if not first["loc"]:
        return ApiError(400, "the body is no JSON object")
    # A field of several forms has an error for each; places within it tell little then.
    field = str(first["loc"][0])
    path = field
    if len({each["loc"][:2] for each in errors if each["loc"][0] == field}) == 1:
        path = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{path}: no such field; remove it", param=field)
    if first["type"] == "missing":
        return ApiError(400, f"{path}: the field is missing", param=field)
    words = dict.fromkeys(each["msg"] for each in errors if each["loc"][0] == field)
    shown = _SHORT.repr(first["input"])
    if len(shown) > _MOST_SHOWN:
        shown = shown[:_MOST_SHOWN] + "…"
    return ApiError(400, f"{path}={shown}: {', or: '.join(words)}", param=field)
