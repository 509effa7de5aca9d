"""``fusewright demo``: the bundled model solves fresh problems, and the stack says what it did."""

from __future__ import annotations

import os
import secrets
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...config import UserError
from ...engine.frontend.engine_log import ready_s, startup_line
from ..console.flags import engine_flags
from ..console.options import check_finished, checked, load, stream
from ..console.report import level_line, passes_table
from .evaluate import greedy, solved

if TYPE_CHECKING:
    from ...engine.llm import LLM
    from ...engine.messages.sampling_params import SamplingParams
    from ...model_executor.abacus.problems import Problem


@engine_flags
def demo(
    *,
    per_task: Annotated[int, typer.Option(help="problems a task", min=1, max=100)] = 2,
    problem_seed: Annotated[
        int | None, typer.Option(help="which problems; new ones if unset", show_default=False)
    ] = None,
    engine: dict[str, Any],
) -> None:
    """Solve problems that the bundled model never saw; print level, fusions and times."""
    from ...model_executor.abacus.problems import TASKS, held_out

    seed = secrets.randbelow(10**6) if problem_seed is None else problem_seed
    problems = sorted(held_out(per_task * len(TASKS), seed), key=lambda p: TASKS.index(p.task))
    checked(engine, weights=True)
    model = engine.get("model", "abacus, the bundled Llama of 3.8M parameters,")
    title = f"fusewright demo: {model} solves problems that it was not trained on"
    typer.echo(_styled(title, bold=True) + "\n")
    llm = load(engine, text=True)
    begun_s = time.perf_counter()
    params = greedy(problems)
    right = tokens = 0
    for problem in problems:
        correct, num_tokens = _solve(llm, problem, params)
        right, tokens = right + correct, tokens + num_tokens
    took_s = time.perf_counter() - begun_s
    done = _styled(f"{right} of {len(problems)} solved", fg="green" if right else "red", bold=True)
    typer.echo(f"\n{done}, {tokens} tokens in {took_s:.2f} s, one request at a time")
    typer.echo(f"The same problems again: --problem-seed {seed}\n")
    facts = llm.report()
    typer.echo(level_line(facts))
    typer.echo(passes_table(facts["passes"]))
    typer.echo(f"\nready after {startup_line(facts['startup'])}")
    if facts["artifact"]["key"] and not facts["artifact"]["built"]:
        typer.echo("nothing was compiled: the artifact of an earlier start was found")
    elif facts["artifact"]["key"] and engine.get("compile_cache", True):
        _say_next_start(engine)


def _solve(llm: LLM, problem: Problem, params: SamplingParams) -> tuple[bool, int]:
    """Print a problem and its answer as it comes.  Returns whether it is right, and the number of
    its tokens."""

    def show(text: str) -> None:
        typer.echo(_styled(text, bold=True), nl=False)
        sys.stdout.flush()

    typer.echo(f"  {problem.prompt:>28} ", nl=False)
    output = stream(llm, problem.prompt, params, show)
    check_finished([output])
    correct = solved(problem, output)
    if correct:
        typer.echo(_styled("  ✓", fg="green"))
    else:
        typer.echo(_styled(f"  ✗ expected {problem.answer}", fg="red"))
    return correct, len(output.outputs[0].token_ids)


def _say_next_start(engine: dict[str, Any]) -> None:
    """Start once more, in a process that finds the artifact which this one has made."""
    from ...bench.startup import start

    typer.echo("the next start, which finds the artifact, takes ", nl=False)
    sys.stdout.flush()
    try:
        again = start(engine, {})
    except UserError as error:
        typer.echo(f"a time that could not be measured: {error}")
        return
    typer.echo(f"{ready_s(again['startup']):.1f} s (measured just now in a second process)")


def _styled(text: str, **style: Any) -> str:
    """``text`` in a style, on a terminal, unless NO_COLOR is set (no-color.org)."""
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        return typer.style(text, **style)
    return text
