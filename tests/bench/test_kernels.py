"""Results of kernel benchmarks: read, compared, rendered; the measuring itself needs a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fusewright.bench.kernels.figures import Figure, add, compare, figure_of, load, save
from fusewright.benchmarks.kernel_page import best, by_work, load_all, markdown, picture, summary
from fusewright.config import UserError
from fusewright.serve.cli import main

ENVIRONMENT = {
    "device": "NVIDIA H200",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "commit": "abc",
    "command": "fusewright bench kernels",
}


def figure(us: float, contender: str = "triton", op: str = "rms_norm", label: str = "1") -> Figure:
    library = contender in ("inductor", "cublas")
    return Figure(op, label, contender, library, us, bytes=8.56e6, flops=1e6)


def saved(folder: Path, *runs: list[Figure]) -> list[Path]:
    paths = [folder / f"{number}.jsonl" for number in range(len(runs))]
    for path, figures in zip(paths, runs, strict=True):
        save(path, ENVIRONMENT, figures)
    return paths


def test_rates_and_share_follow_from_bytes_and_time() -> None:
    f = figure(us=4.0)
    assert f.gb_s == pytest.approx(2140)
    assert f.share == pytest.approx(0.5)
    linears = Figure("linear", "", "native", False, us=1e6, bytes=1.0, flops=395e12)
    assert linears.share == pytest.approx(0.5)
    fp8 = Figure("linear", "FP8", "native", False, us=1e6, bytes=1.0, flops=395e12)
    assert fp8.share == pytest.approx(0.25)


def test_a_figure_is_a_call_of_the_graphs_that_were_timed() -> None:
    extra = {
        "op": "rms_norm",
        "label": "1",
        "contender": "triton",
        "library": False,
        "calls": 50,
        "bytes": 10.0,
        "flops": 20.0,
    }
    found = figure_of(extra, [100e-6, 95e-6, 105e-6])
    assert (found.us, found.bytes, found.flops) == (2.0, 10.0, 20.0)
    assert (found.n, found.spread) == (3, 0.1)


def test_a_saved_result_is_read_back_and_one_cut_short_too(tmp_path: Path) -> None:
    path, figures = tmp_path / "r.jsonl", [figure(4.0), figure(5.0, "inductor")]
    save(path, ENVIRONMENT, figures[:1])
    add(path, figures[1])
    assert load(path) == (ENVIRONMENT, figures)
    path.write_text(path.read_text()[:-10])
    assert load(path) == (ENVIRONMENT, figures[:1])


def test_results_of_several_runs_make_one_page(tmp_path: Path) -> None:
    save(tmp_path / "a.json", ENVIRONMENT, [figure(4.0)])
    save(tmp_path / "b.json", {**ENVIRONMENT, "commit": "def"}, [figure(9.0, op="argmax")])
    environment, figures = load_all([tmp_path / "a.json", tmp_path / "b.json"])
    page = markdown(environment, figures, "kernels.png")
    assert "commit abc: `fusewright bench kernels`; commit def: `fusewright" in page
    assert [f.op for f in figures] == ["rms_norm", "argmax"]
    save(tmp_path / "b.json", {**ENVIRONMENT, "torch": "2.12.0"}, [])
    with pytest.raises(UserError, match=r"different torch: 2\.11\.0, 2\.12\.0"):
        load_all([tmp_path / "a.json", tmp_path / "b.json"])


def test_ours_is_compared_whichever_kernel_it_was(tmp_path: Path) -> None:
    (change,) = compare(*saved(tmp_path, [figure(4.0, "cuda")], [figure(5.0, "triton")]))
    assert change.slower == 1.25


def test_the_best_of_ours_against_the_best_library() -> None:
    group = [figure(4.0), figure(3.0, "cuda"), figure(5.0, "inductor"), figure(4.5, "cublas")]
    ours, library = best(group, library=False), best(group, library=True)
    assert ours is not None
    assert library is not None
    assert (ours.contender, library.contender) == ("cuda", "cublas")


def test_the_page_has_a_row_a_work_and_its_ratio() -> None:
    figures = [figure(4.0), figure(5.0, "inductor"), figure(4.0, label="2")]
    page = markdown({**ENVIRONMENT, "runs": "commit abc"}, figures, "kernels.png")
    assert "| 1 | triton | 4.00 | 2140 | 0 | 50% | inductor | 5.00 | 0.80 |" in page
    assert "| 2 | triton | 4.00 | 2140 | 0 | 50% | - | - | - |" in page
    assert list(by_work(figures)) == [("rms_norm", "1"), ("rms_norm", "2")]


def test_the_picture_has_a_panel_an_op_and_a_point_a_work() -> None:
    one, other = picture([figure(4.0), figure(5.0, "inductor"), figure(9.0, op="argmax")]).panels
    assert (one.title, other.title) == ("rms_norm", "argmax")
    assert [(line.label, len(line.points)) for line in one.lines] == [
        ("fusewright", 1),
        ("fastest library", 1),
    ]


def test_compare_lists_the_largest_slowdown_first(tmp_path: Path) -> None:
    old = [figure(4.0), figure(4.0, label="2"), figure(1.0, label="gone")]
    new = [figure(4.1), figure(8.0, label="2"), figure(1.0, label="fresh")]
    changes = compare(*saved(tmp_path, old, new))
    assert [c.slower for c in changes] == [2.0, pytest.approx(1.025)]


def test_the_summary_has_a_row_an_op_with_its_extremes_and_ratios() -> None:
    figures = [
        figure(4.0),
        figure(5.0, "inductor"),
        figure(8.0, label="2"),
        figure(9.0, op="argmax"),
    ]
    _, norm, argmax = summary(figures)
    assert norm == ["rms_norm", "2", "25% (2)", "50% (1)", "1", "1", "0.80", "0.80 (1)"]
    assert argmax[4:] == ["-"] * 4


def test_the_command_fails_on_a_regression_and_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "old.json", ENVIRONMENT, [figure(4.0), figure(9.0, label="2")])
    save(tmp_path / "new.json", ENVIRONMENT, [figure(4.4), figure(6.0, label="2")])
    argv = ["bench", "kernels", "--compare", str(tmp_path / "old.json"), str(tmp_path / "new.json")]
    assert main(argv) == 1
    said = capsys.readouterr().out
    assert "1 slower, 1 faster by more than 5%" in said
    assert "1.10" in said
    assert main([*argv, "--threshold", "0.2"]) == 0


def test_a_threshold_that_means_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--compare", "a", "b", "--threshold", "-1"]) == 2
    assert "threshold=-1.0: expected a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{\n", json.dumps({"figures": []}) + "\n", "[1]\n", ""])
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(UserError, match=r"r\.json is not a result of"):
        load(tmp_path / "r.json")
