"""``benchmarks.report``: the documents' tables are what the result files hold, and a result
says when the sources that it measured have changed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fusewright.bench.environment import ENGINE, changed_since, source_digests
from fusewright.benchmarks.evidence import ON_REQUEST, SUITES, Suite, command, measure, write_models
from fusewright.benchmarks.report import (
    PAGES,
    TABLES,
    freshness,
    load,
    main as report,
    render,
    rendered,
)
from fusewright.config import UserError
from fusewright.serve.cli import main

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results" / "h200"


def row(tpot_ms: float, batch: int = 1, **more: Any) -> dict[str, Any]:
    return {"batch": batch, "tpot_ms": tpot_ms, "ttft_ms": 5.0, **more}


def latency(folder: Path, name: str, *rows: Any, commit: str = "abc", day: str = "02") -> None:
    environment = {"device": "NVIDIA H200", "commit": commit, "date": f"2026-01-{day}"}
    options = {"model": f"/models/{name}", "optimization_level": 2}
    record = {"environment": environment, "options": options, "rows": rows}
    (folder / f"{name}.json").write_text(json.dumps(record))


def page(marker: str) -> str:
    return f"before\n<!-- bench:{marker} -->\n| old |\n<!-- /bench -->\nbehind\n"


def test_the_pages_are_as_rendered() -> None:
    different = [path.name for path, text in rendered().items() if path.read_text() != text]
    assert not different, "run `python -m fusewright.benchmarks.report`"


@pytest.mark.parametrize(
    ("result", "figure", "other", "pages"),
    [
        ("peers.jsonl", '"1": 3.773', '"1": 1.239', {"README.md", "performance.md"}),
        ("linear.json", '"us": 3961.34', '"us": 1239.34', {"performance.md"}),
        ("passes-llama3-8b-fp8.json", '"decode 1": 2.4928', '"decode 1": 1.2391', {"passes.md"}),
        ("kernels.jsonl", '"us": 18.755', '"us": 18.123', {"kernels.md"}),
    ],
)
def test_a_changed_result_changes_its_pages(
    result: str, figure: str, other: str, pages: set[str], tmp_path: Path
) -> None:
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    text = (tmp_path / result).read_text()
    assert figure in text
    (tmp_path / result).write_text(text.replace(figure, other))
    before, after = _without_paths(rendered(RESULTS)), _without_paths(rendered(tmp_path))
    assert {name for name in before if before[name] != after[name]} == pages


def _without_paths(pages: dict[Path, str]) -> dict[str, str]:
    return {path.name: text.replace("`bench/results/h200/", "`") for path, text in pages.items()}


def test_every_result_is_shown_or_named_by_a_page() -> None:
    text = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    text += (ROOT / "README.md").read_text()
    names = {
        name for marker in re.findall(r"<!-- bench:(.*?) -->", text) for name in marker.split()
    }
    growth = {"growth-llama3.2-1b"}  # docs/growth.png
    unseen = [
        p.name for p in RESULTS.iterdir() if p.stem not in names | growth and p.name not in text
    ]
    assert not unseen


def test_a_table_says_commit_and_day_and_only_has_figures_of_one_commit(tmp_path: Path) -> None:
    latency(tmp_path, "a", row(4.0), row(5.0, batch=64), commit="new")
    latency(tmp_path, "b", row(9.0), commit="old", day="01")
    text = render(page("latency a b"), tmp_path)
    assert text.startswith("before\n<!-- bench:latency a b -->\n\n| TPOT") and "| old |" not in text
    assert "| a `-O2` | 4.00 | 5.00 | 5.0 |" in text and "9.00" not in text
    assert "NVIDIA H200; commit new, 2026-01-02: `a.json`." in text
    assert render(text, tmp_path) == text
    latency(tmp_path, "b", row(9.0), commit="new")
    assert "| b `-O2` | 9.00 |" in render(text, tmp_path)


def test_a_caption_has_repeats_and_spread_where_they_were_recorded(tmp_path: Path) -> None:
    latency(tmp_path, "a", row(4.0, n=3, spread=0.012), row(5.0, batch=64, n=3, spread=0.034))
    assert "`a.json`; n = 3, spread up to 3.4%." in render(page("latency a"), tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (page("nothing a"), "no table nothing; known: engines"),
        (page("latency b"), r"has no b\.json or b\.jsonl"),
        ("<!-- bench:latency a -->\n", "has no <!-- /bench --> behind it"),
    ],
)
def test_a_marker_that_leads_nowhere_is_refused(text: str, message: str, tmp_path: Path) -> None:
    latency(tmp_path, "a", row(4.0))
    with pytest.raises(UserError, match=message):
        render(text, tmp_path)


def test_a_result_without_its_origin_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"rows": [], "environment": {"device": "NVIDIA H200"}}')
    with pytest.raises(UserError, match=r"a\.json is not a result of"):
        load(tmp_path / "a.json")


def test_a_result_with_digests_knows_which_folders_have_changed(tmp_path: Path) -> None:
    for folder in ("ops", "engine"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("1\n")
    measured = {"commit": "unknown", "sources": source_digests(("ops", "engine"), tmp_path)}
    assert changed_since(measured, ("ops", "engine"), tmp_path) == []
    (tmp_path / "ops" / "b.cu").write_text("")
    (tmp_path / "engine" / "a.md").write_text("")
    assert changed_since(measured, ("ops", "engine"), tmp_path) == ["ops"]
    (tmp_path / "ops" / "b.cu").unlink()
    (tmp_path / "engine" / "a.py").write_text("2\n")
    assert changed_since(measured, ("ops", "engine"), tmp_path) == ["engine"]
    assert changed_since(measured, ("ops",), tmp_path) == []


def test_a_result_without_digests_is_compared_by_its_commit(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", *who, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init", "-q")
    assert changed_since({"commit": "unknown"}, ENGINE, tmp_path) is None
    for folder in ("ops", "engine"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("1\n")
    git("add", ".")
    git("commit", "-qm", "one")
    measured = {"commit": f"{git('rev-parse', '--short', 'HEAD')} before its rebase"}
    (tmp_path / "ops" / "a.py").write_text("2\n")
    assert changed_since(measured, ("ops", "engine"), tmp_path) == ["ops"]


def test_every_result_says_what_it_is_older_than() -> None:
    rows = freshness(RESULTS)
    assert [name for name, *_ in rows] == sorted(path.name for path in RESULTS.iterdir())
    assert all(state.startswith(("older than ", "as measured", "unknown")) for *_, state in rows)


def test_the_command_checks_and_writes_all_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="machines that measure need none")
    assert report(["--check"]) == 0
    assert "no page changed" in capsys.readouterr().out
    assert report(["--kernels", str(tmp_path / "all.md")]) == 0
    assert "## rms_norm\n" in (tmp_path / "all.md").read_text()
    assert (tmp_path / "all.png").is_file()


def test_the_suites_measure_what_the_pages_show_in_25_minutes(tmp_path: Path) -> None:
    assert sum(suite.limit_s for suite in SUITES.values()) <= 25 * 60
    text = "".join((ROOT / name).read_text() for name in PAGES)
    shown = {
        name for marker in re.findall(r"<!-- bench:\S+ (.*?) -->", text) for name in marker.split()
    }
    measured = {Path(name).stem for name in {**SUITES, **ON_REQUEST}}
    assert shown - measured == {"passes-llama3-8b-fp8_static-gated"}  # of a pass that is gone
    assert {"peers"} <= {Path(name).stem for name in SUITES}, "README's"
    write_models(tmp_path)
    for name, suite in {**SUITES, **ON_REQUEST}.items():
        for each in suite.commands:
            words = command(each, tmp_path, tmp_path / name)
            assert words[1:2] == ["-m"] and words[-2:] == ["--output", str(tmp_path / name)]
            assert "{" not in shlex.join(words)
            if words[2] == "fusewright.serve.cli":
                assert main([*words[3:], "--help"]) == 0, each


def test_measuring_without_git_needs_the_commit(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-P",
        "-m",
        "fusewright.benchmarks.evidence",
        "--results",
        str(tmp_path),
    ]
    env = {**os.environ, "GIT_DIR": str(tmp_path / "nowhere")}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "give it by --commit" in done.stderr
    assert not [*tmp_path.iterdir()]


def test_every_table_is_on_a_page() -> None:
    text = "".join((ROOT / name).read_text() for name in PAGES)
    assert set(TABLES) == set(re.findall(r"<!-- bench:(\S+) ", text))


@pytest.mark.slow
def test_a_suite_leaves_a_result_that_a_page_can_show(tmp_path: Path) -> None:
    models, results = tmp_path / "models", tmp_path / "results"
    models.mkdir()
    results.mkdir()
    # So many tokens that a pause of the machine is not longer than all behind the first.
    flags = "-O0 --device cpu --max-model-len 64 --input-len 4 --output-len 50 --repeats 2"
    suite = Suite((f"serve.cli bench latency abacus {flags}",), limit_s=600)
    measure("small.json", suite, models, results, unknown=None)
    text = render(page("latency small"), results)
    assert "| abacus `-O0` |" in text and "n = 2, spread up to" in text
    ((_, commit, _, state),) = freshness(results)
    assert commit in text and state == "as measured"


def test_a_suite_that_fails_leaves_the_older_result(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("older")
    suite = Suite(("serve.cli bench latency /nope",), limit_s=600)
    with pytest.raises(UserError, match=r"a\.json: `serve.* ended with exit code 2"):
        measure("a.json", suite, tmp_path, tmp_path, unknown=None)
    with pytest.raises(UserError, match=r"a\.json: ended at its limit of 0 s"):
        measure("a.json", Suite(suite.commands, limit_s=0), tmp_path, tmp_path, unknown=None)
    assert (tmp_path / "a.json").read_text() == "older"
