"""Chat templates of Hugging Face models: Jinja in a sandbox, since they come with downloads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..config import UserError

Message = Mapping[str, Any]


class _Generation(Extension):
    """``{% generation %}`` marks assistant text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template.

    Args:
        source: the Jinja text.
        special_tokens: variables such as ``bos_token`` that templates use.
        origin: the file it came from, for errors.

    Raises:
        UserError: the template does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._origin = origin
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UserError(f"{origin}: chat template does not compile: {error}") from error

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text of a conversation, special tokens included.

        Raises:
            UserError: no messages, a message without role, or the template refuses them.
        """
        if not messages:
            raise UserError("messages is empty: expected at least one {'role': …, 'content': …}")
        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message:
                raise UserError(f"message {message!r}: expected {{'role': …, 'content': …}}")
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **variables},
            )
        except Exception as error:  # a template is foreign code: it may raise anything
            raise UserError(f"{self._origin}: chat template fails: {error}") from error


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    """Without jinja2's own escaping for HTML, which models have never seen."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
