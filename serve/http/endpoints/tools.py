"""Tools of a chat: which may be called, and what the output must be if one has to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....config import UserError
from ....engine.frontend.grammar import json_grammar
from ....engine.frontend.json_schema import Document
from ..intake.errors import ApiError
from ..intake.protocol import ChatRequest, MessagesRequest, ResponsesRequest
from ..tool_calls.call_reader import FORMATS, CallReader, Format


@dataclass(frozen=True)
class Tools:
    """The tools of a chat.

    Attributes:
        tools: for the template; None if there are none to call.
        form: how the model writes calls; None if it is not known.
        grammar: what the output must be if a call is required: a call or a list of calls.
        is_parallel: whether an output may have several calls.
        required: the functions of which one must be called.
    """

    tools: list[dict[str, Any]] | None = None
    form: Format | None = None
    grammar: str | None = None
    is_parallel: bool = True
    required: Sequence[dict[str, Any]] = ()

    def reader(self) -> CallReader | None:
        """A reader that finds the calls of one output; None where none are looked for."""
        if self.tools is None:
            return None
        functions = [tool["function"] for tool in self.tools]
        return CallReader(
            self.form,
            is_call=self.grammar is not None,
            max_calls=None if self.is_parallel else 1,
            schemas={function["name"]: function.get("parameters") for function in functions},
        )


def tools_of(
    body: ChatRequest | ResponsesRequest | MessagesRequest, format_name: str | None
) -> Tools:
    """The tools of a body in the form of chats.

    Args:
        format_name: the format in which the model writes calls; None if it is not known.

    Raises:
        ApiError: the tools or the choice are bad, or this model calls none.
    """
    choice, is_parallel = body.tool_choice, body.parallel_tool_calls is not False
    if not body.tools or choice == "none":
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice: there are no tools", param="tool_choice")
        return Tools()
    functions = [_function(number, tool) for number, tool in enumerate(body.tools)]
    if choice in (None, "auto"):
        if format_name is None:
            raise ApiError(
                400,
                "tools: the chat template shows no format of calls; start the server with "
                "--tool-call-parser, or require a call by tool_choice",
                param="tools",
            )
        return Tools(body.tools, FORMATS[format_name], is_parallel=is_parallel)
    if choice != "required":
        name = _chosen(choice)
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise ApiError(
                400,
                "tool_choice: expected none, auto, required, or the function of a tool",
                param="tool_choice",
            )
    schemas = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": Document(function.get("parameters") or {"type": "object"}),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    form = FORMATS.get(format_name or "")
    schema: dict[str, Any] = {"anyOf": schemas}
    if choice == "required" and is_parallel:
        schema = {"type": "array", "items": schema, "minItems": 1}
    try:
        return Tools(body.tools, form, json_grammar(schema), is_parallel, functions)
    except UserError as error:
        raise ApiError(400, str(error), param="tools") from error


def _chosen(choice: Any) -> Any:
    function = choice.get("function") if isinstance(choice, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _function(number: int, tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function") if tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise ApiError(
            400,
            f"tools[{number}]: expected {{'type': 'function', 'function': {{'name': …}}}}",
            param="tools",
        )
    if not isinstance(function.get("parameters") or {}, dict):
        message = f"tools[{number}].function.parameters: expected a JSON schema, an object"
        raise ApiError(400, message, param="tools")
    return function
