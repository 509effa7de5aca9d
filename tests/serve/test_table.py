"""Claims about tables and the reports made of them: they fit the terminal, and nothing is lost."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from fusewright.serve.cli import main
from fusewright.serve.commands.explain import levels_table
from fusewright.serve.console.report import passes_table, startup_table, summary
from fusewright.serve.console.table import table

ROWS = [
    ["pass", "sites", "why"],
    ["fuse_gated_linear", "5", "a long reason, with several words; and a_name_that_is_one_word"],
    ["fuse_act", "12", "short"],
]
LEVELS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "levels-and-fusions.md"
REPORT: dict[str, Any] = {
    "level": 2,
    "hardware": "x86_64",
    "passes": [
        {"name": "fuse_act", "sites": 5, "matched": 5, "missed": []},
        {"name": "cleanup", "sites": 0, "matched": 0, "missed": []},
    ],
    "startup": {
        "imports_s": 1.0,
        "phases": [
            {"name": "compile", "begin_s": 1.0, "seconds": 2.0, "beside": False},
            {"name": "warm-up", "begin_s": 3.0, "seconds": 0.0001, "beside": False},
        ],
    },
    "compile": {"trace": 1.5, "publish": 0.0},
    "dispatch": {"decode": {"NONE": 7}},
    "graphs": {"mode": "NONE", "outside": {}},
    "memory": {"driver": 0},
}


@pytest.mark.parametrize("width", [80, 60, 45])
def test_a_table_fits_the_terminal_and_loses_no_word(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = table(ROWS).splitlines()
    assert max(map(len, lines)) <= width
    letters = sorted(c for line in lines for c in line if c not in " -")
    assert letters == sorted(c for row in ROWS for cell in row for c in cell if c not in " -")


def test_a_table_in_a_pipe_is_as_wide_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = table(ROWS, stream=io.StringIO()).splitlines()
    assert len(lines) == 1 + len(ROWS)
    assert lines[2].endswith(ROWS[1][-1])


def test_words_are_broken_only_where_a_column_is_narrower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert "a_name_that_is_one_word" in table(ROWS)


def test_the_levels_fit_80_columns_and_are_in_the_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    shown = levels_table()
    assert max(map(len, shown.splitlines())) <= 80
    assert f"```\n{shown}\n```" in LEVELS_PAGE.read_text()


def test_an_explanation_fits_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    assert main(["explain", "abacus", "--device", "cpu"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 72


def test_passes_without_sites_are_named_in_one_line() -> None:
    assert passes_table(REPORT["passes"]).splitlines()[-1] == "no sites in this model: cleanup"


def test_phases_that_took_no_time_are_left_out() -> None:
    shown = startup_table(REPORT["startup"], REPORT["compile"])
    assert "trace" in shown
    assert not {"publish", "warm-up"} & set(shown.split())


def test_a_report_of_a_cpu_says_why_no_graph_was_replayed() -> None:
    shown = summary(REPORT)
    assert "level -O2 on x86_64 (CPU: no CUDA graphs)" in shown
    assert "decode steps: 7\n" in shown + "\n"
    assert "NONE" not in shown


def test_a_report_of_a_gpu_without_graphs_says_so() -> None:
    memory = dict.fromkeys(
        ("driver", "weights", "kv_cache", "graphs", "activations", "context", "accounted"), 1
    )
    shown = summary({**REPORT, "memory": memory | {"graphs_predicted": 1}})
    assert "CPU" not in shown
    assert "decode steps: 7 without a graph" in shown
