"""An explanation as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..console.report import checks_table, titled
from ..console.table import line_width, table, wrap

if TYPE_CHECKING:
    from ...compiler.inspect.diff import Differences
    from ...compiler.inspect.explain import Explanation, LayerFacts, OpFacts


SENTENCES = {
    "stages": "Stages of the pipeline, and what a rank of each sends in this step.",
    "sites": "Where passes join neighbouring ops into one kernel, and where they do not. A site is "
    "matched, missed with the reason, off because its pass does not run, or alone: no pass has a "
    "partner for it.",
    "fusions": "What runs together as one kernel, and how many calls of this model do; where no "
    "kernel can, the reason.",
    "pieces": "Between its attention calls the model is cut into pieces; equal ones share their "
    "code. Direct code calls the kernels one by one, Inductor writes kernels of its own.",
    "choices": "The implementation of each op; in brackets, why those that go before it were not "
    "chosen.",
    "layer": "What {} in this step: kernel launches, bytes moved and operations.",
    "ranges": "The kernels that run, by the number of tokens in a step.",
    "notes": "What to know about these figures:",
}
"""Says what each part of an explanation is, for someone who sees it for the first time."""


def explanation(
    label: str, facts: Explanation, *, graphs: bool = False, verbose: bool = False
) -> str:
    """All of it: the step, sites, fusions, layers, pieces, choices; with ``graphs`` also the graph
    of a layer of each kind, before and after, and with ``verbose`` the errors of verification."""
    checks = checks_table(facts.passes, verbose=verbose)
    parts = [label, step_line(facts)]
    if facts.stages:
        parts.append(titled(SENTENCES["stages"], stage_rows(facts)))
    parts += [_told("sites", site_rows(facts), "No pass has a site here."), checks]
    parts.append(_told("fusions", fusion_rows(facts), "No call of this model is such a fusion."))
    for layer in facts.layers:
        parts.append(titled(layer_sentence(layer), layer_rows(layer)))
        if lines := list(range_lines(layer)):
            parts.append("\n".join([SENTENCES["ranges"], *lines]))
        if graphs:
            for when, drawn in (("before", layer.before), ("after", layer.after)):
                parts.append("\n".join([f"{layer.title}, {when} the passes:", *drawn]))
    parts.append(titled(SENTENCES["pieces"], piece_rows(facts)))
    parts.append(titled(SENTENCES["choices"], choice_rows(facts)))
    if facts.notes:
        parts.append("\n".join([SENTENCES["notes"], *(f"- {note}" for note in facts.notes)]))
    return "\n\n".join(_fitting(part) for part in parts if part)


def _told(part: str, rows: list[list[str]], without: str) -> str:
    return titled(SENTENCES[part], rows) if len(rows) > 1 else without


def layer_sentence(layer: LayerFacts) -> str:
    if not layer.layers:
        does = "runs outside of the layers"
    else:
        does = f"{'each of ' if len(layer.layers) > 1 else ''}{layer.title} does"
    return SENTENCES["layer"].format(does)


def _fitting(text: str) -> str:
    """``text`` with its long lines wrapped at the width of the terminal.  Tables fit already."""
    width = line_width()
    return "\n".join(line for long in text.split("\n") for line in wrap(long, width, "    "))


def step_line(facts: Explanation) -> str:
    """A sentence on the launches, bytes and operations of a whole step."""
    launches = f"takes {facts.launches} kernel launches"
    if facts.launches is None:
        launches = "takes kernel launches whose number is not known before it is compiled"
    sequences = "1 sequence" if facts.num_seqs == 1 else f"{facts.num_seqs} sequences"
    return (
        f"A decode step of {sequences} with {facts.context} tokens of context {launches}, moves "
        f"{_scaled(facts.bytes)}B and computes {_scaled(facts.flops)}FLOP."
    )


def _scaled(number: int) -> str:
    """A number in the prefix of its size: 0.27 G, 14.5 M."""
    scale, prefix = next((s, p) for s, p in ((1e12, "T"), (1e9, "G"), (0, "M")) if number >= s)
    return f"{number / (scale or 1e6):.3g} {prefix}"


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
    """The fusions that the model has, and those that nobody can have, under a heading."""
    rows = [["together", "one op", "calls", "why not"]]
    for fusion, calls in facts.fusions:
        if calls or fusion.reason:
            rows.append([fusion.name, fusion.op or "-", str(calls or "-"), fusion.reason])
    return rows


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
    tables = [titled(sentence, rows) for sentence, rows in differences.tables()]
    return "\n\n".join(tables) or f"{differences.left} and {differences.right} do the same"
