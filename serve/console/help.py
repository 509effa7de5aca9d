"""Plain ``--help``: the flags of a command in groups, common ones first, no flag's name cut off.

``--help`` is answered before the values of flags are looked at, for which typer imports pydantic,
and a command is imported when it is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from .ports import rewritten

COMMON = frozenset(
    {
        "model",
        "dtype",
        "quantization",
        "load_format",
        "max_model_len",
        "seed",
        "tensor_parallel_size",
        "optimization_level",
        "max_num_seqs",
        "kv_cache_dtype",
        "gpu_memory_utilization",
        "max_tokens",
        "temperature",
        "top_p",
        "stop",
    }
)
"""Options from lists (``takes_flags``) that ``--help`` shows; ``--help-all`` shows all."""

HELP_ALL = "help_all"

# typer raises its parser's errors (unknown flag, missing value) under a class that it does not
# export, and that moved from click to typer itself: the grandparent of the one it does export.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
_TYPES = {"str": "TEXT", "int": "INT", "integer": "INT", "float": "FLOAT", "bool": "BOOL"}
_TYPES |= {"path": "PATH", "filename": "PATH"}


class GroupedHelp(TyperCommand):
    """A command whose help shows one section a ``rich_help_panel`` of its options: the common ones
    under ``--help``, all under ``--help-all``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # "fusewright bench serve" is another command than "fusewright serve".
        command = ctx.command_path.partition(" ")[2]
        args = rewritten(args, _known(self.get_params(ctx)), command)
        try:
            parsed = self.make_parser(ctx).parse_args(args=list(args))[0]
        except UsageError as error:
            # Some of the parser's errors do not say whose flags they are about.
            told: Any = error
            told.ctx = told.ctx or ctx
            raise
        if parsed.get("help") or parsed.get(HELP_ALL):
            ctx.meta[HELP_ALL] = bool(parsed.get(HELP_ALL))
            typer.echo(self.get_help(ctx))
            ctx.exit()
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            value = parsed.get(error.param.name) if error.param else None
            values = value if isinstance(value, list) else [] if value is None else [value]
            if values and not any(v and str(v) in error.message for v in values):
                error.message = f"{', '.join(map(repr, values))}: {error.message}"
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        # Not typer's own: each version puts other brackets and braces around an argument.
        arguments = [p for p in self.get_params(ctx) if p.param_type_name == "argument"]
        return ["[OPTIONS]", *map(_usage, arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        every = bool(ctx.meta.get(HELP_ALL))
        parameters = self.get_params(ctx)
        arguments = {p.name for p in parameters if p.param_type_name == "argument"}
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        left_out = 0
        for parameter in parameters:
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            panel = getattr(parameter, "rich_help_panel", None)
            # The argument MODEL says what --model does.
            repeated = parameter.name == "model" and "model_argument" in arguments
            if panel and not every and (repeated or parameter.name not in COMMON):
                left_out += 1
                continue
            flags, text = _plain(record[0]), record[1]
            if parameter.name in arguments:
                flags = _usage(parameter).strip("[].")
            if panel and not every:
                panel, text = "Common options of engine and sampling", _first_clause(text)
            if parameter.name != HELP_ALL or every:
                sections.setdefault(panel or "Options", []).append((flags, text))
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)
        if left_out:
            formatter.write_paragraph()
            formatter.write_text(f"--help-all shows {left_out} more options.")


def _known(parameters: list[Any]) -> dict[str, bool]:
    """Flag -> whether it takes a value."""
    return {
        flag: not getattr(parameter, "is_flag", False)
        for parameter in parameters
        if parameter.param_type_name == "option"
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }


def _usage(argument: Any) -> str:
    """An argument as a line of usage has it: ``KEY``, ``[MODEL]`` or ``[FOLDER]...``."""
    word = str(argument.metavar or argument.name.upper()).rstrip(".").strip("[]")
    word = word if argument.required else f"[{word}]"
    return f"{word}..." if argument.nargs == -1 else word


def _first_clause(text: str) -> str:
    """A help text up to its first semicolon, and the default."""
    clause, _, rest = text.partition(";")
    default = re.search(r" \[default: [^]]*\]$", rest)
    return clause + (default[0] if default else "")


def _plain(names: str) -> str:
    """A flag with its value's type as one word, where typer writes ``<list[str]>``."""

    def words(match: re.Match[str]) -> str:
        kinds = (match[1] or match[0]).lower().split(",")
        return " ".join(_TYPES.get(kind, kind.upper()) for kind in kinds)

    return re.sub(
        r"<(?:list\[)?([\w,]+?)\]?(?: range)?>(?:\.\.\.)?|\b(?:INTEGER|FILENAME)\b", words, names
    )


class Command(NamedTuple):
    """Where a command is defined, below ``serve``, and its line in the list of commands."""

    module: str
    name: str
    line: str


class PlainGroup(TyperGroup):
    """A group whose own options are ``--help`` and those of ``answers``."""

    answers: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Flag -> its help, and what it prints."""
    switches: ClassVar[Mapping[str, str]] = {}
    """Flag -> its help; the group and all below it take it, and ``ctx.obj`` knows that it is on."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        while args and args[0] in self.switches:
            ctx.obj[args[0].removeprefix("--")] = True
            args = args[1:]
        if args[:1] == ["help"]:  # ``help NAME`` is ``NAME --help``
            args = [*args[1:], "--help"]
        first = args[0] if args else ""
        if first in self.answers:
            typer.echo(self.answers[first][1])
            ctx.exit()
        if first in ("-h", "--help"):
            typer.echo(self.get_help(ctx))
            ctx.exit()
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        return []  # parse_args answers those that there are

    def format_options(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Options"):
            formatter.write_dl(
                [
                    *((flag, text) for flag, (text, _) in self.answers.items()),
                    *self.switches.items(),
                    ("-h, --help", "Show this message and exit."),
                ]
            )
        self.format_commands(ctx, formatter)


class LazyGroup(PlainGroup):
    """A group that imports a command when it is asked for."""

    table: ClassVar[Mapping[str, Command]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: dict[str, Any] = dict.fromkeys(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.table and self.commands[cmd_name] is None:
            self.commands[cmd_name] = _import(cmd_name, self.table[cmd_name])
            for flag in self.switches:
                _accept(flag, self.commands[cmd_name])
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.line) for name, command in self.table.items()])


def _accept(flag: str, command: Any) -> None:
    """Let a command, and those below it, take a switch of the group without a line in its help."""
    command.params.append(_hidden_switch(flag))
    for below in getattr(command, "commands", {}).values():
        _accept(flag, below)


def _hidden_switch(flag: str) -> Any:
    """An option that sets its name in ``ctx.obj``, as typer makes one."""

    def switch(context: typer.Context, value: bool) -> None:
        if value:
            context.obj[flag.removeprefix("--")] = True

    def only(
        value: bool = typer.Option(False, flag, hidden=True, is_eager=True, callback=switch),
    ) -> None: ...

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(only)
    command: Any = typer.main.get_command(app)
    (option,) = (p for p in command.params if flag in p.opts)
    option.expose_value = False
    return option


def _import(name: str, command: Command) -> Any:
    target = getattr(import_module(f"..{command.module}", __package__), command.name)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    if isinstance(target, typer.Typer):
        for registered in target.registered_commands:
            registered.cls = GroupedHelp
        app.add_typer(target, name=name, cls=PlainGroup)
    else:
        app.command(name, cls=GroupedHelp)(target)
        app.callback()(lambda: None)  # else typer makes the command the whole program
    group: Any = typer.main.get_command(app)
    return group.commands[name]
