"""``fusewright demo``: the bundled model solves fresh problems, and the stack says what it did."""

from __future__ import annotations

import secrets
import sys
import time
from typing import Annotated, Any

import typer

from .evaluate import greedy, solved
from .flags import engine_flags
from .options import check_finished, load
from .report import summary


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
    from ..model_executor.abacus.problems import TASKS, held_out

    seed = secrets.randbelow(10**6) if problem_seed is None else problem_seed
    problems = sorted(held_out(per_task * len(TASKS), seed), key=lambda p: TASKS.index(p.task))
    started_s = time.perf_counter()
    llm = load(engine)
    ready_s = time.perf_counter()
    params = greedy(problems)
    right = tokens = 0
    for problem in problems:
        typer.echo(f"  {problem.prompt:>28} ", nl=False)
        output = None
        shown = 0
        for output in llm.stream(problem.prompt, params):
            text = output.outputs[0].text
            typer.echo(text[shown:], nl=False)
            sys.stdout.flush()
            shown = len(text)
        assert output is not None, "a stream ends with a finished request"
        check_finished([output])
        tokens += len(output.outputs[0].token_ids)
        correct = solved(problem, output)
        right += correct
        typer.echo("  ✓" if correct else f"  ✗ expected {problem.answer}")
    done_s = time.perf_counter()
    typer.echo(f"\n{right} of {len(problems)} solved (problem seed {seed})\n")
    typer.echo(summary(llm.report()))
    typer.echo(
        f"ready in {ready_s - started_s:.2f} s; {tokens} tokens generated in "
        f"{done_s - ready_s:.2f} s, one request at a time"
    )
