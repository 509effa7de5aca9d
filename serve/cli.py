"""``fusewright``: the list of commands and what becomes of their errors.

Exit codes: 0 done; 1 a bug, with its traceback; 2 a mistake the user can mend, one line on
stderr; 130 interrupted; 143 terminated.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

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
from .help import GroupedHelp
from .profile import profile
from .run import run
from .signals import unwinding_on_sigterm

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


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


@unwinding_on_sigterm()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line of ``argv`` (``sys.argv`` if None); returns the exit code."""
    try:
        return app(args=argv, prog_name="fusewright", standalone_mode=False) or 0
    except _UsageError as error:
        return _refuse(f"{error.format_message()} (see `{_where(error)} --help`)")  # type: ignore[attr-defined]
    except EngineDeadError as error:
        _refuse(str(error))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2)  # torch would free its graphs, find the device lost, and abort
    except UserError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 130


def _where(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return context.command_path if context else "fusewright"


def _refuse(message: str) -> int:
    print("error:", " ".join(message.split()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
