"""Claims about ``bad_words``: no output has one, however it is sampled, and nobody else notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from fusewright import LLM, SamplingParams
from fusewright.config import UserError
from fusewright.engine.frontend.inputs import InputProcessor
from fusewright.engine.frontend.tokenizer import Tokenizer

PROMPT = "37+58="
BAD = ["95", "7", "0 1", "12"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    options: dict[str, Any] = {"max_num_seqs": 8, "num_gpu_blocks_override": 24, "block_size": 8}
    return LLM("abacus", device="cpu", optimization_level=0, dtype="float32", **options)


def found_in(output: Any) -> list[str]:
    """The bad words among the tokens of an output, which are bytes and special ones."""
    ids = output.outputs[0].token_ids
    text = "".join(chr(each) if each < 256 else "|" for each in ids)
    return [word for word in BAD if word in text]


def greedy(llm: LLM, prompt: str = PROMPT, **more: Any) -> Any:
    params = SamplingParams(temperature=0.0, **more)
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


def test_the_last_token_alone_is_banned_and_only_behind_the_others(llm: LLM) -> None:
    assert greedy(llm).text == "95"
    last = greedy(llm, PROMPT + "9", logit_bias={ord("5"): -100.0}, max_tokens=1).text
    found = greedy(llm, bad_words=["95"], max_tokens=2)
    assert found.text == "9" + last != "95"
    # The prompt is no part of the output.
    assert greedy(llm, PROMPT + "9", bad_words=["95"]).text == "5"
    assert greedy(llm, bad_words=["5", "55"]).text[1:2] not in ("", "5")


def test_no_sampled_output_has_a_bad_word_and_its_neighbours_are_as_alone(llm: LLM) -> None:
    kinds: list[dict[str, Any]] = [
        {"ignore_eos": True},
        {"temperature": 3.0, "top_k": 12, "ignore_eos": True},
        {"repetition_penalty": 1.2, "min_tokens": 30, "stop_token_ids": [ord("1")]},
    ]
    banned = [
        SamplingParams(bad_words=BAD, seed=i, max_tokens=60, **kinds[i % 3]) for i in range(6)
    ]
    free = [SamplingParams(seed=i, max_tokens=60, ignore_eos=True) for i in range(4)]
    mixed = llm.generate([PROMPT] * 10, [*banned, *free], use_tqdm=False)
    for output in mixed[:6]:
        assert output.error is None
        assert not found_in(output)
    alone = llm.generate([PROMPT] * 4, free, use_tqdm=False)
    assert [o.outputs[0].text for o in mixed[6:]] == [o.outputs[0].text for o in alone]
    assert any(map(found_in, alone))


def test_a_word_is_banned_with_a_space_before_it_where_that_is_another_token(
    tmp_path: Path,
) -> None:
    vocab = {name: i for i, name in enumerate(["word", "Ġword", "▁word", "two", "Ġtwo", "?"])}
    for number, split in enumerate(
        (pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Metaspace())
    ):
        made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="?"))
        made.pre_tokenizer = split
        folder = tmp_path / str(number)
        folder.mkdir()
        made.save(str(folder / "tokenizer.json"))
    by_bytes, by_words = (
        InputProcessor(Tokenizer(tmp_path / name), tmp_path, len(vocab), 64) for name in "01"
    )
    words = SamplingParams(bad_words=["word", "  two"])
    assert by_bytes.bad_word_ids(words) == [[0], [1], [3], [4]]
    assert by_words.bad_word_ids(SamplingParams(bad_words=["word"])) == [[2]]
    assert by_bytes.bad_word_ids(SamplingParams(bad_words=["two word"])) == [[3, 1], [4, 1]]
    small = InputProcessor(by_bytes.tokenizer, tmp_path, 3, 64)
    with pytest.raises(UserError, match="bad_words has 'two': the model has no token"):
        small.bad_word_ids(SamplingParams(bad_words=["two"]))
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        InputProcessor(None, tmp_path, 9, 64).bad_word_ids(words)


@pytest.mark.parametrize(
    "words, message",
    [
        ("95", "a list of texts"),
        (["", "a"], "texts that are not empty"),
        ([" "], "texts that are not empty"),
        ([1], "texts that are not empty"),
        (["a"] * 1025, "1024 texts at most"),
    ],
    ids=["text", "empty", "space", "number", "many"],
)
def test_bad_words_that_are_none_are_refused(words: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"bad_words.*{message}"):
        SamplingParams(bad_words=words)
    assert SamplingParams(bad_words=None).bad_words == ()
