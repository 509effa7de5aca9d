"""Renders the chat templates of Hugging Face models: messages go in, the prompt's text comes out.

Templates are Jinja and come with downloads, so they run in a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...config import UserError

Message = Mapping[str, Any]
_MESSAGE = "{'role': …, 'content': …}"
_PART = "{'type': 'text', 'text': …}"
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class _Generation(Extension):
    """``{% generation %}`` marks assistant text for training; only its body is rendered."""

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
        self._origin, self._source = origin, source
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
            UserError: no messages, one without role or content, a role that is unknown, content
                that is no text, or the template refuses them.
        """
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise UserError(f"messages {messages!r}: expected a list of {_MESSAGE}")
        if not messages:
            raise UserError(f"messages is empty: expected at least one {_MESSAGE}")
        checked = [self._checked(number, message) for number, message in enumerate(messages)]
        try:
            return self._template.render(
                messages=checked,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **variables},
            )
        except Exception as error:  # a template is foreign code: it may raise anything
            raise UserError(f"{self._origin}: chat template fails: {error}") from error

    def _checked(self, number: int, message: Message) -> Message:
        """The message with its content as text, joined from its parts if need be."""
        if not isinstance(message, Mapping) or "role" not in message:
            raise UserError(f"message {message!r}: expected {_MESSAGE}")
        role, content = message["role"], message.get("content")
        # Some templates have roles of their own, such as 'ipython'.
        if role not in _ROLES and not any(f"{q}{role}{q}" in self._source for q in "'\""):
            raise UserError(f"message {number}: role {role!r}: expected {', '.join(_ROLES)}")
        if isinstance(content, str):
            return message
        if content is None and role == "assistant" and message.get("tool_calls"):
            return message
        if isinstance(content, Sequence) and content:
            return {**message, "content": "\n".join(_part_text(number, part) for part in content)}
        given = "no content" if content is None else f"content={content!r}"
        raise UserError(
            f"message {number} ({role}) has {given}: expected text, or a list of {_PART}"
        )


def _part_text(number: int, part: Any) -> str:
    """The text of one of OpenAI's content parts."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    what = f"a part of type {kind!r}" if kind not in (None, "text") else f"the part {part!r}"
    raise UserError(f"message {number} has {what}: models here read text alone, as {_PART}")


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON without jinja2's own escaping for HTML, which models have never seen."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
