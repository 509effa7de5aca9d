"""Text comes out whole: no broken characters, right spaces, cut exactly at stop strings."""

from __future__ import annotations

import random

import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from tokenizers import decoders, models

from fusewright.engine.frontend.detokenizer import Detokenizer, StopStrings, TextStream
from fusewright.engine.messages.sampling_params import SamplingParams

from .toy import TOKENIZER

EMOJI = "naïve 👩‍👩‍👧 déjà-vu 😀😀 日本語 … fin"


class SentencePiece:
    """A tokenizer in Llama 2's manner: spaces in the words, bytes for what it does not know, the
    first space of a text dropped."""

    words = ("▁Hello", "▁world", "▁", "▁a", "b", "cd", "!", "é")

    def __init__(self) -> None:
        vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
        vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
        vocab |= {word: 259 + i for i, word in enumerate(self.words)}
        self._tokenizer = tokenizers.Tokenizer(
            models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
        )
        self._tokenizer.add_special_tokens(["<s>", "</s>"])
        self._tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )

    def word(self, word: str) -> int:
        return 259 + self.words.index(word)

    def bytes_of(self, text: str) -> list[int]:
        return [3 + byte for byte in text.encode()]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


SP = SentencePiece()
A_WORD = st.sampled_from([[SP.word(w)] for w in SP.words])
SOME_BYTES = st.text(
    st.characters(min_codepoint=0x80, exclude_categories=["Cs"]), min_size=1, max_size=2
).map(SP.bytes_of)
A_SPECIAL = st.sampled_from([[1], [2]])


def pieces(items: list[int], rng: random.Random) -> list[list[int]]:
    """``items`` cut at random places."""
    cuts = sorted(rng.choices(range(len(items) + 1), k=rng.randint(0, len(items))))
    return [items[a:b] for a, b in zip([0, *cuts], [*cuts, len(items)], strict=True)]


@pytest.mark.parametrize("text", ["", "plain", EMOJI, "\u200d👩", "tail �", "�" * 9, "�é" * 40])
def test_bytes_one_at_a_time_give_the_text(text: str) -> None:
    stream = TextStream(TOKENIZER, [256], skip_special_tokens=True)
    shown = ""
    for token_id in TOKENIZER.encode(text, add_special_tokens=False):
        shown += stream.push(token_id)
        assert text.startswith(shown), "a character was shown before it was whole"
    assert shown + stream.flush() == text


def test_a_character_is_shown_with_its_last_byte() -> None:
    stream = TextStream(TOKENIZER, [256], skip_special_tokens=True)
    assert [stream.push(byte) for byte in "a😀b".encode()] == ["a", "", "", "", "😀", "b"]


@settings(max_examples=300)
@given(st.text(max_size=30), st.text(max_size=30), st.randoms(use_true_random=False))
def test_any_text_is_what_decoding_at_once_gives(
    prompt: str, text: str, rng: random.Random
) -> None:
    prompt_ids = TOKENIZER.encode(prompt)
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    stream = TextStream(TOKENIZER, prompt_ids, skip_special_tokens=True)
    one_by_one = rng.randint(0, len(ids))
    shown = "".join(stream.push(token_id) for token_id in ids[:one_by_one])
    assert text.startswith(shown)
    assert shown + stream.flush(ids[one_by_one:]) == text


@settings(max_examples=300)
@given(st.lists(st.integers(0, 271), max_size=120), st.booleans())
def test_random_ids_are_never_worse_than_decoding_at_once(ids: list[int], skip: bool) -> None:
    """As from random weights: invalid UTF-8, special tokens, ids beyond the vocabulary."""
    stream = TextStream(TOKENIZER, [256, 65], skip)
    shown = "".join(stream.push(token_id) for token_id in ids) + stream.flush()
    assert shown == TOKENIZER.decode(ids, skip)


def test_bytes_that_are_no_text_do_not_pile_up() -> None:
    stream = TextStream(TOKENIZER, [256], skip_special_tokens=True)
    shown = ""
    for i in range(1000):
        shown += stream.push(0xFF)
        assert len(shown) >= i - 33
        assert len(stream._fresh) + len(stream._context) < 100
    assert shown + stream.flush() == "�" * 1000


