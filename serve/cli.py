"""``fusewright``: the list of commands and what becomes of their errors.

Exit codes: 0 done; 1 a bug, with its traceback; 2 a mistake the user can mend, one line on
stderr; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar

import typer

from .. import __version__
from ..config import EngineDeadError, UserError
from .help import Command, LazyGroup, UsageError


class _Commands(LazyGroup):
    table: ClassVar[Mapping[str, Command]] = {
        "run": Command("run", "run", "Generate text for prompts."),
        "demo": Command("demo", "demo", "Solve problems with the bundled model; show what ran."),
        "eval": Command("evaluate", "evaluate", "Exact-match accuracy on problems never seen."),
        "compile": Command("compile", "compile", "Compile ahead of time and keep the artifact."),
        "explain": Command("explain", "explain", "What compilation does with a model, and why."),
        "bisect": Command("bisect", "bisect", "Find the pass and site that moves the outputs."),
        "profile": Command("profile", "profile", "Kernels and a time line of steady steps."),
        "bench": Command("bench", "app", "Measure latency, throughput, start-up, passes, kernels."),
        "cache": Command("cache", "app", "List, check, compare, carry, prune and sign artifacts."),
        "env": Command("env", "env", "Print what a bug report needs."),
    }
    answers: ClassVar[Mapping[str, tuple[str, str]]] = {
        "--version": ("Print the version.", f"fusewright {__version__}")
    }


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    rich_markup_mode=None,  # importing rich would double the time of --help
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="A kernel-centric compiler stack for LLM inference.",
)


@app.callback(invoke_without_command=True)
def _options(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line of ``argv`` (``sys.argv`` if None); returns the exit code."""
    try:
        return app(args=argv, prog_name="fusewright", standalone_mode=False) or 0
    except UsageError as error:
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
