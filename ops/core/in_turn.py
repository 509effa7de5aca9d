"""Runs an op that is defined as several ops in turn, by an implementation of each.

Such an op has one function ``in_turn(call, visit)``, which computes it by calls of ``visit(op,
*args)``.  What ``visit`` does makes it the op's reference, its fake, what runs, the launches that
must be compiled, or the names that ``explain`` prints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from .launch import Launch, Launches
from .op import Implementation, SemanticOp

Visit: TypeAlias = Callable[..., Any]
"""Computes an op on arguments, in one way or another, and returns its results."""
InTurn: TypeAlias = Callable[[Any, Visit], Any]
"""Computes a call, its first argument, by visits."""
Part: TypeAlias = Callable[[SemanticOp], Implementation]
"""Chooses the implementation of an op."""


def reference(op: SemanticOp, *args: Any) -> Any:
    return op.reference(*args)


def fake(op: SemanticOp, *args: Any) -> Any:
    return op.fake(*args)


def run(in_turn: InTurn, call: Any, part: Part) -> Any:
    """Compute a call, each op by its part."""
    return in_turn(call, lambda op, *args: part(op).fn(*args))


def plan(in_turn: InTurn, call: Any, part: Part) -> Launches[Any]:
    """The launches of the parts, and the results."""
    planned: list[Launch] = []

    def visit(op: SemanticOp, *args: Any) -> Any:
        launches = part(op).launches
        assert launches is not None
        found, results = launches(*args)
        planned.extend(found)
        return results

    results = in_turn(call, visit)
    return planned, results


def names(in_turn: InTurn, call: Any, part: Part) -> tuple[str, ...]:
    """Names of the kernels that the parts launch."""
    found: list[str] = []

    def visit(op: SemanticOp, *args: Any) -> Any:
        chosen = part(op)
        if chosen.runs is not None:
            found.extend(chosen.runs(*args))
            return op.fake(*args)
        assert chosen.launches is not None
        launches, results = chosen.launches(*args)
        found.extend(launch.kernel.partition(":")[2] for launch in launches)
        return results

    in_turn(call, visit)
    return tuple(found)