@settings(max_examples=300)
@given(st.lists(st.one_of(A_WORD, SOME_BYTES), max_size=12), st.randoms(use_true_random=False))
def test_sentencepiece_spaces_and_bytes(words: list[list[int]], rng: random.Random) -> None:
    prompt = [1, SP.word("▁Hello")]
    ids = [token_id for word in words for token_id in word]
    stream = TextStream(SP, prompt, skip_special_tokens=True)
    one_by_one = rng.randint(0, len(ids))
    shown = "".join(stream.push(token_id) for token_id in ids[:one_by_one])
    assert "Hello" + shown + stream.flush(ids[one_by_one:]) == SP.decode(prompt + ids)


@settings(max_examples=200)
@given(st.lists(st.one_of(A_WORD, A_SPECIAL), max_size=20))
def test_special_tokens_that_are_not_shown_leave_spaces_alone(words: list[list[int]]) -> None:
    ids = [SP.word("▁Hello"), *(token_id for word in words for token_id in word)]
    stream = TextStream(SP, [1], skip_special_tokens=True)
    shown = "".join(stream.push(token_id) for token_id in ids) + stream.flush()
    assert shown == SP.decode(ids)


def test_the_first_word_keeps_the_space_behind_the_prompt() -> None:
    stream = TextStream(SP, [1, SP.word("▁Hello")], skip_special_tokens=True)
    assert stream.push(SP.word("▁world")) == " world"


def first_complete(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the text before the stop string that is complete first."""
    for end in range(len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


TEXTS = st.text("abc", max_size=20)


@settings(max_examples=500)
@given(TEXTS, st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.randoms())
def test_a_stop_string_is_found_wherever_tokens_end(
    text: str, stops: list[str], rng: random.Random
) -> None:
    checker = StopStrings(stops, include_in_output=False)
    expected, stop = first_complete(text, stops)
    shown, found = "", None
    for piece in pieces([ord(c) for c in text], rng):
        new, found = checker.push("".join(map(chr, piece)))
        shown += new
        assert expected.startswith(shown), "part of a stop string was shown"
        if found is not None:
            break
    assert found == stop
    assert (shown if found else shown + checker.flush()) == expected


def test_no_more_is_held_back_than_may_be_a_stop_string() -> None:
    checker = StopStrings(["</end>", "STOP"], include_in_output=False)
    assert checker.push("text") == ("text", None)
    assert checker.push(" S") == (" ", None)
    assert checker.push("T") == ("", None)
    assert checker.push("ART <") == ("START ", None)
    assert checker.push("/en") == ("", None)
    assert checker.push("d>more") == ("", "</end>")


@pytest.mark.parametrize(("include", "text"), [(False, "a😀b "), (True, "a😀b é!")])
def test_stop_string_across_characters_and_tokens(include: bool, text: str) -> None:
    params = SamplingParams(stop=["é!"], include_stop_str_in_output=include)
    detokenizer = Detokenizer(TOKENIZER, [256], params)
    found = None
    for byte in "a😀b é!z".encode():
        found = detokenizer.push(byte)
        if found:
            break
    assert (found, detokenizer.text) == ("é!", text)


def test_text_of_the_first_min_tokens_is_no_stop_string() -> None:
    params = SamplingParams(stop="ab", min_tokens=3)
    detokenizer = Detokenizer(TOKENIZER, [256], params)
    found = [detokenizer.push(byte) for byte in b"abab"]
    assert found == [None] * 4, "its a is among the first three"
    assert [detokenizer.push(byte) for byte in b"ab"] == [None, "ab"]
    assert detokenizer.text == "abab"


def test_what_was_held_back_is_shown_at_the_end() -> None:
    detokenizer = Detokenizer(TOKENIZER, [256], SamplingParams(stop="abc"))
    for byte in [*b"xab", 0xC3]:
        assert detokenizer.push(byte) is None
    assert detokenizer.text == "x"
    detokenizer.finish()
    assert detokenizer.text == "xab�"
