"""``bench growth`` and ``prefix`` measure what they say, ``--compare`` finds what got slower."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fusewright import LLM
from fusewright.bench.cases import (
    bytes_to_read,
    measure_context,
    measure_prefix,
    pretend_computed,
    shared_prefix,
)
from fusewright.bench.compare import compare
from fusewright.bench.workloads import equal
from fusewright.config import UserError
from fusewright.engine.engine import Engine
from fusewright.serve.cli import main
from tests.engine.toy import Setup


@pytest.fixture(scope="module")
def engine(device: torch.device) -> Engine:
    made = LLM("abacus", optimization_level=0, device=device.type, max_num_seqs=4).engine
    assert isinstance(made, Engine)
    return made


def test_contexts_are_there_without_being_computed(engine: Engine) -> None:
    works = equal(3, 100, 5, engine.inputs.vocab_size)
    pretend_computed(engine, works)
    scheduler = engine.core.scheduler
    assert scheduler.pool.num_cached == 3 * (100 // 16)
    before = scheduler.num_prefix_hits
    row = measure_context(engine, 3, 100, 4)
    assert scheduler.num_prefix_hits - before == 3 * (99 // 16) * 16
    assert row["tpot_ms"] > 0 and row["gigabytes"] == round(bytes_to_read(engine, 3, 102) / 1e9, 3)


def test_bytes_are_those_of_weights_and_contexts(engine: Engine) -> None:
    spec = engine.spec
    per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
    assert bytes_to_read(engine, 2, 64) - bytes_to_read(engine, 2, 32) == 2 * 32 * per_token
    assert bytes_to_read(engine, 1, 0) <= engine.memory().weights


def test_contexts_that_do_not_fit_are_refused(engine: Engine) -> None:
    with pytest.raises(UserError, match="KV blocks are needed, the cache has"):
        pretend_computed(engine, equal(4, 10 * 16 * engine.core.scheduler.pool.num_blocks, 1, 50))


def test_requests_of_one_prefix_skip_it_and_answer_alike() -> None:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    made = Setup(num_blocks=64, prefix_caching=True, **sizes).engine()
    found = measure_prefix(made, 6, prefix_len=40, input_len=5, output_len=4)
    assert found["identical"] == 6 and [r["prefix"] for r in found["rows"]] == [
        "without",
        "cold",
        "cached",
    ]
    assert made.core.scheduler.num_prefix_hits > 0 and made.core.scheduler.prefix_caching
    works = shared_prefix(3, 7, 2, 1, 100)
    assert len({tuple(w.prompt_token_ids[:7]) for w in works}) == 1
    assert len({tuple(w.prompt_token_ids) for w in works}) == 3


def result(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"rows": rows}))
    return path


def test_a_comparison_names_what_is_slower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = {"batch": 1, "input_len": 128, "output_len": 129}
    old = result(tmp_path / "old", [{**work, "tpot_ms": 4.0, "ttft_ms": 6.0}])
    new = result(tmp_path / "new", [{**work, "tpot_ms": 4.6, "ttft_ms": 5.0}])
    argv = ["bench", "latency", "--compare", str(old), str(new)]
    assert main(argv) == 1
    said = capsys.readouterr().out
    assert "batch 1, input_len 128, output_len 129  tpot_ms  4.000  4.600  1.15" in said
    assert "2 in both: 1 slower, 1 faster by more than 5%" in said
    assert main([*argv, "--threshold", "0.3"]) == 0


def test_of_rates_less_is_slower(tmp_path: Path) -> None:
    def row(rate: float, ms: float) -> dict[str, Any]:
        return {"workload": "chat", "requests_per_s": rate, "tpot_ms": {"p50": ms, "mean": ms}}

    old = result(tmp_path / "old", [row(50.0, 10.0)])
    new = result(tmp_path / "new", [row(40.0, 9.0)])
    worst, best = compare(old, new)
    assert (worst.figure, worst.slower) == ("requests_per_s", 1.25)
    assert (best.figure, best.slower) == ("tpot_ms p50", 0.9)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"rows": 3}', '{"rows": [3]}'])
def test_what_is_no_result_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").write_text(text)
    argv = ["bench", "throughput", "--compare", str(tmp_path / "x"), str(tmp_path / "x")]
    assert main(argv) == 2
    assert "is not a result of `fusewright bench latency` or" in capsys.readouterr().err


@pytest.mark.product(2, of="commands that measure")
def test_the_commands_measure_and_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["abacus", "-O0", "--device", "cpu", "--max-num-seqs", "2"]
    sizes = ["--batch-size", "1", "--context", "32", "--requests", "2", "--requests", "3"]
    files = ["--output", str(tmp_path / "g.json"), "--plot", str(tmp_path / "g.png")]
    assert main(["bench", "growth", *common, *sizes, "--steps", "3", *files]) == 0
    record = json.loads((tmp_path / "g.json").read_text())
    assert [row["context"] for row in record["context"]] == [32]
    assert [row["requests"] for row in record["requests"]] == [2]
    assert not any("limit_ms" in row for row in record["context"]), "a GPU's, and this is a CPU"
    assert record["skipped"] == [{"requests": 3, "why": "max_num_seqs is 2"}]
    assert (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")
    lengths = ["--num-prompts", "2", "--prefix-len", "40", "--input-len", "3", "--output-len", "2"]
    assert main(["bench", "prefix", *common, *lengths]) == 0
    assert "2 of 2 outputs identical" in capsys.readouterr().out
    few = ["--async", "--num-prompts", "2", "--max-model-len", "32", "--json"]
    assert main(["bench", "throughput", *common, *few]) == 0
    rows = json.loads(capsys.readouterr().out)["frontends"]
    assert [row["frontend"] for row in rows] == ["batch", "async", "async, final only"]
    assert all(row["output_tokens_per_s"] > 0 for row in rows) and rows[0]["of_batch"] == 1.0
