"""Draws pictures that are described as data: panels of lines, points or cells, axes with units.

``draw`` places what matplotlib leaves to chance: ticks are plain numbers that do not touch, points
are named where nothing else stands, and legends lie below their panels.
"""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from math import ceil, cos, floor, log10, pi, sin
from pathlib import Path
from typing import Any

from ..config import UserError

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
_DASHES = ("-", "--", ":", "-.")
_STEPS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8))
"""Digits at which the ticks of a logarithmic axis may stand, from few to many."""
_LEGEND_BELOW, _LEGEND_ROW = 0.45, 0.17
"""Inches from a panel to its legend, and of a row of it."""
_DISTANCES = (7, 13, 20, 30, 42)
"""Points between a named point and its name; from the third on a thin line joins them."""


@dataclass(frozen=True)
class Line:
    """Points, joined by a line unless ``joined`` is off.

    Args:
        label: lines of one label have one colour in all panels.
        style: lines of one style have the same dashes within a panel; "" is not in the legend.
        names: a text for each point, or none.
    """

    label: str
    points: Sequence[tuple[float, float]]
    style: str = ""
    names: Sequence[str] = ()
    marker: str = "o"
    joined: bool = True


@dataclass(frozen=True)
class Cells:
    """A map: (row, column) -> value, drawn as colour and number, or a text instead of one."""

    columns: Sequence[str]
    rows: Sequence[str]
    values: Mapping[tuple[str, str], float | str]
    unit: str
    best: tuple[str, str] | None = None


@dataclass(frozen=True)
class Panel:
    """One plot: ``x`` and ``y`` say quantity and unit, ``log`` names the logarithmic axes."""

    title: str
    x: str
    y: str
    lines: Sequence[Line] = ()
    log: str = ""
    cells: Cells | None = None
    y_most: float | None = None


@dataclass(frozen=True)
class Picture:
    """Panels in rows of ``columns``."""

    title: str
    panels: Sequence[Panel]
    columns: int = 1

    def digest(self) -> str:
        """Names the content: two pictures of one digest look alike."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def check_drawing() -> None:
    """Raises UserError: there is nothing to draw with."""
    if find_spec("matplotlib") is None:
        raise UserError(
            "plot: matplotlib is not installed here; install it, or keep the result by --output "
            "and run `fusewright bench plot` elsewhere"
        )


def save(picture: Picture, path: Path) -> None:
    """Write a picture to ``path`` as PNG, with its digest as the comment.

    Raises:
        UserError: matplotlib is not installed.
    """
    check_drawing()
    draw(picture).savefig(path, dpi=100, metadata={"Comment": picture.digest(), "Software": None})


def draw(picture: Picture) -> Any:
    """The picture as a figure of matplotlib with nothing left to lay out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.transforms import ScaledTranslation

    columns = min(picture.columns, len(picture.panels))
    rows = -(-len(picture.panels) // columns)
    width, height = ((7.5, 4.6), (5.6, 4.4), (4.3, 2.9))[min(columns, 3) - 1]
    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_text(picture.title, round(width * columns * 9)), fontsize=12)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axis in grid.flat[len(picture.panels) :]:
        axis.remove()
    drawn = list(zip(grid.flat, picture.panels, strict=False))
    every = [line for panel in picture.panels for line in panel.lines]
    colors = _cycle(_COLORS, (line.label for line in every))
    for axis, panel in drawn:
        _draw_panel(axis, panel, colors)
    keys = [_keys(panel, colors) for panel in picture.panels]
    if len(keys) > 2:
        _legend(figure, max(keys, key=len), loc="outside lower center")
    else:
        for (axis, _), each in zip(drawn, keys, strict=True):
            below = ScaledTranslation(0, -_LEGEND_BELOW, figure.dpi_scale_trans)
            place = {"bbox_to_anchor": (0.5, 0), "bbox_transform": axis.transAxes + below}
            _legend(axis, each, loc="upper center", **place)
    lines = max(text.count("\n") + 1 for each in keys for text in ("", *each))
    in_rows = max(ceil(len(each) / _legend_columns(each)) for each in keys)
    figure.set_size_inches(width * columns, height * rows + _LEGEND_ROW * in_rows * lines)
    figure.draw_without_rendering()
    for axis in figure.axes:
        _thin(axis.xaxis)
        _thin(axis.yaxis)
    figure.set_layout_engine("none")
    for axis, panel in drawn:
        _name_points(axis, panel)
    return figure


