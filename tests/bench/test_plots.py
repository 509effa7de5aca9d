"""Pictures are drawn from what the benches write, hold every point of it, and can be read."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fusewright.bench.charts import Picture, draw
from fusewright.bench.plots import picture
from fusewright.benchmarks.report import H200, pictures
from fusewright.serve.cli import main

pytest.importorskip("matplotlib", reason="machines that measure need none")
DOCS = Path(__file__).resolve().parents[2] / "docs"
ABOUT = {
    "environment": {"device": "NVIDIA H100 80GB HBM3"},
    "options": {"model": "/models/meta-llama/Llama-3.1-8B-Instruct"},
}
LATENCY = {"rows": [{"batch": b, "tpot_ms": 4.0 + b / 64} for b in (1, 64, 256)]}


def rate_row(workload: str, rate: float | None, slow: float, **more: Any) -> dict[str, Any]:
    offered = rate or 45.0
    return {
        "workload": workload,
        "request_rate": rate,
        "tpot_ms": {"mean": slow * (5 + offered / 4)},
        "ttft_ms": {"mean": 9.0, "p50": 3 * offered, "p90": 5 * offered, "p99": 9 * offered},
        "output_tokens_per_s": 150 * offered / slow,
        **more,
    }


MIXES = ("chat", "decode-heavy")
THROUGHPUT = {"rows": [rate_row(w, rate, len(w)) for w in MIXES for rate in (10.0, 20.0, None)]}
QUANTILES = [1.0 + i for i in range(51)]
SERVERS = {
    **ABOUT,
    "rows": [
        rate_row("sharegpt", rate, slow, server=url, ttft_quantiles_ms=QUANTILES)
        for url, slow in (
            ("http://localhost:8000", 1.0),
            ("http://localhost:8001", 1.25),
            ("http://a-host-with-a-long-name.example.org:30000", 1.4),
        )
        for rate in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, None)
    ],
}
TUNING = {
    "asked": {"limits_ms": {"ttft": 500.0}, "options": ABOUT["options"]},
    "rows": [
        {
            "max_num_seqs": seqs,
            "max_num_batched_tokens": tokens,
            "gpu_memory_utilization": None,
            "asked": asked,
            "goodput_per_s": seqs / tokens + asked,
        }
        for seqs, tokens, asked in ((2, 64, 5), (8, 64, 5), (8, 1024, 5), (8, 1024, 10))
    ]
    + [
        {
            "max_num_seqs": 512,
            "max_num_batched_tokens": 16384,
            "gpu_memory_utilization": None,
            "asked": 5,
            "failed": "no memory",
        }
    ],
    "best": {"max_num_seqs": 8, "max_num_batched_tokens": 1024, "goodput_per_s": 10.0},
}
ENGINE = {"engine": "vllm 1", "tpot_ms": {"1": 4.0, "64": 5.0, "17:3000": 6.0}}
GROWTH = {
    "context": [
        {"batch": b, "context": c, "tpot_ms": 3.0 * b, "limit_ms": 2.0}
        for b in (1, 64)
        for c in (128, 256)
    ],
    "requests": [
        {"requests": 1, "step_us": 9.0, "host_us": 2.0, "graph_us": 8.0, "overhead_us": 1.0},
        {"requests": 600, "step_us": 20.0, "host_us": 3.0},
    ],
}
LONG = "a-result-of-2026-11-28_with-a-name-that-is-as-long-as-names-of-files-may-be$_"


def written(folder: Path, **results: Any) -> list[str]:
    for name, result in results.items():
        (folder / f"{name}.json").write_text(json.dumps(result))
    return [str(folder / f"{name}.json") for name in results]


def assert_readable(drawn: Picture) -> None:
    """No text is cut or over another, every axis has a unit, every tick is a plain number, and
    every point that has a name shows it."""
    from matplotlib.text import Text

    figure = draw(drawn)
    figure.draw_without_rendering()
    texts = [
        text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()
    ]
    boxes = {text: text.get_window_extent() for text in texts}
    page = figure.bbox.padded(0.5)
    cut = [text.get_text() for text, box in boxes.items() if page.count_contains(box.corners()) < 4]
    assert not cut
    pairs = itertools.combinations(((t, b.padded(-0.5)) for t, b in boxes.items()), 2)
    over = [(a.get_text(), b.get_text()) for (a, x), (b, y) in pairs if x.overlaps(y)]
    assert not over
    assert drawn.title
    for axis in figure.axes:
        labels = [text for text in (axis.get_xlabel(), axis.get_ylabel()) if text]
        assert all(re.search(r", .*\S", label) for label in labels) and labels
        for side in (axis.xaxis, axis.yaxis):
            shown = [text.get_text() for text in side.get_ticklabels() if text.get_text()]
            assert all(re.fullmatch(r"-?\d[\d,]*(\.\d+)?", text) for text in shown)
    names = [name for panel in drawn.panels for line in panel.lines for name in line.names]
    there = [text.get_text() for text in texts]
    assert all(there.count(name) >= names.count(name) for name in set(names))


@pytest.mark.parametrize(
    ("results", "lines"),
    [
        ({"a": LATENCY}, {"a": 3}),
        (
            {"a": {**ABOUT, **THROUGHPUT}},
            {"a, chat": 3, "a, decode-heavy": 3}
            | {f"a, {w}, {r}": 3 for w in MIXES for r in ("10/s", "20/s", "all at once")},
        ),
        (
            {"a": SERVERS},
            {f"{url}, sharegpt": 7 for url in {row["server"] for row in SERVERS["rows"]}}
            | {
                f"{url}, sharegpt, {rate}": 51
                for url in {row["server"] for row in SERVERS["rows"]}
                for rate in ("1/s", "8/s", "all at once")
            },
        ),
        ({"a": TUNING}, {}),
        ({"a": TUNING, LONG: TUNING}, {}),
        ({"a": ENGINE}, {"a": 2}),
        ({LONG: LATENCY, "_b": LATENCY}, {LONG: 3, "_b": 3}),
        (
            {"a": GROWTH},
            {"1 request": 2, "1 request, limit by bytes": 2}
            | {"64 requests": 2, "64 requests, limit by bytes": 2}
            | {"step": 2, "its CUDA graph": 1, "CPU time in it": 2, "step less its graph": 1},
        ),
    ],
    ids=("latency", "rates", "servers", "tuning", "tunings", "engines", "long-names", "growth"),
)
def test_a_picture_has_every_point_and_can_be_read(
    results: dict[str, Any], lines: dict[str, int]
) -> None:
    described = picture(results)
    found = {
        f"{line.label}, {line.style}" if line.style else line.label: len(line.points)
        for panel in described.panels
        for line in panel.lines
    }
    assert found == lines
    assert_readable(described)


def test_a_picture_is_drawn_from_files(tmp_path: Path) -> None:
    sources = written(tmp_path, a=LATENCY, b=LATENCY)
    assert main(["bench", "plot", str(tmp_path / "p.png"), *sources]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_the_map_of_a_tuning_has_each_longest_run_and_the_best() -> None:
    (panel,) = picture({"a": TUNING}).panels
    assert panel.cells is not None
    assert panel.cells.rows == ["64", "1024", "16384"] and panel.cells.columns == ["2", "8", "512"]
    assert panel.cells.values["1024", "8"] == 8 / 1024 + 10
    assert panel.cells.values["16384", "512"] == "failed"
    assert panel.cells.best == ("1024", "8")


def test_the_pictures_of_the_documents_are_as_drawn_and_can_be_read() -> None:
    from PIL import Image

    drawn = pictures(H200)
    assert {*drawn} == {path.name for path in DOCS.glob("*.png")}
    for name, described in drawn.items():
        assert_readable(described)
        with Image.open(DOCS / name) as file:
            assert file.info["Comment"] == described.digest(), f"{name}: run `make pictures`"


def test_the_texts_of_the_line_stay_in_their_boxes() -> None:
    """docs/line.svg, with the font that it names first, which matplotlib brings along."""
    from xml.etree import ElementTree

    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    root = ElementTree.parse(DOCS / "line.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    rects = [
        [float(r.get(k, 0)) for k in ("x", "y", "width", "height")]
        for r in root.iter(f"{space}rect")
    ]
    boxes = []
    for text in root.iter(f"{space}text"):
        family = (text.get("font-family") or root.attrib["font-family"]).split(",")[0]
        font = FontProperties(family=family, weight=text.get("font-weight", "normal"))
        size, x, y = (float(text.attrib[key]) for key in ("font-size", "x", "y"))
        width = TextPath((0, 0), text.text, size=size, prop=font).get_extents().width
        left = x - width / 2 if text.get("text-anchor") == "middle" else x
        around = [r for r in rects if r[0] <= x <= r[0] + r[2] and r[1] <= y <= r[1] + r[3]][-1]
        assert around[0] + 4 < left and left + width < around[0] + around[2] - 4, text.text
        assert around[1] + size < y < around[1] + around[3] - 4, text.text
        boxes.append((left, y - size, left + width, y))
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_results_of_several_benches_share_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = written(tmp_path, a=LATENCY, b=GROWTH)
    assert main(["bench", "plot", str(tmp_path / "p.png"), *sources]) == 2
    assert "results of growth and latency do not share a picture" in capsys.readouterr().err


@pytest.mark.parametrize("result", [{}, [], {"rows": []}, {"rows": [3]}, 7])
def test_what_is_no_result_is_refused(
    result: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source,) = written(tmp_path, a=result)
    assert main(["bench", "plot", str(tmp_path / "p.png"), source]) == 2
    assert "is not a result of `fusewright bench latency`" in capsys.readouterr().err
