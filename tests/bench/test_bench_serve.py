"""Claims about ``bench serve``: requests come when they should, and every token is counted."""

from __future__ import annotations

import itertools
import json
import statistics
from math import inf
from pathlib import Path
from typing import Any

import pytest

from fusewright.bench.datasets import make_works
from fusewright.bench.http_load import HttpTarget, load
from fusewright.bench.http_server import flags_of, serving
from fusewright.bench.workloads import Work, arrivals
from fusewright.config import EngineOptions, MachineError, UserError
from fusewright.serve.cli import main

pytestmark = pytest.mark.usefixtures("warm_servers")
OPTIONS: dict[str, Any] = {"device": "cpu", "optimization_level": 0, "max_num_seqs": 4}


def gaps(burstiness: float) -> list[float]:
    times = arrivals(4000, 50.0, burstiness)
    return [b - a for a, b in itertools.pairwise(times)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_spread_of_their_distribution(burstiness: float) -> None:
    found = gaps(burstiness)
    assert statistics.mean(found) == pytest.approx(1 / 50, rel=0.15)
    spread = statistics.stdev(found) / statistics.mean(found)
    assert spread == pytest.approx(burstiness**-0.5, rel=0.15)


def test_arrivals_are_constant_or_all_at_once() -> None:
    assert gaps(inf) == pytest.approx([1 / 50] * 3999)
    assert arrivals(3, inf, 1.0) == [0.0] * 3


def test_flags_say_what_options_do() -> None:
    options = {"enable_prefix_caching": False, "passes": ("cleanup",), "max_num_seqs": 3}
    flags = ["--passes", "cleanup", "--max-num-seqs", "3", "--no-enable-prefix-caching"]
    assert flags_of(options) == flags


def works(name: str, **more: Any) -> list[Work]:
    given: dict[str, Any] = {"vocab_size": 100, "max_model_len": 64, "input_len": 20}
    return make_works(name, 5, **{**given, "output_len": 4, **more})[0]


def test_data_sets_have_requests_that_fit(tmp_path: Path) -> None:
    for name in ("chat", "random", "prefix"):
        assert all(len(w.prompt_token_ids) + w.output_len <= 64 for w in works(name))
    prompts = [w.prompt_token_ids for w in works("prefix")]
    assert len({tuple(ids[:16]) for ids in prompts}) == 1
    assert len({tuple(ids) for ids in prompts}) == 5
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"prompt": "abc", "max_tokens": 2}\n\n{"prompt": "d"}\n')
    turns = [{"from": "human", "value": "abc"}, {"from": "gpt", "value": "de"}]
    talk = tmp_path / "b.json"
    talk.write_text(json.dumps([{"conversations": turns}, {"conversations": []}]))

    def encode(text: str) -> list[int]:
        return [ord(each) for each in text]

    found = works("jsonl", file=lines, encode=encode)
    assert found == [Work([97, 98, 99], 2), Work([100], 4)]
    assert works("sharegpt", file=talk, encode=encode) == [Work([97, 98, 99], 2)]


def test_prompts_of_sonnet_share_their_first_lines_and_draw_the_others(tmp_path: Path) -> None:
    poem = tmp_path / "poem.txt"
    poem.write_text("\n".join(f"line {n:02}" for n in range(40)) + "\n\n")

    def encode(text: str) -> list[int]:
        return [ord(each) for each in text]

    found = works("sonnet", file=poem, encode=encode, input_len=150, max_model_len=200)
    prompts = ["".join(map(chr, work.prompt_token_ids)) for work in found]
    question, *lines = prompts[0].splitlines()
    assert all(prompt.startswith(f"{question}\n{lines[0]}\n{lines[1]}\n") for prompt in prompts)
    assert lines[:2] == ["line 00", "line 01"] and len(set(prompts)) == 5
    assert all(140 < len(prompt) <= 150 for prompt in prompts)
    with pytest.raises(UserError, match="input_len=60: the question of sonnet and a line"):
        works("sonnet", file=poem, encode=encode, input_len=60)


def test_a_data_set_without_its_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--dataset-path"):
        works("sharegpt")
    with pytest.raises(UserError, match="expected one of chat"):
        works("poems")
    with pytest.raises(UserError, match="cannot be read"):
        works("jsonl", file=tmp_path / "none", encode=list)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match=r"base_url=http://127\.0\.0\.1:9: "):
        load(HttpTarget("http://127.0.0.1:9", "m"), [Work([1], 1)], [0.0])
    with pytest.raises(UserError, match="expected http://HOST:PORT"):
        HttpTarget("localhost", "m")


def test_every_token_of_every_request_is_counted() -> None:
    asked = [Work([50 + i], 3 + i) for i in range(6)]
    with serving(OPTIONS) as server:
        run = load(server.target, asked, [0.01 * i for i in range(6)], most_open=4)
        with pytest.raises(UserError, match="not served here"):
            load(HttpTarget(server.target.url, "other"), asked, [0.0] * 6)
        assert server.cpu_s() > 0
    assert (run.output_tokens, run.input_tokens) == (sum(w.output_len for w in asked), 6)
    assert len(run.requests) == 6
    assert all(0 < each.ttft <= each.e2e for each in run.requests)
    # One event has several tokens where the reader was late, so that events may be fewer.
    assert 0 < len(run.gaps) <= run.output_tokens - 6
    assert sum(run.gaps) == pytest.approx(sum(each.e2e - each.ttft for each in run.requests))


def test_a_server_that_cannot_start_says_why() -> None:
    with (
        pytest.raises(MachineError, match="leaves 1 bytes"),
        serving({**OPTIONS, "kv_cache_memory_bytes": 1}),
    ):
        pass


@pytest.mark.product(2, of="commands that measure")
def test_the_command_compares_with_the_same_requests_offline(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--dataset", "random", "--input-len", "8", "--output-len", "4", "--num-prompts", "6"]
    code = main(["bench", "serve", "abacus", "--json", "--offline", *flags, *flags_of(OPTIONS)])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    found = json.loads(captured.out)
    assert found["rows"][0]["output_tokens"] == 24
    assert found["of_offline"] > 0
    assert found["offline"]["seconds"] > 0
    alone = found["alone"]
    assert 0 < alone["queued_ms"] + alone["engine_ms"] <= alone["api_ms"], "parts of each other"
    assert found["offline"]["engine_ms"] > 0
    assert EngineOptions(**found["options"]).enable_prefix_caching is False
