"""Limits stand beside what was measured of the same steps, and are drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusewright import LLM
from fusewright.bench.limits.beside import LAUNCH_US, Beside, measure_here, on_gpu, read_measured
from fusewright.bench.serving import Run
from fusewright.bench.workloads import Work as Request, tpot_ms
from fusewright.compiler.inspect.limits import StepSize, StepWork, Work, limit_of
from fusewright.config import UserError
from fusewright.config.device_table import Ceilings
from fusewright.engine.frontend.loop import EngineLoop
from fusewright.model_executor.abacus import FOLDER as ABACUS
from fusewright.serve.cli import main
from tests.engine.toy import Setup

GPU = Ceilings("a GPU", 1.0, 10.0, 20.0)
RESULT: dict[str, Any] = {
    "environment": {"device": "NVIDIA H200"},
    "options": {"model": "elsewhere/llama", "quantization": "fp8"},
    "rows": [
        {"batch": 64, "input_len": 128, "output_len": 129, "tpot_ms": 5.0, "ttft_ms": 180.0},
        {"batch": 1, "input_len": 128, "output_len": 129, "tpot_ms": 3.6, "ttft_ms": 5.4},
    ],
}


def written(folder: Path, *records: dict[str, Any]) -> Path:
    path = folder / "latency.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_result_of_latency_gives_the_steps_that_it_measured(tmp_path: Path) -> None:
    measured = read_measured(written(tmp_path, RESULT), {"quantization": "fp8", "model": "here"})
    assert measured.gpu == "NVIDIA H200"
    assert list(measured.ms.items()) == [
        (StepSize(1, 1, 192), 3.6),
        (StepSize(64, 1, 192), 5.0),
        (StepSize(1, 128, 128), 5.4),
        (StepSize(64, 128, 128), 180.0),
    ]


@pytest.mark.parametrize(
    ("records", "options", "said"),
    [
        ([RESULT], {}, "measured with quantization=fp8, asked is quantization=None; give the same"),
        (
            [RESULT, RESULT | {"environment": {"device": "NVIDIA H100"}}],
            {"quantization": "fp8"},
            "measured on NVIDIA H100 and NVIDIA H200; give one GPU's result",
        ),
        ([{"rows": []}], {}, "bench latency` with --output: it has no 'options'"),
    ],
)
def test_results_of_other_settings_are_refused(
    tmp_path: Path, records: list[dict[str, Any]], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        read_measured(written(tmp_path, *records), options)


def test_steps_are_timed_as_bench_latency_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusewright.bench import latency

    def timed(engine: EngineLoop, works: Sequence[Request]) -> Run:
        """2 ms for a batch's first tokens and 1 ms for each further one, however busy this is."""
        return replace(run(engine, works), seconds=(1 + works[0].output_len) / 1e3)

    run = latency.run
    monkeypatch.setattr(latency, "run", timed)
    with LLM("abacus", optimization_level=0, device="cpu", max_num_seqs=4) as llm:
        measured = measure_here(llm, [2], input_len=32, output_len=4, repeats=1)
    assert measured.ms == {StepSize(2, 1, 34): 1.0, StepSize(2, 32, 32): 2.0}


def test_tokens_that_took_no_time_are_no_measurement() -> None:
    assert tpot_ms(0.4, 0.1, 4) == 100
    with pytest.raises(UserError, match=r"4 tokens took 204\.7 ms and one took 220\.7"):
        tpot_ms(0.2047, 0.2207, 4)


