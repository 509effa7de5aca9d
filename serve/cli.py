"""``fusewright``: the list of commands and what becomes of their errors.

Exit codes: 0 done; 1 the machine or this program failed; 2 a mistake the user can mend; 130
interrupted.  An error is one line on stderr; ``--debug`` prints its traceback too.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import typer.main

from .. import __version__
from ..config import EngineDeadError, UserError
from . import bench
from .bisect import bisect
from .cache import app as cache
from .compile import compile
from .demo import demo
from .env import env
from .evaluate import evaluate
from .explain import explain
from .failure import flush, leave_dead_engine, open_missing_streams, report
from .help import GroupedHelp
from .profile import profile
from .run import run

# typer raises its parser's errors (unknown flag, missing value) under a class that it does not
# export, and that moved from click to typer itself: the grandparent of the one it does export.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,  # importing rich would double the time of --help
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A kernel-centric compiler stack for LLM inference.",
)
app.command("run", cls=GroupedHelp)(run)
app.command("eval", cls=GroupedHelp)(evaluate)
app.command("demo", cls=GroupedHelp)(demo)
app.command("compile", cls=GroupedHelp)(compile)
app.add_typer(bench.app, name="bench")
app.command("explain", cls=GroupedHelp)(explain)
app.command("bisect", cls=GroupedHelp)(bisect)
app.command("profile", cls=GroupedHelp)(profile)
app.command("env", cls=GroupedHelp)(env)
app.add_typer(cache, name="cache")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fusewright {__version__}")
        raise typer.Exit


def _ask_traceback(context: typer.Context, asked: bool) -> None:
    if asked:
        context.obj["debug"] = True


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            callback=_ask_traceback,
            is_eager=True,
            help="Print the traceback of an error too (also behind any command).",
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line of ``argv`` (``sys.argv`` if None); returns the exit code."""
    open_missing_streams()
    command = typer.main.get_command(app)
    (debug,) = (option for option in command.params if option.name == "debug")
    _accept(debug, command)
    asked = {"debug": False}
    try:
        # Not `app()`: it would end the process at a broken pipe, without a word.
        with command.make_context(
            "fusewright", list(sys.argv[1:] if argv is None else argv), obj=asked
        ) as context:
            command.invoke(context)
        flush()
        return 0
    except typer.Exit as error:
        return error.exit_code
    except _UsageError as error:
        message = error.format_message()  # type: ignore[attr-defined]
        return report(UserError(f"{message} (see `{_where(error)} --help`)"), debug=False)
    except EngineDeadError as error:
        report(error, debug=asked["debug"])
        leave_dead_engine()
    except (Exception, KeyboardInterrupt) as error:
        return report(error, debug=asked["debug"])


def _accept(option: Any, group: Any) -> None:
    """Let every command of ``group`` take the group's ``option``, without a line in its help."""
    hidden = copy.copy(option)
    hidden.hidden, hidden.expose_value = True, False
    for command in group.commands.values():
        command.params.append(hidden)
        if hasattr(command, "commands"):
            _accept(option, command)


def _where(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return context.command_path if context else "fusewright"


if __name__ == "__main__":
    sys.exit(main())
