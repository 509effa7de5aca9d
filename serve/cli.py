"""The command line ``fusewright``: its commands, and what happens to their errors.

Exit codes: 0 done; 1 the machine or this program failed; 2 a mistake the user can mend; 130
interrupted; 141 the reader of stdout has gone, as ``head`` does; 143 terminated.  An error is one
line on stderr; ``--debug`` prints its traceback too.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar, NoReturn

import typer
import typer.main

from .. import __version__
from ..config import EngineDeadError, UserError, collect_rarely, leave
from ..config.process.logs import be_quiet
from .console.failure import flush, leave_dead_engine, open_missing_streams, report
from .console.help import Command, LazyGroup, UsageError
from .console.signals import unwinding_on_sigterm


class _Commands(LazyGroup):
    table: ClassVar[Mapping[str, Command]] = {
        "run": Command("commands.run", "run", "Generate text for prompts."),
        "serve": Command("commands.serve", "serve", "Serve OpenAI's API over HTTP."),
        "chat": Command("commands.chat", "chat", "Chat at the terminal, with a model or a server."),
        "run-batch": Command(
            "commands.run_batch", "run_batch", "Answer the requests of an OpenAI batch file."
        ),
        "demo": Command(
            "commands.demo", "demo", "Solve problems with the bundled model; show what ran."
        ),
        "eval": Command(
            "commands.evaluate", "evaluate", "Exact-match accuracy on problems never seen."
        ),
        "compile": Command(
            "commands.compile", "compile", "Compile ahead of time and keep the artifact."
        ),
        "explain": Command(
            "commands.explain", "explain", "What compilation does with a model, and why."
        ),
        "bisect": Command(
            "commands.bisect", "bisect", "Find the pass and site that moves the outputs."
        ),
        "profile": Command(
            "measure.profile", "profile", "Kernels and a time line of steady steps."
        ),
        "bench": Command(
            "measure.bench", "app", "Measure latency, throughput, start-up, passes, kernels."
        ),
        "tune": Command(
            "measure.tune", "app", "Find the best settings of a server, or of kernels."
        ),
        "models": Command(
            "commands.models", "app", "Prove models of transformers against their own code."
        ),
        "cache": Command(
            "commands.cache", "app", "List, check, compare, carry, prune and sign artifacts."
        ),
        "env": Command("commands.env", "env", "Print what a bug report needs."),
    }
    answers: ClassVar[Mapping[str, tuple[str, str]]] = {
        "--version": ("Print the version.", f"fusewright {__version__}")
    }
    switches: ClassVar[Mapping[str, str]] = {
        "--debug": "Print the traceback of an error too (also behind any command)."
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


@unwinding_on_sigterm()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line of ``argv`` (``sys.argv`` if None); returns the exit code."""
    collect_rarely()
    open_missing_streams()
    be_quiet()
    command = typer.main.get_command(app)
    asked = {"debug": False}
    try:
        # Not `app()`: it would end the process at a broken pipe, without a word.
        code = 0
        try:
            with command.make_context(
                "fusewright", list(sys.argv[1:] if argv is None else argv), obj=asked
            ) as context:
                command.invoke(context)
        except typer.Exit as error:
            code = error.exit_code
        flush()
        return code
    except UsageError as error:
        message: str = error.format_message()  # type: ignore[attr-defined]
        message = message.replace(": Value error, ", ": ", 1)  # which pydantic writes before ours
        return report(UserError(f"{message} (see `{_where(error)} --help`)"), debug=False)
    except EngineDeadError as error:
        report(error, debug=asked["debug"])
        leave_dead_engine()
    except (Exception, KeyboardInterrupt) as error:
        return report(error, debug=asked["debug"])


def _where(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return context.command_path if context else "fusewright"


def run() -> NoReturn:
    """The command itself: runs ``main`` and ends the process."""
    leave(main())


if __name__ == "__main__":
    run()
