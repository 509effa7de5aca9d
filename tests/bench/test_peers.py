"""``benchmarks.peers`` by our own engine; the other adapters need their engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fusewright.model_executor.abacus import FOLDER

pytestmark = pytest.mark.usefixtures("warm")
ROOT = Path(__file__).resolve().parents[2]
FIRST_RUN = ROOT / "bench" / "results" / "h200" / "peers.jsonl"


def peers(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "fusewright.benchmarks.peers", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.product(2, of="commands that measure")
@pytest.mark.slow
def test_our_engine_leaves_a_result_like_those_of_the_first_run(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text('{"engine": "another"}\n')
    small = ["--batch", "2:40", "--requests", "1", "--repeats", "1", "--max-model-len", "512"]
    small += ["--throughput", "tput_sampled"]
    done = peers("fusewright", str(FOLDER), "--output", str(file), *small)
    assert done.returncode == 0, done.stderr
    kept, line = file.read_text().splitlines()
    assert kept == '{"engine": "another"}'
    record = json.loads(line)
    known = {key for first in FIRST_RUN.read_text().splitlines() for key in json.loads(first)}
    unlike = {"tput_sharegpt", "tput_prefill", "tput_decode"}
    assert set(record) == known - unlike | {"n", "spread"}
    assert (record["n"], record["spread"]) == (1, 0.0)
    assert {"commit", "date", "sources"} <= set(record["environment"])
    assert record["engine"].startswith("fusewright ") and record["model"] == "abacus"
    assert list(record["tpot_ms"]) == list(record["ttft_ms"]) == ["2:40"]
    assert all(v > 0 for name in ("tpot_ms", "ttft_ms") for v in record[name].values())
    assert set(record["tput_sampled"]) == {"req_s", "out_tok_s"}
    assert record["tput_sampled"]["req_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("vllm", str(FOLDER)),
            "vllm is not installed in this Python; run this in an environment that has it",
        ),
        (("fusewright", "/nope"), "/nope/config.json: expected a file with a vocab_size"),
        (
            ("fusewright", str(FOLDER), "--batch", "1:x"),
            "batch '1:x': expected a number, or batch:context as 17:3000",
        ),
        (
            ("fusewright", str(FOLDER), "--max-model-len", "512"),
            "--max-model-len 512: the work has requests of 3129 tokens",
        ),
        (("fusewright", str(FOLDER), "--repeats", "0"), "repeats=0: expected at least 1"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    done = peers(*arguments, "--output", str(tmp_path / "results.jsonl"))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"peers: {message}")
    assert not [*tmp_path.iterdir()], "nothing is measured, so nothing is left"
