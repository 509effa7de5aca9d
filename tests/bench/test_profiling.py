"""``fusewright profile`` records steady steps; its tables add up, whatever ran them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from fusewright.bench.profile_options import ProfileOptions
from fusewright.bench.profile_trace import (
    Period,
    busy_times,
    find_repeat,
    kernel_rows,
    layer_groups,
    read_trace,
)
from fusewright.bench.profiling import CPU_PARTS, profile_phase, timeline
from fusewright.config import UserError
from fusewright.engine.llm import LLM
from fusewright.serve.cli import main

Capture = pytest.CaptureFixture[str]
Event = dict[str, Any]
LAYER = ["norm", "gemm", "attention", "gemm"]


def span(category: str, name: str, start: float, us: float, **args: Any) -> Event:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": us,
        "tid": 1,
        "args": args,
    }


def gpu_trace(num_layers: int = 3, steps: int = 2) -> list[Event]:
    """Each step launches one graph at 1000 n; it runs after the call returned, 10 us a kernel, with
    a gap of 5 before its last kernel."""
    events: list[Event] = [span("kernel", "stray", 5, 1, correlation=99)]
    events.append(span("cuda_runtime", "cudaLaunchKernel", 1, 1, correlation=99))
    for n in range(1, steps + 1):
        start = 1000.0 * n
        events.append(span("user_annotation", f"step {n}", start, 50))
        events.append(span("gpu_user_annotation", f"step {n}", start + 100, 400))
        events.append(span("cuda_runtime", "cudaGraphLaunch", start + 10, 28, correlation=n))
        names = ["embed", *LAYER * num_layers, "head"]
        for place, name in enumerate(names):
            at = start + 100 + 10 * place + (5 if name == "head" else 0)
            events.append(span("kernel", name, at, 10, correlation=n, grid=[1, 1, 1], block=[32]))
    return events


def test_kernels_of_a_graph_belong_to_the_step_that_launched_it() -> None:
    found = read_trace(gpu_trace(), [1, 2])
    assert [a.step for a in found] == [1] * 14 + [2] * 14
    assert sum(a.cpu_us for a in found if a.step == 1) == pytest.approx(28)
    assert {a.name for a in read_trace(gpu_trace(), [2])} == {"embed", *LAYER, "head"}
    assert len(read_trace(gpu_trace(), [2])) == 14


def test_a_kernel_without_a_known_launch_follows_the_one_before() -> None:
    events = [e for e in gpu_trace() if e["cat"] != "cuda_runtime" or e["ts"] < 2000]
    found = read_trace([*events, span("gpu_memcpy", "copy", 1300, 2)], [1, 2])
    assert [a.name for a in found if a.step == 1].count("copy") == 1


def test_layers_are_told_from_what_runs_once_though_names_recur() -> None:
    names = ["embed", *LAYER * 3, "gemm"]
    assert find_repeat(names, 3) == Period(1, 13, 4)
    last_differs = ["embed", *LAYER, *LAYER, "norm", "gemm", "other", "gemm"]
    assert find_repeat(last_differs, 3) == Period(1, 11, 4)
    assert find_repeat(["a", "b", "c", "d", "e", "f"], 3) is None
    activities = read_trace(gpu_trace(), [1, 2])
    groups = layer_groups(activities, 2, 3)
    assert groups["pattern"] == LAYER and groups["us_a_layer"] == pytest.approx(40)
    inside = {row["kernel"]: row["calls_a_layer"] for row in groups["in_layers"]["rows"]}
    assert inside == {"norm": 1, "gemm": 2, "attention": 1}
    assert {row["kernel"] for row in groups["once_a_step"]["rows"]} == {"embed", "head"}
    assert groups["in_layers"]["share"] + groups["once_a_step"]["share"] == pytest.approx(1)


def test_without_a_pattern_counts_tell_what_is_in_the_layers() -> None:
    names = ["x", "b", "a", "head", "a", "b", "y", "b", "a"]
    events = [span("user_annotation", "step 0", 0, 1000)]
    events += [span("cpu_op", name, 10.0 * n, 5) for n, name in enumerate(names, 1)]
    groups = layer_groups(read_trace(events, [0]), 1, 3)
    assert groups["pattern"] is None
    assert {row["kernel"] for row in groups["in_layers"]["rows"]} == {"a", "b"}


def test_busy_time_counts_what_overlaps_once_and_tells_both_kinds_of_idle() -> None:
    events = gpu_trace()
    events.append(span("gpu_memcpy", "beside", 1100, 15, correlation=1))
    busy = busy_times(read_trace(events, [1, 2]))
    assert busy[1] == {"busy": 140, "idle_inside": 5, "idle_before": 0}
    assert busy[2] == {"busy": 140, "idle_inside": 5, "idle_before": 2100 - 1245}


def test_operators_count_without_those_they_call() -> None:
    events = [span("user_annotation", "step 0", 0, 100)]
    events += [span("cpu_op", "outer", 10, 50), span("cpu_op", "inner", 20, 30)]
    rows = {r["kernel"]: r["us_a_step"] for r in kernel_rows(read_trace(events, [0]), 1, 1)}
    assert rows == {"outer": 20, "inner": 30}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        "abacus", optimization_level=0, dtype="float32", device="cpu", enable_prefix_caching=False
    )


def test_delay_and_most_steps_are_kept(llm: LLM, tmp_path: Path) -> None:
    first = None
    for delay in (0, 5):
        options = ProfileOptions("decode", 3, 8, 30, delay_iterations=delay, max_iterations=4)
        found = profile_phase(llm, options, tmp_path / "trace.json")
        assert len(found.steps) == len(found.undisturbed) == 4
        assert all(step.num_seqs == step.num_tokens == 3 for step in found.steps)
        first = found.steps[0].index if first is None else first
        assert found.steps[0].index == first + delay
        assert {a.step for a in found.activities} == {step.index for step in found.steps}
        assert not llm.engine.has_unfinished()
    assert "step" not in vars(llm.engine) and "schedule" not in vars(llm.engine.core.scheduler)


def test_decode_ends_where_requests_do(llm: LLM, tmp_path: Path) -> None:
    options = ProfileOptions("decode", 2, 8, 10, delay_iterations=3, max_iterations=50)
    found = profile_phase(llm, options, tmp_path / "trace.json")
    assert len(found.steps) == 10 - 1 - 3


def test_prefill_goes_on_with_new_prompts(llm: LLM, tmp_path: Path) -> None:
    options = ProfileOptions("prefill", 2, 12, 2, delay_iterations=2, max_iterations=5)
    found = profile_phase(llm, options, tmp_path / "trace.json")
    assert [step.num_prompt_tokens for step in found.steps] == [24] * 5
    line = timeline(found)
    assert line["num_steps"] == 5 and set(line["median"]["cpu_us"]) == set(CPU_PARTS)
    assert 0 <= line["idle_share"] < 1
    for step in line["steps"]:
        assert step["wall_us"] == pytest.approx(sum(step["cpu_us"].values()))
        assert 0 < step["busy_us"] + step["idle_inside_us"] <= step["wall_us"]


@pytest.mark.parametrize("level", ["-O0", pytest.param("-O2", marks=pytest.mark.thorough)])
def test_the_command_leaves_files_that_agree(level: str, tmp_path: Path, capsys: Capture) -> None:
    sizes = ["--batch-size", "2", "--input-len", "8", "--output-len", "20", "--dtype", "float32"]
    steps = ["--delay-iterations", "1", "--max-iterations", "3", "--phase", "both"]
    flags = [*sizes, *steps, "--record-shapes", "--device", "cpu"]
    assert main(["profile", "abacus", level, *flags, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "in the layers" in printed and "idle" in printed
    for phase in ("prefill", "decode"):
        folder = tmp_path / phase
        kernels, layers, line, trace = (
            json.loads((folder / f"{name}.json").read_text())
            for name in ("kernels", "layers", "timeline", "trace")
        )
        assert sum(row["share"] for row in kernels["rows"]) == pytest.approx(1)
        attention = [r for r in layers["in_layers"]["rows"] if "paged_attention" in r["kernel"]]
        assert [row["calls_a_layer"] for row in attention] == [1]
        assert layers["pattern"] and layers["num_layers"] == 5
        assert kernels["num_steps"] == line["num_steps"] == len(line["steps"]) == 3
        total = sum(row["us_a_step"] for row in kernels["rows"])
        grouped = sum(layers[name]["us_a_step"] for name in ("in_layers", "once_a_step"))
        assert grouped == pytest.approx(total)
        with (folder / "kernels.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["kernel"] for row in rows] == [row["kernel"] for row in kernels["rows"]]
        assert any(row["shapes"] for row in rows)
        steps_seen = [e for e in trace["traceEvents"] if str(e.get("name")).startswith("step ")]
        assert len(steps_seen) >= 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch-size", "0"], "batch_size=0: expected at least 1"),
        (["--max-iterations", "0"], "max_iterations=0: expected at least 1"),
        (["--delay-iterations", "-1"], "delay_iterations=-1: expected at least 0"),
        (["--delay-iterations", "30", "--output-len", "20"], "skips all decode steps"),
        (["--phase", "warm"], "expected prefill, decode or both"),
    ],
)
def test_values_that_profile_nothing_are_refused(
    flags: list[str], message: str, tmp_path: Path, capsys: Capture
) -> None:
    assert main(["profile", "abacus", "-O0", *flags, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")
    assert main(["profile", "abacus", "-O0", "--output", str(tmp_path / "file" / "x")]) == 2
    assert "give a folder to write to" in capsys.readouterr().err


def test_a_phase_is_found_with_chunks_and_cached_prefixes(tmp_path: Path) -> None:
    limits = {"max_num_batched_tokens": 16, "max_num_seqs": 3}  # no prompts beside the last ones
    llm = LLM("abacus", optimization_level=0, device="cpu", **limits)
    assert llm.engine.core.scheduler.prefix_caching
    options = ProfileOptions("decode", 3, 40, 30, delay_iterations=0, max_iterations=4)
    found = profile_phase(llm, options, tmp_path / "trace.json")
    assert [step.num_prompt_tokens for step in found.steps] == [0] * 4
    options = ProfileOptions("prefill", 3, 40, 2, delay_iterations=8, max_iterations=6)
    steps = profile_phase(llm, options, tmp_path / "trace.json").steps
    assert all(0 < step.num_prompt_tokens <= 16 for step in steps)
    options = ProfileOptions("prefill", 3, 5, 2, delay_iterations=1, max_iterations=3)
    steps = profile_phase(llm, options, tmp_path / "trace.json").steps
    assert [step.num_prompt_tokens for step in steps] == [15] * 3
    assert [step.index for step in steps] == [2, 4, 6]  # no room for prompts before the last end


@pytest.mark.gpu
def test_kernels_are_recorded_as_graphs_replay(tmp_path: Path, capsys: Capture) -> None:
    sizes = ["--batch-size", "2", "--output-len", "40", "--max-iterations", "4"]
    flags = [*sizes, "--cudagraph-capture-sizes", "2", "--output", str(tmp_path)]
    assert main(["profile", "abacus", "-O2", *flags]) == 0
    assert "GPU busy" in capsys.readouterr().out
    line, layers, trace = (
        json.loads((tmp_path / f"{name}.json").read_text())
        for name in ("timeline", "layers", "trace")
    )
    assert any(event.get("name") == "cudaGraphLaunch" for event in trace["traceEvents"])
    assert [step["num_seqs"] for step in line["steps"]] == [2] * 4
    assert all(step["busy_us"] > 0 for step in line["steps"])
    shares = [layers[group]["share"] for group in ("in_layers", "once_a_step")]
    assert sum(shares) == pytest.approx(1) and shares[0] > shares[1]


def test_requests_that_do_not_fit_are_refused(llm: LLM, tmp_path: Path) -> None:
    for options, message in (
        (ProfileOptions("decode", batch_size=100_000), "max_num_seqs=.* profiling needs 100000"),
        (ProfileOptions("decode", input_len=100_000), "max_model_len=.* profiling needs 100128"),
    ):
        with pytest.raises(UserError, match=message):
            profile_phase(llm, options, tmp_path / "trace.json")
