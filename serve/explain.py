"""``fusewright explain``: what the stack would do, and why."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import LEVELS, EngineOptions, UserError
from .flags import engine_flags
from .options import merge
from .report import passes_table
from .table import table

if TYPE_CHECKING:
    from ..compiler.explain import Explanation


@engine_flags
def explain(
    engine: dict[str, Any],
    model_argument: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Same as --model.")
    ] = None,
    levels: Annotated[bool, typer.Option("--levels", help="Print the -O table.")] = False,
    target_sm: Annotated[
        int | None,
        typer.Option("--target-sm", help="Explain for this compute capability, such as 90."),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Sequences of the decode step.")] = 1,
    context: Annotated[int, typer.Option("--context", help="KV positions of each.")] = 128,
    require_all: Annotated[
        bool,
        typer.Option("--require-all-fusions", help="Exit with code 2 when a pass missed a site."),
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Explain what a model's compilation does, and what the levels turn on."""
    options = merge(engine, model=model_argument)
    if levels:
        typer.echo(levels_table())
        return
    if not options:
        raise UserError(
            "explain: nothing to explain; name a model, or use `fusewright explain --levels`"
        )
    from ..engine.explain import explain_model

    label, facts = explain_model(
        EngineOptions(**options), target_sm=target_sm, num_seqs=batch, context=context
    )
    if json_output:
        typer.echo(json.dumps({"label": label, **facts.to_json()}))
    else:
        typer.echo(explanation(label, facts))
    missed = [
        f"{entry['name']}: {miss['site']} ({miss['reason']})"
        for entry in facts.passes
        for miss in entry["missed"]
    ]
    if require_all and missed:
        raise UserError(f"require_all_fusions: {len(missed)} missed: {'; '.join(missed)}")


def explanation(label: str, facts: Explanation) -> str:
    """An explanation as text: passes, pieces, choices, one layer."""
    pieces = [["piece", "steps", "code by"]]
    for piece in facts.pieces:
        pieces.append([piece.piece, str(piece.uses), f"{piece.emitter}: {piece.reason}"])
    chosen = [["calls", "kernel choice"]]
    chosen += [[str(count), choice] for choice, count in facts.choices.items()]
    layer = [["one layer", "launches", "MB", "MFLOP"]]
    for call in facts.layer:
        layer.append([call.op, _count(call.launches), _millions(call.bytes), _millions(call.flops)])
    layer.append(
        [
            "in all",
            _count(facts.layer_launches),
            _millions(sum(call.bytes for call in facts.layer)),
            _millions(sum(call.flops for call in facts.layer)),
        ]
    )
    step = (
        f"a decode step of {facts.num_seqs} x {facts.context} tokens of context: "
        f"{_count(facts.launches)} launches, {facts.bytes / 1e9:.2f} GB, "
        f"{facts.flops / 1e12:.3f} TFLOP (cuBLAS may split a product into two launches)"
    )
    if facts.greedy:
        step += f"; without logits its last call is {facts.greedy}"
    parts = [passes_table(facts.passes), *map(table, (pieces, chosen, layer))]
    return "\n\n".join([label, *parts, step])


def _count(launches: int | None) -> str:
    return "Inductor's" if launches is None else str(launches)


def _millions(number: int) -> str:
    return f"{number / 1e6:.3f}"


def levels_table() -> str:
    """The ``-O`` table, a line a level."""
    rows = [["level", "trace", "passes", "hand kernels", "tuned", "CUDA graphs", "summary"]]
    for number, level in LEVELS.items():
        rows.append(
            [
                f"-O{number}",
                "yes" if level.trace else "no",
                ",".join(level.passes) or "-",
                "yes" if level.hand_kernels else "no",
                "yes" if level.tune else "no",
                level.cudagraph_mode.value,
                level.summary,
            ]
        )
    return table(rows)
