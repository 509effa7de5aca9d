"""Claims about the commands that measure: numbers that measure nothing are refused, defaults fit
the bundled model, `--json` prints one object and `--output` writes a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fusewright.bench.workloads import fitting, mix
from fusewright.config.gates import Measured
from fusewright.serve.cli import main
from fusewright.serve.measure.bench_passes import passes_table

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("bench latency --batch-size 0", "batch_size=0: expected at least 1"),
        (
            "bench latency --batch-size nan",
            "'--batch-size': 'nan': Input should be a valid integer",
        ),
        ("bench latency --batch-size 1 --batch-size -2", "batch_size=-2: expected at least 1"),
        ("bench latency --batch-size 99999999", "batch_size=99999999: expected at most 100000"),
        (
            "bench latency --acceptance 0.8,x",
            "acceptance=0.8,x: 'x' is none; expected",
        ),
        ("bench latency --acceptance 1.5", "acceptance=1.5: '1.5' is none"),
        (
            "bench serve --acceptance 0.5 --base-url http://x",
            "acceptance: is of a server that is started",
        ),
        (
            "bench latency --acceptance 0.5,0.4 --spec-k 3 --spec-method ngram",
            "num_speculative_tokens=3 contradicts 2",
        ),
        ("bench latency --spec-method eagle3", "num_speculative_tokens=None: expected how many"),
        ("bench latency --input-len 0", "input_len=0: expected at least 1"),
        ("bench latency --input-len 99999999999", "input_len=99999999999: expected at most"),
        ("bench latency --output-len 1", "output_len=1: expected at least 2"),
        ("bench latency --repeats 0", "repeats=0: expected at least 1"),
        ("bench latency --compare a b --threshold nan", "threshold=nan: expected a number above"),
        ("bench latency --compare a b --threshold 0", "threshold=0.0: expected a number above 0"),
        ("bench latency --output /nowhere/x", "output=/nowhere/x: cannot be written"),
        ("bench latency --output /tmp", "output=/tmp: is a folder"),
        ("bench latency --json x.json", "--output FILE writes the result, --json prints it"),
        ("bench passes --json x.json", "--output FILE writes the result, --json prints it"),
        ("bench startup /nope", "model '/nope': not there"),
        ("bench growth -O7", "optimization_level=7: expected 0, 1, 2 or 3"),
        ("bench latency --compare a b --json", "--json: --compare measures nothing"),
        ("bench throughput --compare a b --output x", "--output: --compare measures nothing"),
        ("bench passes --read a --json", "--json: --read measures nothing"),
        ("bench kernels --compare a b --output x", "--output: --compare measures nothing"),
        ("bench throughput --repeats 0", "repeats=0: expected at least 1"),
        ("bench throughput --workload chat", "No such option: --workload"),
        ("bench throughput --output-len 4", "output_len=4: requests of the data set chat have"),
        ("tune serve --goodput ttft:1 --input-len 4", "input_len=4: requests of the data set"),
        ("bench serve --dataset jsonl --input-len 4", "data set jsonl have lengths of their own"),
        ("bench throughput --dataset random --output-len 0", "output_len=0: expected at least 1"),
        ("bench throughput --dataset poems", "dataset=poems: expected one of chat, prefill-heavy"),
        ("bench throughput --dataset-name custom", "dataset=jsonl: give its file with --dataset"),
        ("bench latency --dataset-name random", "is --dataset here, which this command does not"),
        ("bench serve --port 8000", "port='8000': give --base-url http://HOST:PORT"),
        ("bench serve --base-url http://x", "base_url: name the model that the server has too"),
        ("bench latency --save-result", "save_result=True: give --output FILE"),
        ("bench serve --burstiness 0", "burstiness=0.0: expected more than 0; inf is constant"),
        ("bench throughput --num-prompts 0", "num_prompts=0: expected at least 1"),
        ("bench throughput --request-rate nan", "request_rate=nan: expected more than 0"),
        ("bench throughput --request-rate -1", "request_rate=-1.0: expected more than 0"),
        ("bench throughput --goodput ttft:nan", "goodput='ttft:nan': expected a measure"),
        ("bench throughput --goodput ttft:-5", "goodput='ttft:-5': expected a measure"),
        ("bench throughput --async --goodput ttft:5", "--goodput says nothing of --async"),
        ("bench growth --steps 1", "steps=1: expected at least 2"),
        ("bench growth --context 64 --context 0", "context=0: expected at least 1"),
        ("bench growth --requests -1", "requests=-1: expected at least 1"),
        ("bench prefix --prefix-len 0", "prefix_len=0: expected at least 1"),
        ("bench prefix --output-len -1", "output_len=-1: expected at least 1"),
        ("bench passes --batch-size 0", "batch_size=0: expected at least 1"),
        ("bench passes --input-len 0", "input_len=0: expected at least 1"),
        ("bench startup --iterations 0", "iterations=0: expected at least 1"),
        ("bench kernels --threshold nan", "threshold=nan: expected a number above 0"),
        ("explain --batch 0", "batch=0: expected at least 1"),
        ("explain --context -1", "context=-1: expected at least 1"),
        ("explain --against -O9", "against=-O9: expected a level"),
        ("bisect --tolerance inf", "tolerance=inf: expected a number above 0"),
        ("bisect --tolerance nan", "tolerance=nan: expected a number above 0"),
        ("profile --output /tmp/x --batch-size 0", "batch_size=0: expected at least 1"),
        ("profile --output /tmp/x --delay-iterations -1", "delay_iterations=-1: expected at least"),
        ("profile --output /tmp/x --output-len 99999999999", "output_len=99999999999: expected at"),
    ],
)
def test_a_number_that_measures_nothing_is_refused(line: str, told: str, capsys: Capture) -> None:
    assert main(line.split()) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert told in said.err
    assert (said.out, said.err.count("\n")) == ("", 1)


def test_lengths_are_scaled_until_the_longest_request_fits() -> None:
    works = mix("chat", 200, 99)
    scaled, scale = fitting(works, 512)
    sums = [len(work.prompt_token_ids) + work.output_len for work in scaled]
    assert 500 < max(sums) <= 512
    for work, before in zip(scaled, works, strict=True):
        assert len(work.prompt_token_ids) == max(1, int(len(before.prompt_token_ids) * scale))
        assert work.prompt_token_ids == before.prompt_token_ids[: len(work.prompt_token_ids)]
    assert fitting(works, 10_000) == (works, 1.0)


@pytest.mark.product(2, of="commands that measure")
def test_benches_run_on_the_bundled_model_with_default_lengths(
    tmp_path: Path, capsys: Capture
) -> None:
    common = ["-O0", "--device", "cpu", "--max-model-len", "64", "--num-prompts", "3", "--json"]
    output = tmp_path / "t.json"
    assert main(["bench", "throughput", *common, "--output", str(output)]) == 0
    said = capsys.readouterr()
    record = json.loads(said.out)
    assert json.loads(output.read_text())["rows"] == record["rows"]
    assert record["rows"][0]["workload"] == "chat"
    assert "chat: all lengths are multiplied by 0." in said.err
    assert main(["bench", "prefix", *common]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["prefix_len"] == 64 - 32 - 16
    assert "a prefix of 16 tokens: more do not fit" in said.err
    small = ["--max-model-len", "256", "--batch-size", "1", "--requests", "1", "--steps", "2"]
    assert main(["bench", "growth", *common[:3], *small, "--json"]) == 0
    said = capsys.readouterr()
    record = json.loads(said.out)
    assert [row["context"] for row in record["context"]] == [128]
    assert record["skipped"] == []
    assert "contexts of 256 tokens and more do not fit" in said.err


def test_a_cpu_gives_figures_and_no_verdict() -> None:
    about = {"dtype": "bfloat16", "gpu": "x", "model": "m", "commit": "c", "source": "s"}
    ms = {"on_ms": {"decode 1": 2.0}, "off_ms": {"decode 1": 1.0}, "noise": {"decode 1": 0.0}}
    rows = [Measured(name="fuse_act", sm=sm, **about, **ms) for sm in (0, 90)]  # type: ignore[arg-type]
    cpu, gpu = passes_table(rows).splitlines()[2:]
    assert cpu.endswith("no verdict: a CPU")
    assert gpu.endswith("off")


@pytest.mark.parametrize("command", ["run", "explain", "bench latency", "bench passes", "compile"])
def test_help_names_the_default_model(command: str, capsys: Capture) -> None:
    assert main([*command.split(), "--help"]) == 0
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("  MODEL "))
    assert line.endswith("[default: abacus]")


def test_levels_are_printed_as_json(capsys: Capture) -> None:
    assert main(["explain", "--levels", "--json"]) == 0
    levels = json.loads(capsys.readouterr().out)
    assert [levels[f"-O{number}"]["trace"] for number in range(4)] == [False, True, True, True]


def test_explain_takes_the_model_that_its_help_names(capsys: Capture) -> None:
    assert main(["explain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["label"].startswith("LlamaForCausalLM, 5 layers")
