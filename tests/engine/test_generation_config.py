"""``generation_config.json``: the defaults of requests, and ids that end them; ids that the model
does not have."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fusewright import LLM
from fusewright.config import EngineOptions, UserError
from fusewright.engine.frontend.check import check_start
from fusewright.engine.frontend.generation_config import (
    default_sampling,
    describe_default_sampling,
    find_eos_token_ids,
    within_vocabulary,
)
from fusewright.engine.frontend.inputs import InputProcessor
from fusewright.engine.frontend.tokenizer import Tokenizer
from fusewright.engine.messages.requests import AddRequest, RequestLimits
from fusewright.engine.messages.sampling_params import SamplingParams
from fusewright.model_executor.abacus import BUNDLED
from fusewright.serve.http.endpoints.generation import sampling_params
from fusewright.serve.http.intake.protocol import ChatRequest, CompletionRequest

from .toy import TOKENIZER

SAMPLING = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.1,
    "repetition_penalty": 1.05,
    "max_new_tokens": 7,
}
FIELDS = {name: value for name, value in SAMPLING.items() if name != "max_new_tokens"} | {
    "max_tokens": 7
}
OTHERS = {"do_sample": True, "eos_token_id": [257], "top_h": None, "transformers_version": "5"}


def write(folder: Path, values: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return str(folder)


def test_the_file_gives_the_defaults_of_requests(tmp_path: Path) -> None:
    model = write(tmp_path / "model", SAMPLING | OTHERS)
    other = write(tmp_path / "other", {"top_k": 3, "temperature": None, "eos_token_id": 9})
    assert default_sampling(model, "auto") == FIELDS
    assert default_sampling(model, "none") == default_sampling(model, "vllm") == {}
    assert default_sampling(model, other) == {"top_k": 3}
    assert default_sampling("abacus", "auto") == {}
    assert default_sampling(str(tmp_path), "auto") == {}
    assert find_eos_token_ids(Path(model), None, other) == {9}
    assert find_eos_token_ids(Path(model), None, "none") == {257}
    with pytest.raises(UserError, match=r"nowhere/generation_config\.json: No such file"):
        default_sampling(model, "nowhere")
    assert describe_default_sampling({}) == ""
    assert "have top_k=3, as generation_config.json" in describe_default_sampling({"top_k": 3})


@pytest.mark.parametrize(
    "values",
    [{"temperature": "0.6"}, {"top_p": 0}, {"top_k": 1.5}, {"max_new_tokens": 0}, {"min_p": 2}],
    ids=str,
)
def test_a_default_that_no_request_may_have_is_refused_before_the_start(
    values: dict[str, Any], tmp_path: Path
) -> None:
    folder = write(tmp_path / "other", values)
    with pytest.raises(UserError, match=r"generation_config\.json: SamplingParams: .*='none'"):
        check_start(EngineOptions(generation_config=folder))


def test_a_body_has_the_defaults_in_fields_that_it_leaves_out() -> None:
    def of_chat(most: int | None = None, **fields: Any) -> SamplingParams:
        body = ChatRequest(messages=[], **fields)
        return sampling_params(body, FIELDS, max_tokens=most)

    assert of_chat() == SamplingParams(**FIELDS)
    assert of_chat(9, temperature=0.0, top_k=None) == SamplingParams(
        **{**FIELDS, "temperature": 0.0, "max_tokens": 9}
    )
    assert sampling_params(CompletionRequest(prompt=""), FIELDS) == SamplingParams(**FIELDS)
    assert sampling_params(ChatRequest(messages=[]), {}, max_tokens=None).max_tokens is None
    assert sampling_params(CompletionRequest(prompt=""), {}) == SamplingParams()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """abacus with a token, an end and defaults that its files do not agree on."""
    made = tmp_path_factory.mktemp("model")
    for path in BUNDLED["abacus"].iterdir():
        if path.suffix in (".json", ".jinja", ".safetensors"):
            shutil.copy(path, made)
    config = json.loads((made / "tokenizer_config.json").read_text())
    extra = [f"<extra {i}>" for i in range(20)]
    (made / "tokenizer_config.json").write_text(
        json.dumps(config | {"extra_special_tokens": extra})
    )
    write(made, {"eos_token_id": [257, 90, 5000], "temperature": 0.0, "max_new_tokens": 3})
    return made


def test_ids_that_the_model_does_not_have_are_told_once_and_left_out(
    folder: Path, said: list[logging.LogRecord]
) -> None:
    tokenizer = Tokenizer(folder)
    assert tokenizer.tokens_from(272)[0].startswith("<extra ")
    assert TOKENIZER.tokens_from(272) == []
    assert TOKENIZER.tokens_from(257)[:1] == ["<|eos|>"]
    found = within_vocabulary(find_eos_token_ids(folder, tokenizer), tokenizer, 272)
    assert found == {90, 257}
    ends, tokens = (record.getMessage() for record in said)
    assert ends.startswith("end-of-sequence ids [5000]: the model gives 0..271")
    assert "tokens have ids outside the model's vocabulary of 272" in tokens
    said.clear()
    assert within_vocabulary(frozenset({257}), TOKENIZER, 272) == {257}
    assert not said


def test_a_request_without_parameters_has_those_of_the_model(
    folder: Path, said: list[logging.LogRecord]
) -> None:
    with LLM(str(folder), optimization_level=0, kv_cache_memory_bytes=1 << 22) as llm:
        lines = [record.getMessage() for record in said]
        assert any("have temperature=0.0, max_tokens=3" in line for line in lines)
        wanted = SamplingParams(temperature=0.0, max_tokens=3)
        assert llm.get_default_sampling_params() == wanted
        own, default = (
            llm.generate(["37+58="] * 2, params, use_tqdm=False) for params in (wanted, None)
        )
        assert [o.outputs[0].token_ids for o in own] == [o.outputs[0].token_ids for o in default]
        # An end that the logits do not have is never banned: this would fail the whole step.
        longer = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=8)
        outputs = llm.generate(["1+1=", "2+2="], [longer, wanted], use_tqdm=False)
        assert [len(o.outputs[0].token_ids) for o in outputs] == [
            8,
            len(outputs[1].outputs[0].token_ids),
        ]
        assert not any(o.error for o in outputs)
        # Each end tells its id, but for the tokenizer's own, of which vLLM tells nothing either.
        for token_id, more, reason in (
            (90, {}, 90),
            (257, {}, None),
            (257, {"stop_token_ids": [257]}, None),
            (257, {"stop_token_ids": [257], "ignore_eos": True}, 257),
            (65, {"stop_token_ids": [65]}, 65),
        ):
            ends = SamplingParams(temperature=0.0, logit_bias={token_id: 100.0}, **more)
            (output,) = llm.generate(["1+1="], ends, use_tqdm=False)[0].outputs
            assert (output.finish_reason, output.stop_reason) == ("stop", reason)
        for text in ("<extra 19>", [271, 272]):
            with pytest.raises(UserError, match=r"outside the vocabulary, 0\.\.271"):
                llm.generate([text], wanted, use_tqdm=False)
        with pytest.raises(UserError, match="bad_words has '<extra 19>': the model has no token"):
            llm.generate(["1"], SamplingParams(bad_words=["<extra 19>"]), use_tqdm=False)


def test_more_logprobs_than_tokens_are_refused() -> None:
    small = msgspec.structs.replace(LIMITS, vocab_size=12)
    fields = {"request_id": "x", "prompt_token_ids": [1], "max_total_tokens": 9}
    for name in ("logprobs", "prompt_logprobs"):
        small.check(AddRequest(**fields, sampling_params=SamplingParams(**{name: 12})))
        with pytest.raises(UserError, match=f"{name}=13: expected 12 at most"):
            small.check(AddRequest(**fields, sampling_params=SamplingParams(**{name: 13})))


LIMITS = RequestLimits(
    num_blocks=9, block_size=16, groups=[], longest_chunk=9, heed_priority=False, vocab_size=272
)


@pytest.mark.parametrize(
    "change",
    [
        {"eos_token_ids": frozenset({257, 272})},
        {"sampling_params": SamplingParams(stop_token_ids=[1, 272])},
        {"sampling_params": SamplingParams(logit_bias={272: 1.0})},
        {"bad_word_ids": [[1], [2, 272]]},
        {"bad_word_ids": [[-1]]},
    ],
    ids=str,
)
def test_an_index_of_one_request_never_reaches_a_step(change: dict[str, Any]) -> None:
    fields = {"request_id": "x", "prompt_token_ids": [1], "max_total_tokens": 9}
    LIMITS.check(AddRequest(**{**fields, "sampling_params": SamplingParams()}))
    with pytest.raises(UserError, match=r"has (272|-1): outside the vocabulary, 0\.\.271"):
        LIMITS.check(AddRequest(**{**fields, "sampling_params": SamplingParams(), **change}))


def test_bad_words_behind_a_space_are_within_the_vocabulary_too(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library, models, pre_tokenizers

    library = Library(models.WordLevel({"a": 0, "_a": 9, "?": 1}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Metaspace("_", prepend_scheme="never", split=True)
    library.save(str(tmp_path / "tokenizer.json"))
    inputs = InputProcessor(Tokenizer(tmp_path), tmp_path, 9, 64)
    with pytest.raises(UserError, match="bad_words has 'a': the model has no token"):
        inputs.bad_word_ids(SamplingParams(bad_words=["a"]))
    assert replace(inputs, vocab_size=10).bad_word_ids(SamplingParams(bad_words=["a"])) == [
        [0],
        [9],
    ]