def number(value: float, _: object = None) -> str:
    """A number as a person writes it: no exponent, commas between thousands."""
    text = f"{value:,.6f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def _text(label: str, width: int = 46) -> str:
    """A label that matplotlib shows as it is, in lines of at most ``width`` characters."""
    lines = (textwrap.fill(line, width) or line for line in label.split("\n"))
    shown = "\n".join(lines).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def _cycle(choices: Sequence[str], keys: Iterable[str]) -> dict[str, str]:
    return {key: choices[i % len(choices)] for i, key in enumerate(dict.fromkeys(keys))}


def _draw_panel(axis: Any, panel: Panel, colors: Mapping[str, str]) -> None:
    axis.set_title(_text(panel.title, 60), fontsize=10)
    axis.set_xlabel(_text(panel.x))
    axis.set_ylabel(_text(panel.y))
    if panel.cells is not None:
        _draw_cells(axis, panel.cells)
        return
    dashes = _cycle(_DASHES, (line.style for line in panel.lines))
    for line in panel.lines:
        axis.plot(
            *zip(*line.points, strict=True),
            marker=line.marker,
            linestyle=dashes[line.style] if line.joined else "",
            color=colors[line.label],
            markersize=4,
        )
    axis.grid(alpha=0.3)
    axis.margins(0.08)
    for name, points in (
        ("x", [p[0] for p in _points(panel)]),
        ("y", [p[1] for p in _points(panel)]),
    ):
        side = getattr(axis, f"{name}axis")
        if name in panel.log:
            getattr(axis, f"set_{name}scale")("log")
            side.set_ticks(_log_ticks(points))
            side.set_ticks([], minor=True)
        else:
            low, high = (
                min(0, *points),
                panel.y_most if name == "y" and panel.y_most else max(points),
            )
            room = 0.05 * (high - low or 1)  # so that names fit around points at the edge
            getattr(axis, f"set_{name}lim")(low - room, high + room)
        side.set_major_formatter(number)


def _points(panel: Panel) -> list[tuple[float, float]]:
    return [point for line in panel.lines for point in line.points]


def _log_ticks(values: Iterable[float]) -> list[float]:
    """The values where they are few and whole, as 1, 2, 4, 8; else round numbers among them."""
    distinct = sorted(set(values))
    if len(distinct) <= 12 and all(value == int(value) for value in distinct):
        return distinct
    low, high = distinct[0] / 1.1, distinct[-1] * 1.1
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    for digits in _STEPS:
        ticks = [d * 10.0**decade for decade in decades for d in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) > 3:
            break
    return ticks


def _draw_cells(axis: Any, cells: Cells) -> None:
    numbers = [value for value in cells.values.values() if not isinstance(value, str)]
    most = max(numbers, default=0.0) or 1.0
    lookup = [
        [_or_nan(cells.values.get((row, column))) for column in cells.columns] for row in cells.rows
    ]
    image = axis.imshow(lookup, cmap="Blues", vmin=0, vmax=most, aspect="auto", origin="lower")
    axis.figure.colorbar(image, ax=axis, label=cells.unit, format=number)
    axis.set_xticks(range(len(cells.columns)), cells.columns)
    axis.set_yticks(range(len(cells.rows)), cells.rows)
    for (row, column), value in cells.values.items():
        place = (cells.columns.index(column), cells.rows.index(row))
        text = (
            value
            if isinstance(value, str)
            else f"{value:,.3g}"
            if value < 1000
            else number(round(value))
        )
        dark = not isinstance(value, str) and value > most * 0.6
        best = (row, column) == cells.best
        axis.annotate(
            f"{text}\nbest" if best else text,
            place,
            ha="center",
            va="center",
            fontsize=9,
            fontweight="bold" if best else "normal",
            color="white" if dark else "black",
        )


def _or_nan(value: float | str | None) -> float:
    return float("nan") if value is None or isinstance(value, str) else value


