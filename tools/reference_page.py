# ruff: noqa: E501  # rows of tables are one line
"""Renders ``docs/reference.md`` from docstrings, from the fields of the options, and from the parsers
of the command line.

``make reference`` runs it.  A test checks that the page is current.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer.main

from fusewright import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from fusewright.config import OptionSpec, option_specs
from fusewright.serve.cli import app
from fusewright.serve.console.flags import ENGINE_FLAGS, SAMPLING

PAGE = Path(__file__).resolve().parents[1] / "docs/reference.md"

_INTRO = """\
# Reference

`make reference` renders this page from the docstrings and from the parsers that read the flags.

An engine option has one name: the keyword of `LLM(…)` and `AsyncLLM(…)`, the field of `EngineOptions`,
and with dashes the flag of every command that loads a model. [Coming from vLLM](coming-from-vllm.md)
lists what is understood beside these.
"""
_GROUPS = {
    "model": "Which model, and where it runs.",
    "compile": "How much is compiled and fused, and by which kernels.",
    "artifact": "Where compiled code is kept and found.",
    "capture": "CUDA graphs.",
    "scheduler": "Which requests share a step.",
    "cache": "The KV cache.",
}
_METHODS = ("generate", "chat", "stream", "beam_search", "get_tokenizer", "report", "close")


def page() -> str:
    """The page as Markdown."""
    lines = [_INTRO, "## Engine options", ""]
    specs = option_specs()
    for group, text in _GROUPS.items():
        lines += [f"### {group.capitalize()}", "", text, "", *_options(specs, group), ""]
    lines += ["## `SamplingParams`", "", *_prose(SamplingParams), "", *_fields(SamplingParams), ""]
    lines += ["### `StructuredOutputsParams`", "", *_prose(StructuredOutputsParams), ""]
    lines += ["## `LLM`", "", *_prose(LLM), ""]
    for name in _METHODS:
        if (method := getattr(LLM, name, None)) is not None:
            lines += _method("LLM", name, method)
    lines += ["## `AsyncLLM`", "", *_prose(AsyncLLM), ""]
    lines += ["## Commands", "", *_shared()]
    for command in commands():
        lines += _command(command)
    return "\n".join(lines).rstrip() + "\n"


def commands() -> Iterator[Any]:
    """The context of each command of the command line: its path, and its parameters."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("fusewright", [], obj={"debug": False}, resilient_parsing=True)
    yield from _below(group, context)


def _below(command: Any, context: Any) -> Iterator[Any]:
    if not hasattr(command, "list_commands"):
        yield context
        return
    for name in command.list_commands(context):
        below = command.get_command(context, name)
        yield from _below(below, type(context)(below, info_name=name, parent=context))


def _table(*rows: Iterable[str]) -> Iterator[str]:
    for number, row in enumerate(rows):
        cells = (cell.replace("|", "\\|") for cell in row)
        yield f"| {' | '.join(cells)} |"
        if number == 0:
            yield "|" + "---|" * len(list(row))


def _options(specs: Iterable[OptionSpec], group: str) -> Iterator[str]:
    rows = [["option", "type", "default", "what it says"]]
    for spec in specs:
        if spec.group == group:
            kind = " / ".join(f"`{choice}`" for choice in spec.choices) or f"`{_kind(spec.type)}`"
            rows.append([_named(spec), kind, f"`{spec.default!r}`", _sentence(spec.help)])
    return _table(*rows)


def _named(spec: OptionSpec) -> str:
    usual = "--" + spec.name.replace("_", "-")
    others = [flag for flag in (spec.flag, spec.alias) if flag and flag != usual]
    others += ["-O"] if spec.name == "optimization_level" else []
    return f"`{spec.name}`" + "".join(f", `{flag}`" for flag in others)


