"""Claims about telling thinking from the answer: the cuts of a stream change nothing, no mark is in
either, forms begin behind the thinking, and its tokens are counted."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from fusewright.engine.frontend.grammar import json_grammar, regex_grammar
from fusewright.engine.frontend.tokenizer import Tokenizer
from fusewright.engine.messages.sampling_params import SamplingParams
from fusewright.serve.commands.serve import REASONING
from fusewright.serve.http.endpoints.reading import Reading, continued_text
from fusewright.serve.http.endpoints.tools import Tools
from fusewright.serve.http.reasoning.marks import Opening
from fusewright.serve.http.reasoning.output_reader import Message, OutputReader
from fusewright.serve.http.reasoning.parsers import PARSERS, Tagged, detect
from fusewright.serve.http.reasoning.thought_reader import Thought, ThoughtReader
from fusewright.serve.http.tool_calls.call_reader import FORMATS, CallReader

from ..engine.toy import TOKENIZER

OPEN, FREE, CLOSED = Opening
TAGGED = {name: parser for name, parser in PARSERS.items() if isinstance(parser, Tagged)}
CALL = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
WRITTEN: list[tuple[str, Opening, str, str, str]] = [
    # parser, where the output begins, what the model writes, thinking, content
    ("qwen3", FREE, "<think>\nhm\n</think>\n\nSo 4.", "hm", "So 4."),
    ("qwen3", FREE, "\n<think>\n\n</think>\n\nSo", "", "So"),
    ("qwen3", FREE, "So <think>a</think>", "", "So <think>a</think>"),
    ("qwen3", FREE, "<thin", "", "<thin"),
    ("qwen3", FREE, " \n So", "", " \n So"),
    ("qwen3", OPEN, "a\n\nb </thin c\n</think>  d\n", "a\n\nb </thin c", "  d\n"),
    ("qwen3", OPEN, "<think>a</think>b</think>", "a", "b</think>"),
    ("qwen3", OPEN, "cut off, </thi", "cut off, </thi", ""),
    ("qwen3", CLOSED, "<think>a</think>\n \n  b", "a", "  b"),
    ("deepseek_r1", FREE, "b", "", "b"),
    ("mistral", FREE, "[THINK]a[b[/THINK]c", "a[b", "c"),
    ("seed_oss", OPEN, "a</seed:think>b", "a", "b"),
    (
        "granite",
        FREE,
        "Here's my thought process: a Here is b Here is my response: c",
        "a Here is b",
        " c",
    ),
    ("glm45", OPEN, "", "", ""),
]


def told(reader: OutputReader, pieces: Sequence[str]) -> Message:
    parts = [part for piece in pieces for part in reader.push(piece)]
    return Message.of([*parts, *reader.finish()])


def reader(name: str, opening: Opening, tools: str = "") -> OutputReader:
    calls = CallReader(FORMATS[tools]) if tools else None
    made = PARSERS[name].reader(opening, calls)
    assert isinstance(made, OutputReader)
    return made


@pytest.mark.parametrize("name, opening, text, thinking, content", WRITTEN)
def test_thinking_is_told_from_the_answer_wherever_the_text_is_cut(
    name: str, opening: Opening, text: str, thinking: str, content: str
) -> None:
    for pieces in ([text], list(text), [text[i : i + 3] for i in range(0, len(text), 3)]):
        assert told(reader(name, opening), pieces) == Message(content, thinking)


_PIECES = st.sampled_from(
    [
        *("<think>", "</think>", "<", "</", "think", ">", "[THINK]", "[/THINK]", "Here is my "),
        *("thought process:", "response:", "\n", " ", "é", "a", "b", CALL, "<tool_call>"),
    ]
)


@settings(max_examples=150)
@given(
    st.sampled_from(sorted(TAGGED)),
    st.sampled_from([*Opening]),
    st.lists(_PIECES, max_size=12).map("".join),
    st.data(),
)
def test_any_cuts_of_any_text_give_what_the_whole_gives(
    name: str, opening: Opening, text: str, data: st.DataObject
) -> None:
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    ends = [0, *places, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(ends)]
    whole, cut = (told(reader(name, opening, "hermes"), each) for each in ([text], pieces))
    assert (cut.content, cut.thinking) == (whole.content, whole.thinking)
    assert [(c.name, c.arguments) for c in cut.calls] == [
        (c.name, c.arguments) for c in whole.calls
    ]
    assert not any(end in whole.thinking for end in TAGGED[name].between.ends)
    assert whole.thinking == whole.thinking.strip()


def test_thinking_is_not_held_back_once_it_can_be_no_mark() -> None:
    thoughts = ThoughtReader(TAGGED["qwen3"].between, OPEN)
    assert thoughts.push("a </th") == [Thought("a")]
    assert thoughts.push("e") == [Thought(" </the")]
    assert thoughts.push("</think>") == []
    assert thoughts.push("\n\n ") == []
    assert thoughts.push("b") == [" b"]
    assert thoughts.push(" \n") == [" \n"]


def test_calls_are_read_behind_the_thinking_alone() -> None:
    text = f"I may write {CALL}.</think>\n{CALL}"
    message = told(reader("qwen3", OPEN, "hermes"), [text])
    assert message.thinking == f"I may write {CALL}."
    assert [call.name for call in message.calls] == ["f"] and message.content == ""


@pytest.mark.parametrize(
    "name, prompt, continued, opening",
    [
        ("qwen3", "user: <think>\nassistant:", None, FREE),
        ("qwen3", "assistant:<think>\n", None, OPEN),
        ("qwen3", "assistant:<think>\n\n</think>\n\n", None, CLOSED),
        ("deepseek_v3", "<Assistant></think>", None, CLOSED),
        ("deepseek_r1", "<Assistant>", None, OPEN),
        ("deepseek_r1", "<Assistant></think>", None, CLOSED),
        ("deepseek_r1", "<Assistant>So", "So", CLOSED),
        ("qwen3", "assistant: <think>\nhm", "<think>\nhm", OPEN),
        ("qwen3", "assistant: <think>a</think>b", "<think>a</think>b", CLOSED),
    ],
)
def test_the_prompt_says_where_an_output_begins(
    name: str, prompt: str, continued: str | None, opening: Opening
) -> None:
    assert PARSERS[name].opening(prompt, continued) is opening


def test_the_text_of_a_continued_message_is_joined() -> None:
    assert continued_text({"content": [{"type": "text", "text": "a"}, "b"]}) == "ab"
    assert continued_text({"content": None}) == ""


MARKS = {"<think>": 300, "</think>": 301, "[THINK]": 302, "[/THINK]": 303}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Bytes and marks; ``[THINK]`` is a special token, which texts do not show."""
    folder = tmp_path_factory.mktemp("tokenizer")
    stored = json.loads((TOKENIZER.folder / "tokenizer.json").read_text())
    for name, token_id in MARKS.items():
        mark = {**stored["added_tokens"][0], "content": name, "special": "[" in name}
        stored["added_tokens"].append({**mark, "id": token_id})
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    return Tokenizer(folder)