def _keys(panel: Panel, colors: Mapping[str, str]) -> dict[str, Any]:
    """The legend of a panel shows the label of each colour, then the style of each dash."""
    from matplotlib.lines import Line2D

    dashes = _cycle(_DASHES, (line.style for line in panel.lines))
    keys: dict[str, Any] = {}
    for line in panel.lines:
        shape: dict[str, Any] = {"marker": line.marker, "ms": 4, "ls": "-" if line.joined else ""}
        keys.setdefault(_text(line.label), Line2D([], [], color=colors[line.label], **shape))
    for style, dash in dashes.items():
        if style:
            shape = {"color": "#555555", "ls": dash}
            keys[_text(style)] = Line2D([], [], **shape)
    return keys


def _legend_columns(keys: Mapping[str, Any]) -> int:
    return 1 if any(len(text) > 32 for text in keys) else 2


def _legend(on: Any, keys: Mapping[str, Any], **place: Any) -> None:
    if keys:
        on.legend(
            keys.values(), keys, ncols=_legend_columns(keys), fontsize=8, frameon=False, **place
        )


def _thin(side: Any) -> None:
    """Leave out ticks beyond the ends, and every second one until no two labels touch."""
    low, high = sorted(side.get_view_interval())
    ticks = zip(side.get_ticklocs(), side.get_ticklabels(), strict=True)
    within = [(tick, label.get_text()) for tick, label in ticks if low <= tick <= high]
    side.set_ticks([tick for tick, _ in within], [text for _, text in within])
    while True:
        boxes = [
            label.get_window_extent().padded(2)
            for label in side.get_ticklabels()
            if label.get_text()
        ]
        if not any(a.overlaps(b) for a, b in pairwise(boxes)):
            return
        texts = [label.get_text() for label in side.get_ticklabels()]
        kept = slice((len(texts) - 1) % 2, None, 2)
        side.set_ticks(side.get_ticklocs()[kept], texts[kept])


def _name_points(axis: Any, panel: Panel) -> None:
    """Write the names of points where they cover nothing: no other name, no point, no line."""
    from matplotlib.transforms import Bbox

    dots = (
        [Bbox.from_bounds(x - 3, y - 3, 6, 6) for x, y in axis.transData.transform(_points(panel))]
        if panel.lines
        else []
    )
    lines = [line.get_path().transformed(line.get_transform()) for line in axis.lines]
    taken: list[Any] = []
    for line, drawn in zip(panel.lines, axis.lines, strict=True):
        for name, point in zip(line.names, line.points, strict=False):
            best = None
            for offset in _around():
                text = _name(axis, name, point, offset, drawn.get_color())
                box = text.get_window_extent().padded(1)
                text.remove()
                inside = axis.bbox.count_contains(box.corners()) == 4
                if not inside or any(box.overlaps(other) for other in (*taken, *dots)):
                    continue
                crossed = sum(path.intersects_bbox(box, filled=False) for path in lines)
                if best is None or crossed < best[0]:
                    best = (crossed, offset, box)
                if not crossed:
                    break
            if best is not None:
                _name(axis, name, point, best[1], drawn.get_color())
                taken.append(best[2])


def _around() -> Iterator[tuple[float, float]]:
    """Places around a point, in points: near ones first, above and below before the sides."""
    for distance in _DISTANCES:
        for eighth in (2, 6, 0, 4, 3, 7, 1, 5, 0.5, 7.5, 3.5, 4.5):
            angle = eighth * pi / 4
            yield distance * cos(angle), distance * sin(angle)


def _name(
    axis: Any, name: str, point: tuple[float, float], offset: tuple[float, float], color: str
) -> Any:
    x, y = (round(part) for part in offset)
    far = max(abs(x), abs(y)) >= _DISTANCES[2] * 0.7
    return axis.annotate(
        _text(name),
        point,
        xytext=(x, y),
        textcoords="offset points",
        ha="center" if x == 0 else "left" if x > 0 else "right",
        va="center" if y == 0 else "bottom" if y > 0 else "top",
        fontsize=7,
        color=color,
        arrowprops={"arrowstyle": "-", "lw": 0.5, "color": color, "shrinkB": 3} if far else None,
    )
