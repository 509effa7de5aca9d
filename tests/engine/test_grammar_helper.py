"""Claims about the processes that compile grammars and make masks: nothing that a client sends gets
further than there, a death is one refusal, and everybody else goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer, decoders, models

from fusewright.config import BusyError, UserError
from fusewright.engine.grammar import checks as grammar_checks
from fusewright.engine.grammar.checks import GrammarChecks, grammar_setup
from fusewright.engine.grammar.matchers import Grammars, Matcher
from fusewright.engine.grammar.wire import Setup
from fusewright.model_executor.hf_config import model_folder

TOKENIZER = model_folder("abacus") / "tokenizer.json"
VOCAB_SIZE = 272
EOS = 257
SLOW = {"type": "integer", "multipleOf": 999_999}  # takes llguidance 12 s to compile


def setup(**more: Any) -> Setup:
    return replace(grammar_setup(TOKENIZER, VOCAB_SIZE, frozenset({EOS})), **more)


def schema(value: Any) -> str:
    return json.dumps({"grammars": [{"json_schema": value}]})


def integers(count: int, **more: Any) -> dict[str, Any]:
    return {f"p{i}": {"type": "integer", **more} for i in range(count)}


@pytest.fixture(scope="module")
def checks() -> Iterator[GrammarChecks]:
    made = GrammarChecks(setup())
    yield made
    made.close()


def process_of(checks: GrammarChecks) -> int:
    process = checks._process._process
    assert process is not None
    return process.pid


@contextmanager
def stopped(checks: GrammarChecks) -> Iterator[int]:
    """Meanwhile the process of ``checks`` answers nothing; gives its ID."""
    checks.start()
    pid = process_of(checks)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)


def chain(count: int) -> str:
    rules = "".join(f"a{i}: a{i + 1}\n" for i in range(count))
    return f'start: a0\n{rules}a{count}: "x"\n'


def chained_defs(count: int, *, closed: bool) -> str:
    size = count if closed else count + 1
    defs: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{(i + 1) % size}"} for i in range(count)}
    if not closed:
        defs[f"d{count}"] = {"type": "integer"}
    return schema({"$ref": "#/$defs/d0", "$defs": defs})


NEEDS_ITSELF = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
TREE = {
    "type": "object",
    "properties": {"left": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["left"],
}
FINE = {
    "a chain of 3000 rules": chain(3000),
    "a chain of 1200 definitions": chained_defs(1200, closed=False),
    "2001 choices": "start: " + " | ".join(f'"choice {i}"' for i in range(2001)),
    "2001 values": schema({"enum": [f"choice {i}" for i in range(2001)]}),
    "600 optional properties": schema(
        {"type": "object", "properties": integers(600), "additionalProperties": False}
    ),
    "a tree": schema(TREE),
    "a count in a text": 'start: "a{1000000000}"',
    "a count in a class": "start: /[{1000000000}]+/",
}


@pytest.mark.parametrize("name", FINE)
def test_a_large_grammar_that_can_be_compiled_is_taken(checks: GrammarChecks, name: str) -> None:
    checks.check(FINE[name])


REFUSED = {
    "a count": ("start: /a{1000000000}/", "repeats 1000000000 times, expected 100000 at most"),
    "a count of rules": ('start: b{5,100001}\nb: "a" | "b"', "repeats 100001 times"),
    "a count in a schema": (schema({"pattern": "^\\d{1,999999999}$"}), "repeats 999999999 times"),
    "a chain of 11000 rules": (chain(11_000), "1100[0-9] rules, expected 10000 at most"),
    "11000 references": (
        schema({"prefixItems": [{"$ref": "#"}] * 11_000}),
        "11000 references, expected 10000",
    ),
    "multipleOf": (schema({"type": "integer", "multipleOf": 999_999_999}), "too complex"),
    "a range": (schema({"type": "integer", "minimum": -(10**300)}), "integer range"),
    "it needs itself": (schema(NEEDS_ITSELF), "no finite JSON satisfies the schema"),
    "it is itself": (schema({"$ref": "#"}), "no finite JSON"),
    "any of itself": (schema({"anyOf": [{"$ref": "#"}]}), "no finite JSON"),
    "definitions in a circle": (chained_defs(1200, closed=True), "no finite JSON"),
    "rules in a circle": ("start: a\na: b\nb: a", "no text satisfies it"),
    "deep brackets": ("start: " + "(" * 9000 + '"a"' + ")" * 9000, "nested"),
    "an unknown rule": ("start: nothing", "nothing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_grammar_that_cannot_be_compiled_is_refused_with_its_reason(
    checks: GrammarChecks, name: str
) -> None:
    text, why = REFUSED[name]
    with pytest.raises(UserError, match=f"^grammar: .*{why}"):
        checks.check(text)


def test_a_grammar_that_takes_too_long_is_refused_and_delays_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks = GrammarChecks(setup(limit_s=0.6))
    with stopped(checks), monkeypatch.context() as patched:
        slow = [checks.soon(schema({**SLOW, "title": str(i)})) for i in range(6)]
        again = checks.soon(schema({**SLOW, "title": "0"}))
        patched.setattr(grammar_checks, "_MOST_OPEN", 6)
        with pytest.raises(BusyError, match="grammar: 6 others are being compiled"):
            checks.check('start: "refused"')
    for i in range(3):
        checks.check(f'start: "quick {i}"')
    for future in (*slow, again):
        with pytest.raises(UserError, match=r"more than 0\.6 s of processor time.*simplify"):
            future.result()
    checks.check('start: "after"')
    checks.close()


def test_a_grammar_that_takes_too_much_memory_is_refused() -> None:
    checks = GrammarChecks(setup(most_bytes=16 << 20))
    with pytest.raises(UserError, match=r"more than 0\.015625 GiB of memory"):
        checks.check(chain(9000))
    checks.check('start: "a"')
    checks.close()


def test_what_ends_its_process_twice_is_refused_and_others_are_asked_again() -> None:
    checks = GrammarChecks(setup())
    checks.check('start: "a"')
    with stopped(checks) as pid:  # neither has an answer yet
        slow, quick = checks.soon(schema(SLOW)), checks.soon('start: "b"')
        os.kill(pid, signal.SIGSEGV)
    quick.result()  # the newest is asked again first
    os.kill(process_of(checks), signal.SIGSEGV)
    with pytest.raises(UserError, match=r"the process that compiles it ended \(signal 11\)"):
        slow.result()
    checks.check('start: "c"')
    checks.close()


def masks(grammars: Grammars, matcher: Matcher, tokens: bytes) -> list[list[int]]:
    """The tokens that may come at the beginning and behind each of ``tokens``."""
    found = []
    for token in (None, *tokens):
        if token is not None:
            matcher.take(token)
        while not matcher.is_ready:
            grammars.wait(0.1)
        assert not matcher.error, matcher.error
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
        found.append(np.flatnonzero(bits).tolist())
    return found


def test_masks_come_again_from_a_new_process_when_the_old_one_has_ended() -> None:
    grammars = Grammars(setup(), 4)
    text = 'start: /[a-c]x[0-9]+y?/ "end"'
    first, second = grammars.matcher(text), grammars.matcher(text)
    whole = masks(grammars, first, b"ax12yend")
    assert whole[0] == [*b"abc"] and whole[1] == [*b"x"] and whole[-1] == [EOS]
    assert masks(grammars, second, b"ax1") == whole[:4]
    process = grammars.process._process
    assert process is not None
    process.kill()
    rest = masks(grammars, second, b"2yend")
    assert rest[1:] == whole[4:]
    grammars.close()


def test_many_outputs_of_one_grammar_compile_it_once() -> None:
    grammars = Grammars(setup(), 4)
    matchers = [grammars.matcher("start: /[ab]+/") for _ in range(250)]
    found = [masks(grammars, each, b"a") for each in matchers]
    assert found == [[[*b"ab"], [*b"ab", EOS]]] * 250
    # One to compile it, and one for each output's token; those without a row got theirs too.
    assert grammars.process._numbers == 1 + 250
    for each in matchers:
        each.close()
    grammars.close()


@pytest.mark.parametrize("vocab_size", [100, 255, 272, 290])
def test_masks_are_as_wide_as_the_logits_whatever_the_tokenizer_has(vocab_size: int) -> None:
    grammars = Grammars(replace(setup(), vocab_size=vocab_size), 4)
    (mask,) = masks(grammars, grammars.matcher("start: /[^x]+/"), b"")
    assert len(grammars.matcher("start: /[^x]+/").mask()) == -(-vocab_size // 32)
    assert set(range(32, min(vocab_size, 127))) - {ord("x")} <= set(mask)
    assert max(mask) < vocab_size
    grammars.close()


BARE = models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>")
PIECES = models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]")


@pytest.mark.parametrize(
    "model, decoder, why",
    [
        (BARE, None, "no decoder"),
        (models.BPE({"a": 0, "b": 1}, []), None, "no decoder"),
        (PIECES, decoders.WordPiece(), "a WordPiece decoder"),
    ],
    ids=["word level", "bare", "word pieces"],
)
def test_a_tokenizer_whose_tokens_are_no_bytes_is_named(
    tmp_path: Path, model: Any, decoder: Any, why: str
) -> None:
    tokenizer = Tokenizer(model)
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    checks = GrammarChecks(grammar_setup(tmp_path / "tokenizer.json", 3, frozenset({0})))
    with pytest.raises(UserError, match=f"this tokenizer: .* has {why}, expected ByteLevel"):
        checks.check('start: "a"')
    checks.close()
