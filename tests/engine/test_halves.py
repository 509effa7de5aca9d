"""Large steps of several ranks run in two halves, which see what the whole step would."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusewright import LLM, SamplingParams
from fusewright.config import EngineOptions, UserError, step_schema
from fusewright.config.check import check_options
from fusewright.engine.worker.halves import divide, middle
from fusewright.ops import Turns
from fusewright.ops._turns import BLOCKS_BESIDE, collective
from tests.model_executor.tiny_models import BY_NAME

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_engine_is_left() -> Iterator[None]:
    """A process has one engine of several ranks at a time."""
    yield
    gc.collect()


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40).filter(lambda lens: sum(lens) >= 256))
def test_halves_have_every_token_once_and_each_its_context(lens: list[int]) -> None:
    """In the second half, what the first has of a sequence is context."""
    schema = step_schema(2)
    query_lens = np.array(lens, np.int32)
    num_tokens, num_seqs = int(query_lens.sum()), len(lens)
    context = torch.arange(num_seqs, dtype=torch.int32) * 7
    inputs = {
        field.name: torch.arange(num_tokens, dtype=torch.int32) for field in schema.tokens
    } | {field.name: torch.arange(num_seqs, dtype=torch.int32)[:, None] for field in schema.tables}
    inputs["seq_lens"] = context + torch.from_numpy(query_lens)
    ends = torch.from_numpy(query_lens).cumsum(0)
    inputs["query_start_loc"] = torch.cat([torch.zeros(1), ends]).int()
    before = {name: value.clone() for name, value in inputs.items()}

    cut = middle(query_lens)
    halves = divide(inputs, schema, cut)

    assert all(torch.equal(inputs[name], before[name]) for name in inputs)
    seen: dict[int, list[tuple[int, int]]] = {}
    at = 0
    for half in halves:
        bounds = half["query_start_loc"].tolist()
        assert bounds[0] == 0 and bounds[-1] == len(half["positions"]) > 0
        of = half["block_table"][:, 0].tolist()
        assert of == half["block_table/1"][:, 0].tolist()
        for row, (start, end) in enumerate(pairwise(bounds)):
            assert half["positions"][start:end].tolist() == [*range(at, at + end - start)]
            at += end - start
            seen.setdefault(of[row], []).append((int(half["seq_lens"][row]), end - start))
    assert at == num_tokens and abs(2 * cut.token - num_tokens) <= 256
    for seq, parts in seen.items():
        done = int(context[seq])
        for seq_len, tokens in parts:
            done += tokens
            assert tokens > 0 and seq_len == done
        assert done == int(before["seq_lens"][seq])
    assert sorted(seen) == [*range(num_seqs)]


def test_each_half_runs_on_from_the_other_s_collective() -> None:
    said: list[str] = []

    def half(name: str) -> Any:
        for number in range(3):
            said.append(f"{name} {number}")
            with collective() as most_blocks:
                said.append(f"sum {name} {number}, {most_blocks} blocks")
        return name

    turns = Turns(CPU)
    assert turns.run(lambda: half("a"), lambda: half("b")) == ("a", "b")
    assert said == [
        line
        for number in range(3)
        for name in "ab"
        for line in (f"{name} {number}", f"sum {name} {number}, {BLOCKS_BESIDE} blocks")
    ]
    with collective() as most_blocks:
        assert most_blocks == 0, "nobody takes turns any more"


@pytest.mark.parametrize("failing", ["first", "second"])
@pytest.mark.parametrize("at", range(3))
def test_a_half_that_fails_ends_the_other_at_its_next_collective(failing: str, at: int) -> None:
    reached = {"first": 0, "second": 0}

    def half(name: str) -> None:
        for number in range(3):
            if name == failing and number == at:
                raise KeyError(name)
            reached[name] = number
            with collective():
                pass

    turns = Turns(CPU)
    with pytest.raises(KeyError, match=failing):
        turns.run(lambda: half("first"), lambda: half("second"))
    assert max(reached.values()) <= at
    assert turns.run(lambda: 1, lambda: 2) == (1, 2), "another step may follow"
    assert threading.active_count() < 20


def test_the_second_half_is_in_inference_mode_as_its_caller() -> None:
    with torch.inference_mode():
        asked = Turns(CPU).run(torch.is_inference_mode_enabled, torch.is_inference_mode_enabled)
    assert asked == (True, True)


PROMPTS = [[(7 * i + j * j) % 120 + 3 for j in range(n)] for i, n in enumerate([200, 3, 140, 90])]
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, logprobs=5, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "level"), [("qwen2_window", 2), ("mixtral", 0), ("llama_bias", 1)], ids=str
)
def test_two_ranks_answer_in_halves_as_from_whole_steps(
    name: str, level: int, tmp_path: Path
) -> None:
    """The cut lies within the first or third prompt; layers with a window keep theirs."""
    BY_NAME[name].save(tmp_path)
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "optimization_level": level,
        "max_num_seqs": 4,
        "max_model_len": 256,
    }
    given = []
    for threshold in (0, 256):
        with LLM(
            str(tmp_path),
            tensor_parallel_size=2,
            dbo_prefill_token_threshold=threshold,
            **options,
        ) as llm:
            outputs = llm.generate(
                [{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS, use_tqdm=False
            )
            assert llm.report()["ranks"]["halves"] == {
                "least_tokens": threshold,
                "steps": int(threshold > 0),
            }
        given.append([output.outputs[0] for output in outputs])
    for whole, halved in zip(*given, strict=True):
        assert whole.token_ids == halved.token_ids
        for a, b in zip(whole.logprobs, halved.logprobs, strict=True):
            assert a.keys() == b.keys()
            for token in a:
                assert abs(a[token].logprob - b[token].logprob) < 1e-4


@pytest.mark.parametrize(
    "options",
    [{}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}],
    ids=["one rank", "pipeline"],
)
def test_a_threshold_that_nothing_would_use_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(UserError, match=r"^dbo_prefill_token_threshold=512: it hides the sums"):
        check_options(EngineOptions(dbo_prefill_token_threshold=512, **options))
    with pytest.raises(UserError, match="expected 0"):
        check_options(EngineOptions(dbo_prefill_token_threshold=-1))