def reading(name: str, opening: Opening, tokenizer: Tokenizer) -> Reading:
    return Reading(Tools(), PARSERS[name], opening, tokenizer=tokenizer)


FORMED = [
    ("qwen3", FREE, "<think>a{b</think>\n\n7", True),
    ("qwen3", FREE, "<think></think>7", True),
    ("qwen3", FREE, "7", True),
    ("qwen3", FREE, "a</think>7", False),
    ("qwen3", FREE, "<think>a</think>b", False),
    ("qwen3", OPEN, "a{b</think>7", True),
    ("qwen3", OPEN, "</think>7", True),
    ("qwen3", OPEN, "<think>a</think>7", True),
    ("qwen3", CLOSED, "7", True),
    ("qwen3", CLOSED, "a</think>7", False),
    ("mistral", FREE, "[THINK]a[b[/THINK]7", True),
    ("granite", FREE, "Here is my thought process: a: Here is my response: 7", True),
    ("granite", FREE, "7", True),
    ("granite", OPEN, "Here is b", None),
]


@pytest.mark.parametrize("name, opening, text, fits", FORMED)
@pytest.mark.parametrize("form", ["schema", "expression"])
def test_a_form_begins_behind_the_thinking(
    tokenizer: Tokenizer, name: str, opening: Opening, text: str, fits: bool | None, form: str
) -> None:
    llguidance = pytest.importorskip("llguidance")
    grammar = json_grammar({"type": "integer"}) if form == "schema" else regex_grammar("[0-9]")
    params = SamplingParams(grammar=grammar)
    composed = reading(name, opening, tokenizer).applied(params).grammar
    library = llguidance.LLTokenizer(str(tokenizer.folder / "tokenizer.json"))
    matcher = llguidance.LLMatcher(library, composed, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False)
    taken = all(matcher.consume_token(each) for each in ids)
    if fits is None:
        assert taken and not matcher.is_accepting()
    else:
        assert (taken and matcher.is_accepting()) is fits


@pytest.mark.parametrize(
    "name, opening, text, count",
    [
        ("qwen3", FREE, "<think>abc</think>de", 3),
        ("qwen3", FREE, "\n<think>abc</think>de", 3),
        ("qwen3", FREE, "abc</think>de", 0),
        ("qwen3", OPEN, "abc</think>de", 3),
        ("qwen3", OPEN, "abc", 3),
        ("qwen3", CLOSED, "abc", 0),
        ("mistral", FREE, "[THINK]é[/THINK]de", 2),
        ("granite", FREE, "Here is my thought process:éa Here is my response:b", 4),
        ("granite", OPEN, "abc", 3),
    ],
)
def test_tokens_of_thinking_are_counted(
    tokenizer: Tokenizer, name: str, opening: Opening, text: str, count: int
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert reading(name, opening, tokenizer).num_thoughts([ids, ids]) == 2 * count
    assert Reading(Tools(), tokenizer=tokenizer).num_thoughts([ids]) is None


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_marks_that_are_special_tokens_are_shown(tokenizer: Tokenizer, name: str) -> None:
    params: Any = reading(name, FREE, tokenizer).applied(SamplingParams())
    assert params.skip_special_tokens is (name == "qwen3")


def test_the_command_line_has_every_parser() -> None:
    assert set(REASONING) == {"auto", "none", *PARSERS}


def test_the_parser_is_read_off_the_template() -> None:
    templates = Path(__file__).parents[1] / "engine" / "chat_templates"
    named = {"qwen3": "qwen3", "smollm3": "qwen3", "llama3_1": None, "hermes": None}
    for name, parser in named.items():
        assert detect((templates / f"{name}.jinja").read_text()) == parser, name
    assert detect("[THINK]{{ messages }}") == "mistral"
