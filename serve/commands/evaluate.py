"""``fusewright eval``: exact-match accuracy on problems that the bundled model never saw."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...config import UserError
from ..console.flags import Json, engine_flags
from ..console.options import check_finished, load, merge
from ..console.table import table

if TYPE_CHECKING:
    from ...engine.frontend.outputs import RequestOutput
    from ...engine.messages.sampling_params import SamplingParams
    from ...model_executor.abacus.problems import Problem

SUITES = ("abacus",)


@engine_flags
def evaluate(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="abacus")],
    *,
    n: Annotated[int, typer.Option("-n", help="problems in all", min=1)] = 1000,
    problem_seed: Annotated[int, typer.Option(help="which problems")] = 0,
    batch_size: Annotated[
        int | None,
        typer.Option(help="requests that run at once: --max-num-seqs", show_default=False),
    ] = None,
    json_output: Json = False,
    engine: dict[str, Any],
) -> None:
    """Measure the exact-match accuracy of a model, greedily, a task at a time.

    The suite abacus is arithmetic, sorting and reversing; its model is the bundled one unless
    --model names another.
    """
    if suite not in SUITES:
        raise UserError(f"unknown suite {suite!r}; known: {', '.join(SUITES)}")
    from ...model_executor.abacus.problems import MAX_HELD_OUT_PER_TASK, TASKS, held_out

    if n > MAX_HELD_OUT_PER_TASK * len(TASKS):
        raise UserError(
            f"-n {n}: there are {MAX_HELD_OUT_PER_TASK * len(TASKS)} problems; ask less"
        )
    problems = held_out(n, problem_seed)
    llm = load(merge(engine, max_num_seqs=batch_size), text=True)
    started_s = time.perf_counter()
    prompts = [p.prompt for p in problems]
    outputs = llm.generate(prompts, greedy(problems), use_tqdm=sys.stderr.isatty())
    seconds = time.perf_counter() - started_s
    check_finished(outputs)
    right = Counter(p.task for p, o in zip(problems, outputs, strict=True) if solved(p, o))
    total = Counter(p.task for p in problems)
    if json_output:
        tasks = {t: {"correct": right[t], "total": total[t]} for t in total}
        result = {"suite": suite, "level": llm.report()["level"], "seed": problem_seed}
        totals = {"correct": right.total(), "total": n, "accuracy": right.total() / n}
        typer.echo(json.dumps({**result, **totals, "tasks": tasks, "seconds": seconds}))
        return
    rows = [["task", "correct", "of", "exact match"]]
    counts = [*((task, right[task], total[task]) for task in total), ("all", right.total(), n)]
    for name, correct, count in counts:
        rows.append([name, str(correct), str(count), f"{100 * correct / count:.2f}%"])
    typer.echo(table(rows))
    typer.echo(f"-O{llm.report()['level']}, {seconds:.1f} s, problem seed {problem_seed}")


def greedy(problems: Sequence[Problem]) -> SamplingParams:
    """``SamplingParams`` that let the longest answer and its end-of-sequence token through."""
    from ...engine.messages.sampling_params import SamplingParams

    # The tokenizer is byte-level and the answers are ASCII: a token a character.
    return SamplingParams(temperature=0.0, max_tokens=1 + max(len(p.answer) for p in problems))


def solved(problem: Problem, output: RequestOutput) -> bool:
    """The exact answer, and then the end: a right start that runs on is wrong."""
    first = output.outputs[0]
    return first.text == problem.answer and first.finish_reason == "stop"
