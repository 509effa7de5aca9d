"""A picture of one layer's graph: a box a call, in order from top to bottom, an arrow a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from ..compiler.explain_graph import Box

_WIDTH, _HEIGHT, _GAP, _MARGIN = 320, 46, 30, 110
_COLORS = {
    "fw_triton": "#cfe8fc",
    "fw_cuda": "#d5f0d0",
    "fw_skinny": "#d5f0d0",
    "fw_native": "#fdebc8",
    "fw": "#eeeeee",
}
_ARROW_HEAD = (
    '<defs><marker id="end" markerWidth="8" markerHeight="8" refX="7" refY="3" orient="auto">'
    '<path d="M0,0 L7,3 L0,6 z" fill="#555"/></marker></defs>'
)
_OTHER = "#f7d6d6"
"""Of what Inductor or nobody has a kernel for."""


def picture(boxes: Sequence[Box]) -> str:
    """The boxes as one SVG element.  Arrows between neighbours are straight; the others pass on
    the right, those from before the layer come from above."""
    height = _MARGIN // 2 + len(boxes) * (_HEIGHT + _GAP)
    width = _WIDTH + 2 * _MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">'
    )
    arrows = [_arrow(source, i) for i, box in enumerate(boxes) for source in box.reads]
    drawn = [_box(i, box) for i, box in enumerate(boxes)]
    return "\n".join([head, _ARROW_HEAD, *arrows, *drawn, "</svg>"])


def _top(index: int) -> int:
    return _MARGIN // 2 + index * (_HEIGHT + _GAP)


def _arrow(source: int, target: int) -> str:
    middle, right = _MARGIN + _WIDTH // 2, _MARGIN + _WIDTH
    start, end = _top(source) + _HEIGHT, _top(target)
    if source == target - 1 and source >= 0:
        path = f"M{middle},{start} L{middle},{end}"
    elif source < 0 and target == 0:
        path = f"M{middle},4 L{middle},{end}"
    elif source < 0:
        left, away = _MARGIN, _MARGIN - min(90, 30 + 12 * target)
        path = f"M{middle - 20},4 C{away},4 {away},{end + 12} {left},{end + 12}"
    else:
        away = right + min(90, 30 + 12 * (target - source))
        start -= _HEIGHT // 2
        path = f"M{right},{start} C{away},{start} {away},{end + 12} {right},{end + 12}"
    return f'<path d="{path}" fill="none" stroke="#555" marker-end="url(#end)"/>'


def _box(index: int, box: Box) -> str:
    x, y, namespace = _MARGIN, _top(index), box.op.partition("::")[0]
    color = _COLORS.get(namespace, _OTHER)
    read = f"  weights {', '.join(box.weights)}" if box.weights else ""
    return (
        f"<g><title>{escape(box.name + read)}</title>"
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="{color}" '
        'stroke="#888"/>'
        f'<text x="{x + 10}" y="{y + 19}" font-weight="bold">{escape(box.op)}</text>'
        f'<text x="{x + 10}" y="{y + 36}" fill="#444">{escape(_short(box.made))}</text></g>'
    )


def _short(text: str, most: int = 52) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
