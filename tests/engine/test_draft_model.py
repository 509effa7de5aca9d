"""A draft model drafts what the model samples; outputs are those without it."""

from __future__ import annotations

import json
import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fusewright import LLM, ops
from fusewright.compiler.emit.kernels import outside_variants
from fusewright.config import EngineOptions, Hardware, UserError
from fusewright.engine import aot_compile as aot
from fusewright.engine.frontend.outputs import RequestOutput
from fusewright.engine.messages.step import DraftPasses
from fusewright.engine.read_draft import read_draft_model
from fusewright.engine.worker import source, startup
from fusewright.engine.worker.drafts.state import draft_calls
from fusewright.engine.worker.progress import Progress
from fusewright.model_executor.hf_config import model_folder
from tests.model_executor.tiny_models import TINY_MODELS, TinyModel

from .test_speculative import KINDS, OPTIONS, PROMPTS, SETUPS, facts, generate, params

FEW = {
    kind: KINDS[kind]
    for kind in (
        *("greedy", "on and on", "sampled", "cut", "logprobs", "prompt logprobs", "several"),
        *("stop text", "one token", "bad words", "presence", "grammar"),
    )
}
ITSELF = {
    "method": "draft_model",
    "model": "abacus",
    "num_speculative_tokens": 4,
    "adaptive": False,
}


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    """The answers without drafts."""
    return generate(LLM("abacus", **OPTIONS), FEW)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model like the bundled one, of two layers and with random weights."""
    config = json.loads((model_folder("abacus") / "config.json").read_text())
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**config | {"num_hidden_layers": 2}))
    folder = tmp_path_factory.mktemp("draft") / "stranger"
    model.save_pretrained(folder)
    return str(folder)


def accepted(report: dict[str, Any]) -> float:
    return float(report["accepted"] / report["drafted"])


@pytest.mark.slow
@pytest.mark.product(7)
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_a_model_that_drafts_for_itself_is_right(
    setup: dict[str, Any], expected: list[RequestOutput]
) -> None:
    llm = LLM("abacus", **OPTIONS | setup, speculative_config=ITSELF)
    assert facts(generate(llm, FEW)) == facts(expected)
    report = llm.report()["drafts"]
    assert report["error"] == "" and report["drafted"] >= 20
    assert accepted(report) > 0.8, report  # bad words and penalties are not known to it
    pool = llm.engine.core.scheduler.pool  # type: ignore[attr-defined]
    assert pool.num_free == pool.num_blocks, "a block was lost"


def test_greedy_and_seeded_drafts_of_the_model_itself_are_all_accepted() -> None:
    llm = LLM("abacus", **OPTIONS, speculative_config=ITSELF)
    for kind in ("on and on", "sampled", "cut"):
        llm.generate(PROMPTS, KINDS[kind], use_tqdm=False)
    report = llm.report()["drafts"]
    assert accepted(report) > 0.99, report


@pytest.mark.parametrize(
    "kind",
    [
        {"min_tokens": 40, "max_tokens": 40},
        {"ignore_eos": True, "logit_bias": {51: 2.5, 32: -3.0, 10: -100.0}},
        {"ignore_eos": True, "allowed_token_ids": [*b"0123456789 abc"]},
        {"temperature": 0.9, "seed": 2, "top_p": 0.9, "logit_bias": {51: 2.0}, "min_tokens": 20},
    ],
    ids=["least length", "biases", "allowed tokens", "sampled"],
)
def test_the_model_drafts_by_the_logits_that_a_request_changes(kind: dict[str, Any]) -> None:
    llm = LLM("abacus", **OPTIONS, speculative_config=ITSELF)
    given = llm.generate(PROMPTS, params(**kind), use_tqdm=False)
    alone = LLM("abacus", **OPTIONS).generate(PROMPTS, params(**kind), use_tqdm=False)
    assert facts(given) == facts(alone)
    report = llm.report()["drafts"]
    assert report["drafted"] > 40 and accepted(report) > 0.97, report


def test_more_changes_than_a_draft_model_heeds_cost_drafts_alone() -> None:
    llm = LLM("abacus", **OPTIONS, speculative_config=ITSELF)
    kinds = [
        params(ignore_eos=True, logit_bias=dict.fromkeys(range(32, 132), -1.5)),
        params(ignore_eos=True, allowed_token_ids=[*range(40, 120)]),
        params(min_tokens=20, stop_token_ids=[*range(48, 98)]),
    ]
    given = llm.generate(PROMPTS[:3], kinds, use_tqdm=False)
    alone = LLM("abacus", **OPTIONS).generate(PROMPTS[:3], kinds, use_tqdm=False)
    assert facts(given) == facts(alone)
    report = llm.report()["drafts"]
    assert report["error"] == "" and report["drafted"] > 20


def test_a_stranger_is_wrong_and_changes_no_output(
    stranger: str, expected: list[RequestOutput]
) -> None:
    llm = LLM("abacus", **OPTIONS, speculative_config=ITSELF | {"model": stranger})
    assert facts(generate(llm, FEW)) == facts(expected)
    report = llm.report()["drafts"]
    assert report["error"] == "" and report["drafted"] >= 20
    assert accepted(report) < 0.2, report


def test_a_prefix_that_the_draft_model_has_read_is_not_read_again() -> None:
    """Four requests of one prefix: the draft model reads it once, and later requests begin behind
    it; so they have drafts at once, which are right."""
    llm = LLM("abacus", **OPTIONS, speculative_config=ITSELF)
    lengths: list[int] = []
    runner = llm.engine.runner  # type: ignore[attr-defined]
    draft = runner.draft

    def counted(passes: DraftPasses) -> None:
        lengths.append(0 if passes.reading is None else int(passes.reading.query_lens.max()))
        draft(passes)

    runner.draft = counted
    prefix = "12+34=46 23+45=68 34+56=90 45+67=112 56+78=134 "
    first = llm.generate(prefix + "1+1=", params(ignore_eos=True), use_tqdm=False)
    assert max(lengths) > len(prefix) // 2
    lengths.clear()
    second = llm.generate(prefix + "2+2=", params(ignore_eos=True), use_tqdm=False)
    assert second[0].num_cached_tokens > 16
    assert max(lengths) < 32
    assert first[0].outputs[0].text
    report = llm.report()["drafts"]
    assert accepted(report) > 0.97, report


def test_a_draft_model_that_fails_is_switched_off_and_no_request_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    alone = LLM("abacus", **OPTIONS).generate(PROMPTS, KINDS["on and on"], use_tqdm=False)
    llm = LLM("abacus", **OPTIONS, speculative_config=ITSELF)
    runner = llm.engine.draft._passes  # type: ignore[attr-defined]
    run, calls = runner.run, []

    def failing(passes: DraftPasses) -> None:
        calls.append(passes)
        if len(calls) == 3:
            raise RuntimeError("a kernel of the draft model failed")
        run(passes)

    runner.run = failing
    outputs = llm.generate(PROMPTS, KINDS["on and on"], use_tqdm=False)
    assert facts(outputs) == facts(alone)
    assert "a kernel of the draft model failed" in llm.report()["drafts"]["error"]
    assert "draft_model has failed and is switched off" in capsys.readouterr().err


def test_drafts_come_back_after_a_sleep() -> None:
    llm = LLM("abacus", **OPTIONS, speculative_config=ITSELF)
    kind = KINDS["on and on"]
    before = llm.generate(PROMPTS, kind, use_tqdm=False)
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        counts = llm.report()["drafts"]
        assert facts(llm.generate(PROMPTS, kind, use_tqdm=False)) == facts(before)
        after = llm.report()["drafts"]
        drafted = after["drafted"] - counts["drafted"]
        assert drafted > 50
        assert after["accepted"] - counts["accepted"] > 0.97 * drafted


@pytest.mark.thorough
def test_a_draft_model_drafts_for_two_ranks() -> None:
    few = {kind: KINDS[kind] for kind in ("greedy", "on and on", "sampled")}
    with LLM("abacus", **OPTIONS, tensor_parallel_size=2) as alone:
        right = generate(alone, few)
    with LLM("abacus", **OPTIONS, tensor_parallel_size=2, speculative_config=ITSELF) as llm:
        assert facts(generate(llm, few)) == facts(right)
        report = llm.report()["drafts"]
    assert accepted(report) > 0.9, report


def test_the_memory_of_a_draft_model_is_accounted_for() -> None:
    alone = LLM("abacus", **OPTIONS, num_gpu_blocks_override=32).report()
    both = LLM("abacus", **OPTIONS, num_gpu_blocks_override=32, speculative_config=ITSELF).report()
    for name in ("weights", "kv_cache"):
        assert both["memory"][name] == 2 * alone["memory"][name]
    assert both["kv_cache"]["bytes"] == 2 * alone["kv_cache"]["bytes"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model": "/no/such/model"}, "/no/such/model"),
        ({"model": "{other}"}, "vocabulary of .* tokens, and the model one of"),
        ({"model": "{bare}"}, "no weights|safetensors"),
        ({"num_speculative_tokens": 8}, "9 rows, and max_num_batched_tokens=8; draft 7 at most"),
    ],
)
def test_a_draft_model_that_cannot_serve_is_refused_before_anything_is_loaded(
    config: dict[str, Any], said: str, stranger: str, tmp_path: Path
) -> None:
    other, bare = tmp_path / "other", tmp_path / "bare"
    TINY_MODELS[0].save(other)
    bare.mkdir()
    (bare / "config.json").write_text((Path(stranger) / "config.json").read_text())
    if "model" in config:
        config = config | {"model": config["model"].format(other=other, bare=bare)}
    with pytest.raises(UserError, match=f"speculative_config: .*{said}"):
        few = {"max_num_seqs": 8, "max_num_batched_tokens": 8}
        LLM("abacus", **OPTIONS | few, speculative_config=ITSELF | config)


def test_a_sequence_beyond_the_draft_models_length_goes_on_without_drafts() -> None:
    kind = params(ignore_eos=True, max_tokens=60)
    alone = LLM("abacus", **OPTIONS).generate(PROMPTS, kind, use_tqdm=False)
    llm = LLM("abacus", **OPTIONS, speculative_config=ITSELF | {"max_model_len": 32})
    assert facts(llm.generate(PROMPTS, kind, use_tqdm=False)) == facts(alone)
    report = llm.report()["drafts"]
    assert report["error"] == "" and accepted(report) > 0.97
    assert report["drafted"] < 5 * 32


@pytest.mark.product(2)
@pytest.mark.parametrize("words", [None, ["58", "a b", "3 "]], ids=["of the device", "of the host"])
def test_no_drafts_take_blocks_beyond_max_model_len(words: list[str] | None) -> None:
    """The last prompt is that long, but for fewer tokens than a step has drafts."""
    options = OPTIONS | {"max_model_len": 64, "block_size": 8}
    kind, prompts = (
        params(ignore_eos=True, max_tokens=None, bad_words=words),
        [PROMPTS[0], "ab " * 17],
    )
    right = facts(LLM("abacus", **options).generate(prompts, kind, use_tqdm=False))
    drafter = ITSELF | {"model": "abacus-draft", "num_speculative_tokens": 24}
    llm = LLM("abacus", **options, speculative_config=drafter)
    pool: Any = llm.engine.core.scheduler.pool  # type: ignore[attr-defined]
    extend, lengths = pool.extend, set[int]()

    def extended(blocks: Any, missing: Any) -> None:
        extend(blocks, missing)
        lengths.update(map(len, blocks.tables))

    pool.extend = extended
    assert facts(llm.generate(prompts, kind, use_tqdm=False)) == right
    assert llm.report()["drafts"]["error"] == "" and max(lengths) == 8, lengths


def test_a_draft_model_made_for_fewer_positions_drafts_as_far_as_it_goes(
    tmp_path: Path, said: list[logging.LogRecord]
) -> None:
    """Without ``max_model_len``; the start was refused, with the remedy to cut the model's own."""
    for file in model_folder("abacus").glob("*.*"):
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    kind = params(ignore_eos=True, max_tokens=60)
    alone = LLM("abacus", **OPTIONS).generate(PROMPTS, kind, use_tqdm=False)
    drafter = ITSELF | {"model": str(tmp_path)}
    llm = LLM("abacus", **OPTIONS, speculative_config=drafter)
    assert facts(llm.generate(PROMPTS, kind, use_tqdm=False)) == facts(alone)
    assert 0 < llm.report()["drafts"]["drafted"] < 5 * 32
    lines = [record.getMessage() for record in said]
    assert any("made for 32 positions; longer sequences go on without" in line for line in lines)
    asked = drafter | {"max_model_len": 64}
    with pytest.raises(UserError, match=r"speculative_config: max_model_len=64: .* 32 positions"):
        LLM("abacus", **OPTIONS, speculative_config=asked)
    asked = drafter | {"quantization": "fp8_static"}
    with pytest.raises(UserError, match="speculative_config: quantization=fp8_static: the scales"):
        LLM("abacus", **OPTIONS, speculative_config=asked)