def _kind(text: str) -> str:
    return text.replace("tuple[str, ...]", "list[str]").replace("tuple[int, ...]", "list[int]")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _prose(owner: Any) -> list[str]:
    """A docstring as Markdown; its sections are lists, and ``Attributes`` is left out."""
    lines: list[str] = []
    for paragraph in _paragraphs(owner):
        title, section = _section(paragraph)
        if not title:
            lines += [_code(paragraph), ""]
        elif title != "Attributes":
            lines += [f"{title}:", ""]
            lines += [f"- `{name}`: {_code(text)}" for name, text in section.items()] + [""]
    return lines[:-1]


def _paragraphs(owner: Any) -> list[str]:
    return (inspect.getdoc(owner) or "").split("\n\n")


def _section(paragraph: str) -> tuple[str, dict[str, str]]:
    """The title and the entries of a section of a docstring; no title: it is text."""
    title, _, rest = paragraph.partition("\n")
    if not title.endswith(":") or not rest.startswith("    "):
        return "", {}
    entries: list[str] = []
    for line in textwrap.dedent(rest).splitlines():
        if line.startswith(" "):
            entries[-1] += " " + line.strip()
        else:
            entries.append(line)
    return title.rstrip(":"), dict(entry.split(": ", 1) for entry in entries)  # type: ignore[misc]


def _code(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", text)


def _fields(owner: Any) -> Iterator[str]:
    """A dataclass as a table, of which the docstring has a line for every field."""
    sections = dict(map(_section, _paragraphs(owner)))
    says = {
        name: text for names, text in sections["Attributes"].items() for name in names.split(", ")
    }
    rows = [["field", "type", "default", "what it says"]]
    for field in fields(owner):
        default = getattr(field.default, "name", repr(field.default))
        cells = [f"`{field.name}`", f"`{_kind(str(field.type))}`", f"`{default}`"]
        rows.append([*cells, _code(_sentence(says[field.name]))])
    return _table(*rows)


def _method(owner: str, name: str, method: Any) -> list[str]:
    parameters = list(inspect.signature(method).parameters.values())[1:]
    shown = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
    call = ["```text", f"{owner}.{name}({shown})", "```"]
    return [f"### `{owner}.{name}`", "", *call, "", *_prose(method), ""]


def _shared() -> Iterator[str]:
    """What several commands have."""
    engine = ", ".join(f"`{spec.flag}`" for spec in ENGINE_FLAGS[:4])
    yield f"*Engine options* are the flags {engine} and so on of [above](#engine-options), with"
    yield "`--revision` for a model on the Hub. *Sampling options* are those of `run` and `chat`:"
    yield ""
    rows = [["flag", "type", "default", "what it says"]]
    for spec in SAMPLING:
        default = "" if spec.default is None else f"`{spec.default}`"
        rows.append([f"`{spec.flag}`", f"`{_kind(spec.type)}`", default, _sentence(spec.help)])
    yield from _table(*rows)
    yield ""


def _command(context: Any) -> Iterator[str]:
    command = context.command
    yield f"### `{context.command_path}`"
    yield ""
    yield _code(inspect.cleandoc(command.help or ""))
    yield ""
    groups: Mapping[str, list[Any]] = defaultdict(list)
    for parameter in command.params:
        groups[_group(parameter)].append(parameter)
    taken = [text for key, text in _TAKEN.items() if groups.get(key)]
    if taken:
        yield f"It takes {' and '.join(taken)}."
        yield ""
    rows = [["flag", "what it says"]]
    for parameter in groups["own"]:
        record = parameter.get_help_record(context)
        if record is not None and parameter.name != "help_all":
            name = re.sub(r"<(?:list\[)?([\w,]+?)\]?(?: range)?>(?:\.\.\.)?", r"\1", record[0])
            rows.append([f"`{name.strip()}`", " ".join(record[1].split())])
    if len(rows) > 1:
        yield from _table(*rows)
        yield ""


_TAKEN = {"engine": "*engine options*", "sampling": "*sampling options*"}


def _group(parameter: Any) -> str:
    panel = (getattr(parameter, "rich_help_panel", None) or "").partition(" ")[0].lower()
    return "sampling" if panel == "sampling" else "engine" if panel in _GROUPS else "own"


if __name__ == "__main__":
    PAGE.write_text(page())
