"""Claims about the bytes that a step has to read, and the time that it is charged with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fusewright import LLM, SamplingParams
from fusewright.engine.core.loop import EngineCore
from fusewright.engine.engine import Engine
from fusewright.engine.messages.requests import AbortRequests, AddRequest
from fusewright.engine.messages.step import Ints
from fusewright.engine.messages.step_reads import CacheReads, StepReads
from fusewright.ops.attention.paged_attention import context_symbols
from tests.model_executor.tiny_models import BY_NAME

from .toy import Setup, ToyRunner


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


@pytest.mark.parametrize("window", [0, 1, 5, 64])
@pytest.mark.parametrize(
    "rows", [[(0, 1)], [(9, 1), (3, 1)], [(0, 12)], [(7, 9), (63, 1), (0, 4)]], ids=str
)
def test_cached_positions_count_as_in_the_cost_of_attention(
    window: int, rows: Sequence[tuple[int, int]]
) -> None:
    starts, lens = ints(*(start for start, _ in rows)), ints(*(n for _, n in rows))
    found = StepReads(caches=(CacheReads(1.0, window),)).count(starts, lens)
    assert found == context_symbols([*lens], [*starts + lens], window)["context_tokens"]
    seen = 0
    for start, count in rows:
        ends = range(start, start + count)
        seen += len(
            {p for q in ends for p in range(max(0, q - window + 1) if window else 0, q + 1)}
        )
    assert found == seen


def test_a_state_counts_once_a_sequence() -> None:
    reads = StepReads(caches=(CacheReads(100.0, per_sequence=True), CacheReads(1.0)))
    assert reads.count(ints(9, 0), ints(1, 5)) == 2 * 100 + 10 + 5


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_experts_count_as_often_as_equally_likely_ones_are_chosen(num_tokens: int) -> None:
    choices = list(itertools.combinations(range(4), 2))
    drawn = itertools.product(choices, repeat=num_tokens)
    mean = np.mean([len(set(itertools.chain(*tokens))) for tokens in drawn])
    reads = StepReads(weights=7, experts=4000, expert_share=2 / 4)
    assert reads.count(ints(3), ints(num_tokens)) == pytest.approx(7 + 1000 * mean)


@pytest.mark.parametrize("name", ["llama_gqa", "llama_mha_tied", "qwen2_moe"])
def test_a_model_reads_all_that_it_holds_but_what_is_gathered(name: str, tmp_path: Path) -> None:
    BY_NAME[name].save(tmp_path)
    with LLM(str(tmp_path), device="cpu", optimization_level=0, dtype="float32") as llm:
        engine = llm.engine
        assert isinstance(engine, Engine)
        reads, report = engine.core.reads, engine.report()["reads"]
        held = dict(engine.weights.result().named_parameters())
        group, heads = engine.spec.cache_groups[0], engine.spec.num_kv_heads
    routed = sum(t.nbytes for name, t in held.items() if ".experts." in name)
    rest = sum(t.nbytes for name, t in held.items() if ".experts." not in name)
    gathered = held["embed.weight"].nbytes if "lm_head.weight" in held else 0
    assert (gathered == 0) == name.endswith("tied") and reads.weights == rest - gathered
    assert reads.experts == routed and (routed > 0) == name.endswith("moe")
    assert reads.expert_share == (2 / 6 if routed else 0)
    assert [c.token_bytes for c in reads.caches] == [len(group.layers) * 2 * heads * 16 * 4]
    assert report["weights"] == reads.weights and report["copy_tb_s"] == 0


def core_of(runner: ToyRunner, reads: StepReads) -> EngineCore:
    return EngineCore(Setup(max_num_batched_tokens=8).scheduler(), runner, reads=reads)


def added(core: EngineCore, name: str, num_prompt: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    core.add(AddRequest(name, [97] * num_prompt, params, num_prompt + max_tokens))


def test_each_kind_of_step_counts_its_own_bytes() -> None:
    runner, reads = Setup(max_num_batched_tokens=8).runner(), StepReads(1000, 64, 0.25)
    core = core_of(runner, reads)
    added(core, "a", 20, 6)
    added(core, "b", 3, 9)
    while core.num_unfinished:
        core.step()
    expected = {"decode": 0.0, "mixed": 0.0}
    waited = runner.batches[: -len(runner.queue)] if runner.queue else runner.batches
    for batch in waited:
        kind = "decode" if batch.query_len == 1 else "mixed"
        expected[kind] += reads.count(batch.starts, batch.query_lens)
    found = core.stats()
    assert found.read_bytes == pytest.approx(expected) and min(expected.values()) > 1000
    assert min(found.busy_s.values()) > 0


def test_a_step_that_nobody_waited_for_counts_neither_bytes_nor_the_rest_behind_it() -> None:
    runner = Setup(max_num_batched_tokens=8).runner()
    core = core_of(runner, StepReads(1000))
    added(core, "a", 3, 50)
    core.step()
    core.step()
    before = core.stats()
    assert len(runner.batches) == 2
    core.abort(AbortRequests(["a"]))
    assert core.stats().idle_s < core.stats().idle_s
    added(core, "b", 3, 1)
    while core.num_unfinished:
        core.step()
    found = core.stats()
    assert len(runner.batches) == 3
    assert found.read_bytes["mixed"] - before.read_bytes["mixed"] == 1000
    assert found.read_bytes["decode"] == before.read_bytes["decode"]
    assert found.busy_s["decode"] == before.busy_s["decode"]
