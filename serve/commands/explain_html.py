"""An explanation as one HTML file that needs no other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .explain_text import (
    SENTENCES,
    choice_rows,
    fusion_rows,
    layer_rows,
    layer_sentence,
    piece_rows,
    range_lines,
    site_rows,
    stage_rows,
    step_line,
)

if TYPE_CHECKING:
    from ...compiler.inspect.diff import Differences
    from ...compiler.inspect.explain import Explanation

_TEMPLATE = Path(__file__).with_name("explain.html.jinja")


def page(label: str, facts: Explanation, against: Differences | None = None) -> str:
    """The file's content: tables, and the graph of a layer of each kind before and after the
    passes as text."""
    from jinja2 import Environment, StrictUndefined

    layers: list[dict[str, Any]] = [
        {
            "title": layer.title,
            "sentence": layer_sentence(layer),
            "rows": layer_rows(layer),
            "ranges": list(range_lines(layer)),
            "before": "\n".join(layer.before),
            "after": "\n".join(layer.after),
        }
        for layer in facts.layers
    ]
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return template.from_string(_TEMPLATE.read_text()).render(
        label=label,
        say=SENTENCES,
        facts=facts,
        summary=step_line(facts),
        stages=stage_rows(facts) if facts.stages else [],
        sites=site_rows(facts),
        layers=layers,
        fusions=fusion_rows(facts),
        choices=choice_rows(facts),
        pieces=piece_rows(facts),
        other=against.right if against else "",
        difference=list(against.tables()) if against else [],
    )
