"""Renders the chat templates of Hugging Face models: messages go in, the prompt's text comes out.

Templates are Jinja and come with downloads, so they run in a sandbox and see plain data alone.
Their environment is that of ``transformers`` 5.23: its globals, filters and options.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ...config import UserError
from .chat_messages import (
    CHANGES,
    Message,
    checked,
    plain_data,
    probes,
    with_parts,
    with_text,
    without_preambles,
)

TAKEN = (
    *("messages", "add_generation_prompt", "add_special_tokens", "continue_final_message"),
    *("self", "template"),
)
"""Variables that have arguments of their own."""
_LISTS = ("tools", "documents")
"""Variables that every template may read: None, or a list of objects."""
_MESSAGE = "{'role': …, 'content': …}"
_PROBE = "fusewright probe"
_OPEN_END = "fusewright goes on here "
"""Marks the end of a last message that is to be continued."""


class _Generation(Extension):
    """``{% generation %}`` marks assistant text for training; only its body is rendered, in a scope
    of its own."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Namespace(Namespace):
    """``namespace()`` without names that begin with an underscore: those are Python's own."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace: the name {name!r} begins with an underscore")


class _Dict:
    """``dict`` without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Refusal(TemplateError):
    """The template's own ``raise_exception``."""


def _refuse(message: str) -> NoReturn:
    raise _Refusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja2's own escaping for HTML, which models have never seen."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


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
        environment = _environment()
        self._origin, self._source = origin, source
        self._special_tokens = dict(special_tokens)
        self._takes: dict[tuple[str, bool], bool] = {}
        try:
            self._template = environment.from_string(source)
            undeclared = meta.find_undeclared_variables(environment.parse(source))
            self.variables = frozenset(undeclared.difference(environment.globals))
        except (TemplateError, SyntaxError, RecursionError) as error:
            raise UserError(f"{origin}: chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation, special tokens included.

        A template that joins arguments of calls or absent content to text gets them as text.

        Args:
            continue_final_message: the text ends with the last message's, for the model to go on.
            variables: the template's variables; ``tools`` and ``documents`` are lists of objects.

        Raises:
            UserError: no messages, one without role or content, a role that is unknown, content
                that is no text, a variable that is no plain data, or the template refuses them; the
                last message cannot be continued.
        """
        if continue_final_message and add_generation_prompt:
            raise UserError(
                "continue_final_message: a generation prompt would begin another message; give "
                "add_generation_prompt=False"
            )
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise UserError(f"messages {messages!r}: expected a list of {_MESSAGE}")
        if not messages:
            raise UserError(f"messages is empty: expected at least one {_MESSAGE}")
        lists = {name: _list_of_objects(name, variables.get(name)) for name in _LISTS}
        others = {name: value for name, value in variables.items() if name not in _LISTS}
        values = {
            **self._special_tokens,
            **{name: plain_data(name, value) for name, value in others.items()},
            **lists,
            "add_generation_prompt": add_generation_prompt,
        }
        conversation = [
            self._in_form(checked(number, message, self._source))
            for number, message in enumerate(messages)
        ]
        if continue_final_message:
            conversation[-1] = _left_open(conversation[-1])
        first: Exception | None = None
        for change in (None, *CHANGES):
            changed = conversation if change is None else change(conversation)
            if changed is None:
                continue
            try:
                text = self._render(changed, values)
                return self._cut(text) if continue_final_message else text
            except UserError:
                raise
            except Exception as error:  # a template is foreign code: it may raise anything
                first = first or error
                if isinstance(error, _Refusal):
                    break
        shorter = without_preambles(conversation) if isinstance(first, _Refusal) else None
        if shorter is not None and not continue_final_message:
            with suppress(Exception):  # the first error says more
                return self._render(shorter, values)
        raise UserError(f"{self._origin}: chat template fails: {first}") from first

    def _cut(self, text: str) -> str:
        """The prompt up to where its last message is to go on, without white space where the
        template takes that away."""
        mark = _OPEN_END.rstrip()
        at = text.rfind(mark)
        if at < 0:
            raise UserError(
                f"{self._origin}: continue_final_message: the chat template does not show the last "
                "message as it is; leave it out"
            )
        return text[:at] if text.startswith(_OPEN_END, at) else text[:at].rstrip()

    def _render(self, messages: Sequence[Message], values: Mapping[str, Any]) -> str:
        return self._template.render({**values, "messages": messages})

    def _in_form(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with its content as the template reads it: parts or text.  A template that
        reads both gets what came."""
        content, role = message.get("content"), message["role"]
        if isinstance(content, list):
            return message if self._shows(role, in_parts=True) else with_text(message)
        if isinstance(content, str) and content and not self._shows(role, in_parts=False):
            return with_parts(message) if self._shows(role, in_parts=True) else message
        return message

    def _shows(self, role: str, *, in_parts: bool) -> bool:
        """Whether the template shows a message's content that is given in this form, by trying."""
        known = self._takes.get((role, in_parts))
        if known is None:
            values = {**self._special_tokens, "tools": None, "documents": None}
            content = [{"type": "text", "text": _PROBE}] if in_parts else _PROBE
            try:
                text = self._render(
                    probes(role, content), {**values, "add_generation_prompt": False}
                )
            except Exception:  # it wants other conversations
                known = not in_parts if role == "user" else self._shows("user", in_parts=in_parts)
            else:
                # A template that knows no parts shows the list as Python or JSON writes it.
                is_listed = any(f"{quote}{_PROBE}{quote}" in text for quote in "'\"")
                known = _PROBE in text and not (in_parts and is_listed)
            self._takes[role, in_parts] = known
        return known


class ChatTemplates:
    """The chat templates of a folder.

    Args:
        sources: Jinja text and file of each, by name, see ``read_chat_templates``.
        special_tokens: variables such as ``bos_token`` that templates use.
        folder: named in the error where there is none.

    Raises:
        UserError: there is no template, or one does not compile.
    """

    def __init__(
        self,
        sources: Mapping[str, tuple[str, Path]],
        special_tokens: Mapping[str, str],
        folder: Path,
    ) -> None:
        if not sources:
            raise UserError(
                f"{folder}: no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); this is a base model: use a plain prompt"
            )
        self._names, self._folder = sorted(sources), folder
        self._by_name = {
            name: ChatTemplate(source, special_tokens, str(path))
            for name, (source, path) in sources.items()
            if name in ("default", "tool_use")
        }

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """Render as ``ChatTemplate.render`` does.  If tools are given and the folder has a template
        for them, that one is used, else the default.

        Raises:
            UserError: there is no default template, or ``ChatTemplate.render`` fails.
        """
        names = ("tool_use", "default") if variables.get("tools") else ("default",)
        for name in names:
            if name in self._by_name:
                return self._by_name[name].render(messages, **variables)
        raise UserError(
            f"{self._folder}: its chat templates are {', '.join(self._names)}: expected one that "
            "is named default"
        )

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that the templates read, those with arguments of their own left out."""
        read = frozenset().union(*(each.variables for each in self._by_name.values()))
        return read.difference(TAKEN)

    def check_variables(self, names: Iterable[str]) -> None:
        """Refuse variables that change nothing.

        Raises:
            UserError: no template reads one, or its name is taken.
        """
        for name in names:
            if name in TAKEN:
                raise UserError(f"chat_template_kwargs.{name}: this name is taken; leave it out")
            if name not in self.variables:
                known = ", ".join(sorted(self.variables)) or "none"
                raise UserError(
                    f"chat_template_kwargs.{str(name)[:50]}: the chat template of this model reads "
                    f"no such variable; it reads: {known}"
                )


def _left_open(message: dict[str, Any]) -> dict[str, Any]:
    """The last message of a conversation with a mark behind its text."""
    content = message.get("content")
    if message.get("tool_calls") or not content:
        raise UserError("continue_final_message: the last message must have text, and no calls")
    if isinstance(content, str):
        return {**message, "content": content + _OPEN_END}
    last = {**content[-1], "text": content[-1]["text"] + _OPEN_END}
    return {**message, "content": [*content[:-1], last]}


def _list_of_objects(name: str, value: Any) -> list[Any] | None:
    """A list of objects as plain data; None if it is empty or not given."""
    if value is None:
        return None
    items = plain_data(name, value)
    if not isinstance(items, list):
        raise UserError(f"{name} is of type {type(value).__name__}: expected a list of objects")
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            kind = type(item).__name__
            raise UserError(f"{name}[{number}] is of type {kind}: expected an object")
    return items or None
