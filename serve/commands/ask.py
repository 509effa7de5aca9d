"""A client of OpenAI's API for ``chat`` and ``run-batch``, over the standard library."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ...config import MachineError, UserError

_HTTP = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
_LONGEST_WAIT_S = 3600.0


@dataclass(frozen=True)
class Server:
    """A server that is asked.

    Raises:
        UserError: the URL is not one of a server.
    """

    url: str
    api_key: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in _HTTP or not parts.hostname:
            raise UserError(f"url={self.url!r}: expected http://HOST:PORT")

    def model(self) -> str:
        """The first name of the model that it serves."""
        status, answer = self.post("/v1/models", None)
        if status != 200:
            raise UserError(f"{self.url}: {_message(answer)}")
        name: str = answer["data"][0]["id"]
        return name

    def post(self, path: str, body: Mapping[str, Any] | None) -> tuple[int, Any]:
        """The status of an answer, and its JSON.

        Raises:
            MachineError: the server cannot be reached, or answers with something else.
        """
        with self._asked(path, body) as answer:
            return answer.status, self._json(answer.read())

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[Any, None, None]:
        """The events of a streamed answer.  Closing it ends the request.

        Raises:
            UserError: the request is refused.
            MachineError: the server cannot be reached, or answers with something else.
        """
        with self._asked(path, {**body, "stream": True}) as answer:
            if answer.status != 200:
                raise UserError(_message(self._json(answer.read())))
            for line in answer:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    event = self._json(line[6:])
                    if "error" in event:
                        raise UserError(_message(event))
                    yield event

    def _asked(self, path: str, body: Mapping[str, Any] | None) -> http.client.HTTPResponse:
        parts = urlsplit(self.url)
        assert parts.hostname is not None, "checked"
        headers = {"content-type": "application/json"}
        if self.api_key is not None:
            headers["authorization"] = f"Bearer {self.api_key}"
        connection = _HTTP[parts.scheme](parts.hostname, parts.port, timeout=_LONGEST_WAIT_S)
        sent = None if body is None else json.dumps(body)
        try:
            # Each request has its own connection, which ends with its answer.
            headers["connection"] = "close"
            prefix = parts.path.rstrip("/").removesuffix("/v1")
            connection.request("GET" if body is None else "POST", prefix + path, sent, headers)
            answer: http.client.HTTPResponse = connection.getresponse()
            return answer
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise MachineError(f"{self.url} cannot be asked: {error}") from error

    def _json(self, text: bytes) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise MachineError(f"{self.url} answers no JSON: {text[:100]!r}") from None


def _message(answer: Any) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    return str(error.get("message", error)) if isinstance(error, dict) else str(answer)[:200]
