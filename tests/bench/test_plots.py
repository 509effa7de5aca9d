"""Pictures are drawn from what the benches write, and hold every point of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fusewright.bench.plots import _DRAW
from fusewright.serve.cli import main

matplotlib = pytest.importorskip("matplotlib", reason="machines that measure need none")
LATENCY = {"rows": [{"batch": b, "tpot_ms": 4.0 + b / 64} for b in (1, 64, 256)]}
THROUGHPUT = {
    "rows": [
        {
            "workload": workload,
            "request_rate": rate,
            "tpot_ms": {"mean": ms},
            "output_tokens_per_s": 100.0 * ms,
        }
        for workload in ("chat", "decode-heavy")
        for rate, ms in ((10.0, 5.0), (20.0, 6.0), (None, 9.0))
    ]
}
TUNING = {
    "asked": {"limits_ms": {"ttft": 500.0}},
    "rows": [
        {
            "max_num_seqs": seqs,
            "max_num_batched_tokens": tokens,
            "gpu_memory_utilization": None,
            "asked": asked,
            "goodput_per_s": seqs / tokens + asked,
        }
        for seqs, tokens, asked in ((2, 64, 5), (8, 64, 5), (8, 256, 5), (8, 256, 10))
    ],
    "best": {"max_num_seqs": 8, "goodput_per_s": 10.0},
}
SERVERS = {
    "rows": [{**row, "server": f"http://{n}"} for n in "ab" for row in THROUGHPUT["rows"][:3]]
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


def written(folder: Path, **results: Any) -> list[str]:
    for name, result in results.items():
        (folder / f"{name}.json").write_text(json.dumps(result))
    return [str(folder / f"{name}.json") for name in results]


@pytest.mark.parametrize(
    ("kind", "result", "lines"),
    [
        ("latency", LATENCY, {"a": 3}),
        ("throughput", THROUGHPUT, {"a, chat": 3, "a, decode-heavy": 3}),
        ("throughput", SERVERS, {"a, http://a, chat": 3, "a, http://b, chat": 3}),
        ("tuning", TUNING, {"64 tokens a step": 2, "256 tokens a step": 1, "best": 1}),
        ("engines", ENGINE, {"a": 2}),
        (
            "growth",
            GROWTH,
            {"b=1": 2, "bytes, b=1": 2, "b=64": 2, "bytes, b=64": 2}
            | {"step": 2, "its graph": 1, "CPU in it": 2, "step - graph": 1},
        ),
    ],
)
def test_a_picture_has_every_point(
    kind: str, result: Any, lines: dict[str, int], tmp_path: Path
) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    page = pyplot.figure()
    axes = _DRAW[kind](page, {"a": result})
    assert {line.get_label(): len(line.get_xdata()) for a in axes for line in a.lines} == lines
    pyplot.close(page)
    (source,) = written(tmp_path, a=result)
    assert main(["bench", "plot", str(tmp_path / "p.png"), source]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


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
