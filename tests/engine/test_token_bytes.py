"""A token's bytes and names are its own, whatever it decodes to alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given, strategies as st
from tokenizers import decoders, models

from fusewright.engine.frontend.detokenizer import Detokenizer
from fusewright.engine.frontend.outputs import Logprob
from fusewright.engine.frontend.token_bytes import TokenBytes
from fusewright.engine.messages.sampling_params import SamplingParams
from fusewright.serve.http.endpoints.logprobs import chat_logprobs, completion_logprobs

from .test_detokenizer import SP
from .toy import TOKENIZER

BY_SENTENCE = TokenBytes(SP._tokenizer)
A_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(A_TEXT)
def test_the_bytes_of_tokens_are_those_of_the_text(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert b"".join(map(TOKENIZER.token_bytes, ids)) == text.encode()
    assert b"".join(map(BY_SENTENCE, SP.bytes_of(text))) == text.encode()


@pytest.mark.parametrize(
    "spelled, own",
    [("▁Hello", b" Hello"), ("▁", b" "), ("b", b"b"), ("é", "é".encode())],
)
def test_the_space_of_a_first_word_is_its_own(spelled: str, own: bytes) -> None:
    assert BY_SENTENCE(SP.word(spelled)) == own


def test_special_tokens_and_ids_without_a_token_have_bytes() -> None:
    assert (BY_SENTENCE(1), BY_SENTENCE(10**6)) == (b"<s>", b"")
    assert TOKENIZER.token_bytes(256) == b"<|bos|>"


@pytest.mark.parametrize(
    "decoder, own",
    [
        (None, [b" word", b" ##ing", " ▁é".encode()]),
        (decoders.WordPiece(), [b" word", b"ing", " ▁é".encode()]),
        (decoders.Metaspace(), [b"word", b"##ing", " é".encode()]),
    ],
)
def test_other_decoders_tell_the_bytes_too(decoder: Any, own: list[bytes]) -> None:
    vocab = {"word": 0, "##ing": 1, "▁é": 2, "?": 3}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="?"))
    made.decoder = decoder
    assert [*map(TokenBytes(made), range(3))] == own


def step(*entries: tuple[int, float]) -> dict[int, Logprob]:
    """The sampled token first, then the likeliest by rank."""
    order = sorted((value for _, value in entries), reverse=True)
    return {
        each: Logprob(
            value, order.index(value) + 1, BY_SENTENCE(each).decode(errors="replace"), own
        )
        for each, value in entries
        if (own := BY_SENTENCE(each)) is not None
    }


def test_tokens_that_read_alike_have_names_and_values_of_their_own() -> None:
    """ "b" and its byte, the two halves of "é", and ids without text."""
    letter, byte = SP.word("b"), SP.bytes_of("b")[0]
    first, second = SP.bytes_of("é")
    found = completion_logprobs(
        [
            step((letter, -3.0), (byte, -0.5), (first, -1.0), (second, -2.0)),
            step((byte, -0.5), (letter, -3.0), (10**6, -4.0), (10**6 + 1, -5.0)),
        ],
        [0, 1],
    )
    assert found["tokens"] == ["b", "b"]
    assert found["token_logprobs"] == [-3.0, -0.5]
    names = {"b": -3.0, f"token_id:{byte}": -0.5, "bytes:\\xc3": -1.0, "bytes:\\xa9": -2.0}
    assert found["top_logprobs"][0] == names
    last = {"b": -0.5, f"token_id:{letter}": -3.0, "": -4.0, f"token_id:{10**6 + 1}": -5.0}
    assert found["top_logprobs"][1] == last
    by_id = completion_logprobs([step((letter, -3.0), (byte, -0.5))], [0], as_ids=True)
    assert by_id["tokens"] == [f"token_id:{letter}"]
    assert by_id["top_logprobs"] == [{f"token_id:{letter}": -3.0, f"token_id:{byte}": -0.5}]


def test_a_chat_has_the_likeliest_in_order_with_their_bytes() -> None:
    first, second = SP.bytes_of("é")
    steps = [step((second, -2.0), (first, -1.0), (SP.word("b"), -3.0))]
    (found,) = chat_logprobs(steps, 2)["content"]
    assert (found["bytes"], found["logprob"]) == ([0xA9], -2.0)
    assert [each["bytes"] for each in found["top_logprobs"]] == [[0xC3], [0xA9]]
    assert json.dumps(found)


@given(st.lists(st.sampled_from([[SP.word(w)] for w in SP.words] + [SP.bytes_of("é😀")])))
def test_offsets_are_where_tokens_begin_in_the_text(words: list[list[int]]) -> None:
    ids = [each for word in words for each in word]
    detokenizer = Detokenizer(SP, [SP.word("b")], SamplingParams(stop=["never"]))
    offsets = []
    for token_id in ids:
        offsets.append(detokenizer.num_characters)
        detokenizer.push(token_id)
    detokenizer.finish()
    written = b""
    for token_id, offset in zip(ids, offsets, strict=True):
        assert detokenizer.text[:offset] == written.decode(errors="ignore")
        written += BY_SENTENCE(token_id)
    assert detokenizer.text == written.decode()