def test_first_tokens_that_took_longer_than_all_are_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine that is busy in the first three runs, and one that always is."""
    from fusewright.bench import latency

    def timed(engine: EngineLoop, works: Sequence[Request]) -> Run:
        firsts.append(works[0].output_len == 1)
        is_held_up = firsts[-1] and sum(firsts) <= num_busy
        return Run(0.5 if is_held_up else works[0].output_len / 1e3, 0, 0, [])

    monkeypatch.setattr(latency, "run", timed)
    llm = LLM.from_engine(Setup().engine())
    firsts, num_busy = list[bool](), 3
    found = latency.measure_latency(llm, 2, input_len=3, output_len=5)
    assert (found["n"], found["tpot_ms"], found["ttft_ms"]) == (4, 1.0, 1.0)
    firsts, num_busy = [], 10**6
    with pytest.raises(UserError, match="something else keeps this machine busy"):
        latency.measure_latency(llm, 2, input_len=3, output_len=5)


def test_a_difference_is_split_into_launches_and_the_rest() -> None:
    step = StepSize(8, 1, 192)
    limit = limit_of(StepWork(step, (Work("linears", 4e9, 1e9, False),), 200, 0), GPU)
    beside = Beside(limit, 5.0)
    assert (beside.of_limit, beside.difference_ms) == (0.8, 1.0)
    assert beside.launches_ms == pytest.approx(200 * LAUNCH_US / 1e3)
    assert Beside(limit).to_json().keys() < beside.to_json().keys()
    unknown = limit_of(StepWork(step, (), None, 1), GPU)
    assert Beside(unknown, 1.0).launches_ms is None


def test_limits_are_drawn_with_what_was_measured() -> None:
    pytest.importorskip("matplotlib")
    from fusewright.bench.plots import picture
    from tests.bench.test_plots import assert_readable

    decode, prefill = StepSize(8, 1, 192), StepSize(8, 128, 128)
    work = (Work("linears", 4e9, 1e9, False), Work("sampling", 1e6, 0, False))
    works = [StepWork(decode, work, 200, 0), StepWork(prefill, work, 200, 0)]
    limits = [on_gpu(GPU, works, {decode: 5.0}).to_json()]
    described = picture({"a": {"options": {"model": "m"}, "environment": {}, "limits": limits}})
    bounds = ["all bytes", "all arithmetic", "limit", "linears"]
    assert [[line.label for line in panel.lines] for panel in described.panels] == [
        ["measured", *bounds],
        bounds,
    ]
    assert_readable(described)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "limits: there is no GPU here; name one by --gpu, of NVIDIA H100 80GB HBM3, NVIDIA H"),
        (["--gpu", "B200"], "gpu=B200: no device table has the ceilings of such a GPU; there are"),
        (["--gpu", "H200", "--target-sm", "80"], "gpu=H200, target_sm=80: no device table has"),
        (["--target-sm", "80"], "target_sm=80: no device table has the ceilings of such a GPU"),
        (["--gpu", "h200", "-O0"], "limits: -O0 compiles nothing; use -O1 or higher"),
        (["--gpu", "h200", "--dtype", "float32"], "dtype=float32: the rates of a GPU are known fo"),
        (["--batch-size", "0"], "batch_size=0: expected at least 1"),
        (
            ["--prefill", "100", "--input-len", "64"],
            "prefill=100: expected a multiple of 64, the tokens of",
        ),
        (["--batch-size", "1", "--measured", "F"], "batch_size: the steps are those of --measured"),
        (["--measured", "F", "--measure"], "measure: the steps are those of --measured; give one"),
        (["--measure", "--context", "64"], "context: --measure has steps of its own; give --bat"),
        (["--measure", "--target-sm", "90"], "target_sm: --measure is for the GPU here; drop one"),
        (["--measure", "--batch-size", "1"], "measure: there is no GPU here; keep a result of b"),
        (["--measured", "/absent.json"], "cannot read /absent.json: No such file or directory"),
    ],
)
def test_what_has_no_limit_is_refused_in_one_line(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "limits", *flags]) == 2
    out, err = capsys.readouterr()
    assert said in " ".join(err.split()) and not out, err


def test_the_command_prints_a_table_a_gpu_and_keeps_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "limits.json"
    flags = ["--target-sm", "90", "--batch-size", "1", "--prefill", "256", "--dtype", "bfloat16"]
    assert main(["bench", "limits", str(ABACUS), *flags, "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert "NVIDIA H200: copies 4.28 TB/s, multiplies 790 TFLOP/s in 16 bits" in out
    assert "decode 1 " in out and "prefill 256 (2 x 128)" in out
    record = json.loads(output.read_text())
    assert [gpu["gpu"] for gpu in record["limits"]] == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    for gpu in record["limits"]:
        for step in gpu["steps"]:
            families = step["families"].values()
            assert step["limit_ms"] == pytest.approx(sum(each["ms"] for each in families))
            assert step["bytes_ms"] == pytest.approx(step["bytes"] / gpu["copy_tb_s"] / 1e9)
