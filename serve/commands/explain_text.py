"""An explanation as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..console.report import checks_table
from ..console.table import line_width, table, wrap

if TYPE_CHECKING:
    from ...compiler.inspect.diff import Differences
    from ...compiler.inspect.explain import Explanation, LayerFacts, OpFacts


def explanation(label: str, facts: Explanation, *, graphs: bool = False) -> str:
    """All of it: sites, fusions, pieces, choices, layers, the whole step; with ``graphs`` also
    the graph of a layer of each kind, before and after."""
    checks = checks_table(facts.passes)
    stages = [table(stage_rows(facts))] if facts.stages else []
    parts = [label, *stages, site_table(facts), *([checks] if checks else []), fusion_table(facts)]
    parts += [table(piece_rows(facts)), table(choice_rows(facts))]
    for layer in facts.layers:
        parts += [table(layer_rows(layer)), *range_lines(layer)]
        if graphs:
            for when, drawn in (("before", layer.before), ("after", layer.after)):
                parts.append("\n".join([f"{layer.title}, {when} the passes:", *drawn]))
    parts.append("\n".join([step_line(facts), *facts.notes]))
    return "\n\n".join(_fitting(part) for part in parts)


def _fitting(text: str) -> str:
    """``text`` with its long lines wrapped at the width of the terminal.  Tables fit already."""
    width = line_width()
    return "\n".join(line for long in text.split("\n") for line in wrap(long, width, "    "))


def step_line(facts: Explanation) -> str:
    """A line on the launches, bytes and operations of a whole step."""
    return (
        f"a decode step of {facts.num_seqs} x {facts.context} tokens of context: "
        f"{count(facts.launches)} launches, {facts.bytes / 1e9:.2f} GB, "
        f"{facts.flops / 1e12:.3f} TFLOP"
    )


def stage_rows(facts: Explanation) -> list[list[str]]:
    """The stages of a pipeline, and what each of their ranks sends in the decode step."""
    rows = [["stage", "layers", "ranks", "a rank sends", "bytes"]]
    for number, stage in enumerate(facts.stages):
        spans = (_span(*stage.layers), _span(*stage.ranks))
        rows.append([str(number), *spans, stage.sends, str(stage.bytes)])
    return rows


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def piece_rows(facts: Explanation) -> list[list[str]]:
    rows = [["piece", "steps", "code by"]]
    for piece in facts.pieces:
        rows.append([piece.piece, str(piece.uses), f"{piece.emitter}: {piece.reason}"])
    return rows


def choice_rows(facts: Explanation) -> list[list[str]]:
    chosen = [[str(count), choice] for choice, count in facts.choices.items()]
    return [["calls", "kernel choice"], *chosen]


def site_rows(facts: Explanation) -> list[list[str]]:
    """Every expected site, those that are alike in one row, under a heading."""
    rows = [["pass", "layers", "where", "sites", "outcome", "why"]]
    for site in facts.sites:
        cells = [site.name, site.layers, site.module or "model", str(site.count), site.outcome]
        rows.append([*cells, site.reason])
    return rows


def site_table(facts: Explanation) -> str:
    rows = site_rows(facts)
    return table(rows) if len(rows) > 1 else "no pass has a site here"


def fusion_rows(facts: Explanation) -> list[list[str]]:
    rows = [["together", "one op", "calls", "why not"]]
    for fusion, calls in facts.fusions:
        rows.append([fusion.name, fusion.op or "-", str(calls) if calls else "", fusion.reason])
    return rows


def fusion_table(facts: Explanation) -> str:
    """The fusions that the model has, and those that nobody can have."""
    head, *rows = fusion_rows(facts)
    return table([head, *(row for row in rows if row[2] or row[3])])


def layer_rows(layer: LayerFacts) -> list[list[str]]:
    rows = [[layer.title, "launches", "MB", "MFLOP"]]
    for call in layer.calls:
        rows.append([call.op, count(call.launches), millions(call.bytes), millions(call.flops)])
    flops = sum(call.flops for call in layer.calls)
    rows.append(["in all", count(layer.launches), millions(layer.bytes), millions(flops)])
    return rows


def range_lines(layer: LayerFacts) -> Iterable[str]:
    """The kernels that run, by ranges of tokens."""
    for span in layer.ranges:
        what = "decode" if span.decode else "one prompt"
        last = "or more" if span.last is None else f"to {span.last}"
        kernels = ", ".join(span.kernels)
        line = f"{what} of {span.first} {last} tokens: {len(span.kernels)} launches: {kernels}"
        yield "\n  ".join([line, *span.choices])


def golden(facts: Explanation) -> str:
    """The text that golden tests compare: sites, calls, launches and bytes of a decode step.  It
    depends on the passes and not on the machine."""
    layers = [layer_table_plain(layer.title, layer.calls) for layer in facts.layers]
    step = f"step: {count(facts.launches)} launches, {facts.bytes} bytes"
    return "\n\n".join([site_table(facts), *layers, step]) + "\n"


def layer_table_plain(title: str, calls: Iterable[OpFacts]) -> str:
    """Calls by the names of their semantic ops, whatever implements them."""
    calls = list(calls)
    rows = [[title, "launches", "bytes"]]
    for call in calls:
        name = call.op.rpartition("::")[2]
        rows.append([name, count(call.launches), str(call.bytes)])
    known = [call.launches for call in calls]
    total = None if None in known else sum(n for n in known if n is not None)
    rows.append(["in all", count(total), str(sum(call.bytes for call in calls))])
    return table(rows)


def count(launches: int | None) -> str:
    return "not known" if launches is None else str(launches)


def millions(number: int) -> str:
    return f"{number / 1e6:.3f}"


def difference_text(differences: Differences) -> str:
    tables = [table(rows) for _, rows in differences.tables()]
    return "\n\n".join(tables) or f"{differences.left} and {differences.right} do the same"