# Kernels


def test_kernels_that_are_named_are_the_drafters_too() -> None:
    """It need not call every op: that is asked of the target alone."""
    names = ("argmax=native", "place_rows=native", "propose_ngrams=native")
    asked = EngineOptions(
        model="abacus", device="cpu", kernels=names, speculative_config=json.dumps(ITSELF)
    )
    hardware = Hardware("cpu", "any", graphs="none")
    _, spec, config = startup.read_model(asked, hardware)
    draft = read_draft_model(asked, config, spec, hardware, weights=False)
    assert draft is not None
    assert draft.config.compile.kernels == config.compile.kernels
    assert config.compile.named_kernels and not draft.config.compile.named_kernels


@pytest.mark.parametrize("way", ["compile", "start"])
def test_kernels_that_place_rows_over_several_tables_of_a_drafter_are_compiled(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target has one group of layers, the drafter two; each number is a kernel."""
    layers = ["sliding_attention", "full_attention"]
    windows = {"layer_types": layers, "use_sliding_window": True, "sliding_window": 32}
    TinyModel("two groups", "Qwen2", {"vocab_size": 272, **windows}).config().save_pretrained(
        tmp_path
    )
    asked = json.dumps(ITSELF | {"model": str(tmp_path)})
    options = EngineOptions(model="abacus", load_format="dummy", speculative_config=asked)
    compiled: list[set[ops.Variant]] = []

    def variants(calls: Any) -> set[ops.Variant]:
        return outside_variants(calls, config.compile, device="cuda", sm=90)

    def collect(calls: Any, *_: Any, **__: Any) -> MagicMock:
        compiled.append(variants(calls))
        return MagicMock(built=False)

    for module in (aot, startup):
        monkeypatch.setattr(module, "find_or_compile", MagicMock())
    monkeypatch.setattr(source, "compile_kernels", collect)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    hardware = aot.target_hardware(options, 90)
    _, spec, config = startup.read_model(options, hardware)
    draft = read_draft_model(options, config, spec, hardware, weights=False)
    assert draft is not None
    assert (len(spec.cache_groups), len(draft.spec.cache_groups)) == (1, 2)
    if way == "compile":
        aot.aot_compile(options, target_sm=90)
    else:
        weights: Future[Any] = Future()
        weights.set_result(torch.nn.Module())
        for of in ((spec, config), (draft.spec, draft.config)):
            startup.compile_model(*of, weights, startup.StartupReport(), Progress())

    def placing(num_groups: int) -> set[ops.Variant]:
        every = variants(lambda _, num_seqs: draft_calls(num_seqs, num_groups))
        return {each for each in every if dict(each.constexprs).get("GROUPS") == num_groups}

    assert placing(1) and placing(2)
    assert placing(1) | placing(2) <= set[ops.Variant]().union(*compiled)
