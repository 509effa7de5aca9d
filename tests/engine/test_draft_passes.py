"""A draft model drafts behind each step on the device, and the host waits for none of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fusewright import LLM, SamplingParams
from fusewright.config import EngineOptions, Hardware
from fusewright.engine.engine import Engine
from fusewright.model_executor.abacus.problems import held_out

from .test_eagle3 import DRAFTERS
from .test_speculative import OPTIONS, PROMPTS, facts, params


def host_driven(llm: LLM) -> LLM:
    """The same engine, whose drafter is asked for drafts when all tokens are known."""
    drafts: Any = llm.engine.core.scheduler.drafts  # type: ignore[attr-defined]
    drafts.on_device, drafts._planner = False, None
    return llm


def watched(llm: LLM) -> dict[str, list[int]]:
    """Fills, as steps are launched: how many are in flight then, rows of drafts, and batches of the
    draft model that the host waited for."""
    core: Any = llm.engine.core  # type: ignore[attr-defined]
    seen: dict[str, list[int]] = {"in flight": [], "drafts": [], "waited for": []}
    drafter, launch = core.scheduler.drafts._drafter, core.runner.launch
    run = drafter._run

    def launched(batch: Any) -> Any:
        seen["in flight"].append(len(core._in_flight))
        seen["drafts"].append(len(batch.slots) - len(set(batch.slots.tolist())))
        return launch(batch)

    def waited(passes: Any) -> Any:
        seen["waited for"].append(len(passes))
        return run(passes)

    core.runner.launch, drafter._run = launched, waited
    return seen


@pytest.mark.product(2)
@pytest.mark.parametrize("name", DRAFTERS)
def test_as_many_drafts_are_right_as_if_the_host_waited(name: str) -> None:
    """Also for prompts in several chunks, and behind cached prefixes: each comes twice."""
    reports, options = [], OPTIONS | {"max_num_batched_tokens": 48, "max_num_seqs": 8}
    prompts = [each.prompt for each in held_out(16, seed=9)]
    for make in (lambda llm: llm, host_driven):
        llm = make(LLM("abacus", **options, block_size=8, speculative_config=DRAFTERS[name]))
        for _ in range(2):
            llm.generate(prompts, params(), use_tqdm=False)
        assert llm.report()["prefix_cache"]["hit_tokens"] > 60
        reports.append(llm.report()["drafts"])
    device, host = reports
    assert device["error"] == host["error"] == "" and host["accepted"] > 60
    # Chunks and drafts meet in other steps, so that a draft or two differ.
    assert device["mean_length"] > 0.97 * host["mean_length"]


@pytest.mark.product(2)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_step_with_drafts_is_launched_while_the_one_before_runs(name: str) -> None:
    llm = LLM("abacus", **OPTIONS, speculative_config=DRAFTERS[name])
    seen = watched(llm)
    llm.generate(PROMPTS, params(ignore_eos=True, max_tokens=40), use_tqdm=False)
    assert not seen["waited for"]
    assert set(seen["in flight"][1:-2]) == {1}, "a step waited for the one before"
    assert all(seen["drafts"][1:-4]), "a step had no drafts"


@pytest.mark.product(2)
@pytest.mark.parametrize("name", DRAFTERS)
def test_nobody_waits_where_no_drafts_have_a_place(name: str) -> None:
    """The last tokens before ``max_model_len`` are fewer than the drafts of a step."""
    options = OPTIONS | {"max_model_len": 64}
    drafter = DRAFTERS[name] | {"num_speculative_tokens": 12}
    llm = LLM("abacus", **options, speculative_config=drafter)
    seen = watched(llm)
    llm.generate(PROMPTS[0], params(ignore_eos=True, max_tokens=None), use_tqdm=False)
    last = max(step for step, count in enumerate(seen["drafts"]) if count)
    # The step behind the last drafts waits once: there is a place if none of them is right.
    assert len(seen["drafts"]) > last + 5 and set(seen["in flight"][last + 2 :]) == {1}, seen
    assert not seen["waited for"]


def test_nobody_waits_where_drafts_have_no_blocks() -> None:
    """The request has the last block that is free when it has 17 tokens of 32."""
    options = OPTIONS | {"block_size": 8, "num_gpu_blocks_override": 4}
    drafter = DRAFTERS["abacus-draft"] | {"num_speculative_tokens": 12}
    llm = LLM("abacus", **options, speculative_config=drafter)
    seen = watched(llm)
    (output,) = llm.generate("37+58=", params(ignore_eos=True, max_tokens=25), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 25 and not any(seen["drafts"][-8:])
    assert set(seen["in flight"][-8:]) == {1}, seen


def test_no_passes_follow_a_step_behind_which_no_drafts_are_tried() -> None:
    """The next step is the last, or there is none."""
    llm = LLM("abacus", **OPTIONS, speculative_config=DRAFTERS["abacus-draft"])
    runner: Any = llm.engine.core.runner  # type: ignore[attr-defined]
    launch, batches = runner.launch, list[Any]()

    def launched(batch: Any) -> Any:
        batches.append(batch)
        return launch(batch)

    runner.launch = launched
    for most in (1, 2):
        llm.generate(PROMPTS, params(ignore_eos=True, max_tokens=most), use_tqdm=False)
        assert batches and all(batch.passes is None for batch in batches)
    llm.generate(PROMPTS, params(ignore_eos=True, max_tokens=3), use_tqdm=False)
    assert any(batch.passes is not None for batch in batches)


def test_drafts_of_the_host_that_were_right_are_not_read_again() -> None:
    llm = LLM("abacus", **OPTIONS, speculative_config=DRAFTERS["abacus-draft"])
    drafter: Any = llm.engine.core.scheduler.drafts._drafter  # type: ignore[attr-defined]
    run, lens = drafter._run, list[int]()

    def ran(passes: Any) -> Any:
        lens.extend(passes[0].query_lens.tolist())
        return run(passes)

    drafter._run = ran
    kind = params(ignore_eos=True, max_tokens=40, bad_words=["58", "a b", "3 "])
    outputs = llm.generate(PROMPTS, kind, use_tqdm=False)
    assert llm.report()["drafts"]["accepted"] > 20
    prompts = sorted(len(output.prompt_token_ids or []) for output in outputs)
    assert sorted(length for length in lens if length > 1) == prompts


def test_a_request_whose_tokens_the_host_must_see_has_drafts_of_the_host() -> None:
    llm = LLM("abacus", **OPTIONS, speculative_config=DRAFTERS["abacus-draft"])
    alone, seen = LLM("abacus", **OPTIONS), watched(llm)
    kinds = [params(ignore_eos=True), params(ignore_eos=True, bad_words=["58", "a b", "3 "])]
    asked = [kinds[number % 2] for number in range(len(PROMPTS))]
    right = facts(alone.generate(PROMPTS, asked, use_tqdm=False))
    assert facts(llm.generate(PROMPTS, asked, use_tqdm=False)) == right
    assert seen["waited for"] and llm.report()["drafts"]["error"] == ""


def captured(name: str, **given: Any) -> LLM:
    options = EngineOptions(
        model="abacus",
        device="cpu",
        dtype="float32",
        max_model_len=128,
        speculative_config=json.dumps(DRAFTERS[name]),
        **{"cudagraph_mode": "FULL_AND_PIECEWISE", "max_num_seqs": 8, **given},
    )
    return LLM.from_engine(Engine(options, Hardware("cpu", "recorded", graphs="recording")))


@pytest.mark.slow
@pytest.mark.product(2)
@pytest.mark.parametrize("name", DRAFTERS)
def test_all_passes_behind_a_step_are_one_graph(name: str) -> None:
    """Requests are greedy or sampled; three sequences take the graph of four.  A step is two
    replays, whatever the number of drafts."""
    llm = captured(name)
    alone = LLM("abacus", **OPTIONS, speculative_config=DRAFTERS[name])
    passes: Any = llm.engine.draft._passes  # type: ignore[attr-defined]
    kinds = {
        "greedy": params(ignore_eos=True, max_tokens=30),
        "sampled": params(ignore_eos=True, max_tokens=30, temperature=0.8, seed=3),
        "cut": params(ignore_eos=True, max_tokens=30, temperature=0.8, seed=3, top_k=4),
    }
    for kind in kinds.values():
        given = facts(llm.generate(PROMPTS[:3], kind, use_tqdm=False))
        assert given == facts(alone.generate(PROMPTS[:3], kind, use_tqdm=False))
    mine, theirs = (each.report()["drafts"] for each in (llm, alone))
    assert mine["error"] == "" and mine["accepted_by_position"] == theirs["accepted_by_position"]
    sizes = {(size.rows, size.num_seqs) for size in passes._graphs}
    assert (20, 4) in sizes and all(rows == 5 * num_seqs for rows, num_seqs in sizes)
    replays = replays_of_a_step(llm)
    assert replays == {2}, replays


def replays_of_a_step(llm: LLM, *others: SamplingParams) -> set[int]:
    """The numbers of replays in steady steps of greedy requests, and of ``others`` beside them."""
    engine: Any = llm.engine
    backends = [engine.graphs._backend, engine.draft.graphs._backend]
    plain = SamplingParams(max_tokens=60, ignore_eos=True)
    for number, kind in enumerate([plain] * (3 - len(others)) + [*others]):
        engine.add_request(PROMPTS[number], kind, f"{number}")
    for _ in range(4):
        engine.step()
    counts = set()
    for _ in range(5):
        before = sum(each.replays for each in backends)
        engine.step()
        counts.add(sum(each.replays for each in backends) - before)
    while engine.has_unfinished():
        engine.step()
    return counts


def test_parameters_of_padded_batches_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, uploads = captured("abacus-draft"), []
    sampler: Any = llm.engine.draft._sampler  # type: ignore[attr-defined]
    upload = sampler._upload

    def uploaded(*args: Any) -> Any:
        uploads.append(args)
        return upload(*args)

    monkeypatch.setattr(sampler, "_upload", uploaded)
    engine: Any = llm.engine
    how = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)
    for number, prompt in enumerate(PROMPTS[:3]):  # in the graph of four
        engine.add_request(prompt, how, f"{number}")
    for _ in range(5):
        engine.step()
    assert uploads
    uploads.clear()
    for _ in range(4):
        engine.step()
    assert not uploads


def test_rows_of_full_graphs_are_no_more_than_tokens() -> None:
    """Graphs of whole steps have a row of padding; a step of as many tokens as rows has none."""
    llm = captured("abacus-draft", cudagraph_mode="FULL", max_num_batched_tokens=32)
    prompts = [each.prompt for each in held_out(8, seed=9)]
    given = facts(llm.generate(prompts, params(ignore_eos=True), use_tqdm=False))
    alone = LLM("abacus", **OPTIONS)
    assert given == facts(alone.generate(prompts, params(ignore_eos=True), use_tqdm=False))
    drafts = llm.report()["drafts"]
    assert drafts["error"] == "" and drafts["accepted"] > 20


@pytest.mark.product(2)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_prompt_of_one_token_has_drafts(name: str) -> None:
    """A head reads none of it: a row follows a token's hidden state."""
    llm = LLM("abacus", **OPTIONS, speculative_config=DRAFTERS[name])
    runner: Any = llm.engine.core.runner  # type: ignore[attr-defined]
    launch, starts = runner.launch, list[int]()

    def launched(batch: Any) -> Any:
        for each in (batch.passes and batch.passes.reading, batch.passes and batch.passes.fresh):
            starts.extend(each.starts.tolist() if each else [])
        return launch(batch)

    runner.launch = launched
    kind = params(ignore_eos=True, max_tokens=24, detokenize=False)
    prompts = [{"prompt_token_ids": [token]} for token in (256, 97, 51)]
    alone = facts(LLM("abacus", **OPTIONS).generate(prompts, kind, use_tqdm=False))
    assert facts(llm.generate(prompts, kind, use_tqdm=False)) == alone
    assert min(starts) == 0 and llm.report()["drafts"]["accepted"] > 0
