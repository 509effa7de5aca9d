"""Chat templates render as ``transformers`` renders them, for every shape of message that clients
send.  The templates in ``chat_templates/`` are written after the public ones of these families."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from fusewright.config import UserError
from fusewright.engine.frontend.chat_template import ChatTemplate, ChatTemplates

FOLDER = Path(__file__).parent / "chat_templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
REFERENCE = PreTrainedTokenizerFast(
    tokenizer_object=LibraryTokenizer(WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>")), **SPECIAL
)


@dataclass(frozen=True)
class Takes:
    """What a template can read: arguments as text alone, content in parts, text at all."""

    text_arguments: bool = False
    parts: bool = False
    text: bool = True


TAKES = {
    "deepseek": Takes(text_arguments=True),
    "gemma3": Takes(parts=True),
    "glm4": Takes(parts=True),
    "smolvlm": Takes(parts=True, text=False),
}

USER: dict[str, Any] = {"role": "user", "content": 'What\'s <5> & "é"?\n'}
SYSTEM = {"role": "system", "content": " Be brief. "}
THEN = [{"role": "tool", "tool_call_id": "abcdefghi", "name": "add", "content": '{"sum": "é"}'}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds <é>",
        "parameters": {
            "type": "object",
            "properties": {
                "x": {"type": "integer"},
                "y": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["x"],
        },
    },
}
OTHER = {"type": "function", "function": {**TOOL["function"], "name": "Abs"}}  # type: ignore[dict-item]


def calls(*arguments: Any) -> list[dict[str, Any]]:
    return [
        {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": each}}
        for each in arguments
    ]


def answer(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


X = {"x": 1, "y": ["é", "<"]}
SHAPES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    # name: (as a client sends it, as transformers wants it if that differs)
    "user": ([USER], None),
    "system": ([SYSTEM, USER], None),
    "turns": ([SYSTEM, USER, answer(content="<think>a</think>\n b "), USER], None),
    "part": (
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [{"role": "user", "content": "a"}],
    ),
    "parts": (
        [{**USER, "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}],
        [{**USER, "content": "a \nb"}],
    ),
    "null calls": ([USER, answer(content="a", tool_calls=None, refusal=None), USER], None),
    "no calls": (
        [USER, answer(content="a", tool_calls=[]), USER],
        [USER, answer(content="a"), USER],
    ),
    "call": ([USER, answer(content="a", tool_calls=calls(X)), *THEN], None),
    "call, text": (
        [USER, answer(content="", tool_calls=calls(json.dumps(X))), *THEN],
        [USER, answer(content="", tool_calls=calls(X)), *THEN],
    ),
    "call, null": (
        [USER, answer(content=None, tool_calls=calls(json.dumps(X))), *THEN],
        [USER, answer(tool_calls=calls(X)), *THEN],
    ),
    "call, absent": ([USER, answer(tool_calls=calls(X)), *THEN], None),
    "call of nothing": (
        [USER, answer(content="", tool_calls=calls("")), *THEN],
        [USER, answer(content="", tool_calls=calls({})), *THEN],
    ),
    "two calls": (
        [USER, answer(content=None, tool_calls=calls("{}", X)), *THEN, *THEN, answer(content="3")],
        [USER, answer(tool_calls=calls({}, X)), *THEN, *THEN, answer(content="3")],
    ),
    "null content": ([USER, answer(content=None), USER], [USER, answer(), USER]),
    "reasoning": ([USER, answer(content="a", reasoning="why")], None),
    "reasoning_content": ([USER, answer(content="a", reasoning_content="why")], None),
}
VARIABLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no prompt": {"add_generation_prompt": False},
    "tools": {"tools": [TOOL, OTHER]},
    "documents": {"documents": [{"title": "T", "text": "<é>"}, {"title": "U", "text": "b"}]},
    "switch": {"enable_thinking": False, "thinking": True},
}


def reference(
    template: str, takes: Takes, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> str:
    """What ``transformers`` renders of the messages in the form that this template reads."""
    adapted = []
    for message in messages:
        message = dict(message)
        if isinstance(message.get("content"), list) and not takes.parts:
            message["content"] = "\n".join(part["text"] for part in message["content"])
        if isinstance(message.get("content"), str) and message["content"] and not takes.text:
            message["content"] = [{"type": "text", "text": message["content"]}]
        if takes.text_arguments and message.get("tool_calls"):
            message["tool_calls"] = calls(
                *(
                    json.dumps(call["function"]["arguments"], ensure_ascii=False)
                    for call in message["tool_calls"]
                )
            )
        adapted.append(message)
    options = {"chat_template": template, "tokenize": False, "add_generation_prompt": True}
    try:
        text = REFERENCE.apply_chat_template(adapted, **{**options, **variables})
    except Exception:  # one that cannot do without content gets an empty text
        filled = [{"content": "", **message} for message in adapted]
        text = REFERENCE.apply_chat_template(filled, **{**options, **variables})
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.jinja")))
def test_a_template_renders_as_transformers_renders_it(name: str) -> None:
    source, takes = (FOLDER / f"{name}.jinja").read_text(), TAKES.get(name, Takes())
    template = ChatTemplate(source, SPECIAL, name)
    num_refused = 0
    for shape, (sent, wanted) in SHAPES.items():
        if takes.parts and shape in ("part", "parts"):
            wanted = None
        for what, variables in VARIABLES.items():
            try:
                right = reference(source, takes, wanted or sent, variables)
            except Exception:
                num_refused += 1
                with pytest.raises(UserError, match=f"^{name}: chat template fails: "):
                    template.render(sent, **variables)
            else:
                assert template.render(sent, **variables) == right, (shape, what)
    assert num_refused < 0.9 * len(SHAPES) * len(VARIABLES)


@pytest.mark.product(2)
@pytest.mark.parametrize("text", ["The sum is", " The sum is ", "x\n"], ids=repr)
@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.jinja")))
def test_a_last_message_is_continued_as_in_transformers(name: str, text: str) -> None:
    source, takes = (FOLDER / f"{name}.jinja").read_text(), TAKES.get(name, Takes())
    template = ChatTemplate(source, SPECIAL, name)
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    options["tools"] = [TOOL]
    for content in (text, [{"type": "text", "text": "A"}, {"type": "text", "text": text}]):
        sent = [USER, answer(content=content)]
        right = reference(source, takes, sent, options)
        assert template.render(sent, **options) == right
        assert right.rstrip().endswith(text.strip())


@pytest.mark.parametrize(
    ("last", "begins", "error"),
    [
        (answer(content="a"), True, "add_generation_prompt=False"),
        (answer(content="", tool_calls=calls(X)), False, "must have text, and no calls"),
        (answer(content="a", tool_calls=calls(X)), False, "must have text, and no calls"),
        (answer(content=None), False, "must have text"),
        ({"role": "tool", "content": "a"}, False, "does not show the last message"),
    ],
)
def test_what_cannot_be_continued_is_one_error(
    last: dict[str, Any], begins: bool, error: str
) -> None:
    source = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
    with pytest.raises(UserError, match=f"continue_final_message: .*{error}"):
        ChatTemplate(source, SPECIAL, "x").render(
            [USER, last], add_generation_prompt=begins, continue_final_message=True
        )


@pytest.mark.parametrize(
    ("source", "variables"),
    [
        ("{{ tools is none }} {{ documents is none }} {{ x is defined }}", {}),
        ("{{ tools is none }}{{ documents | tojson(indent=2) }}", {"documents": [{"text": "é"}]}),
        ("{{ tools | tojson(ensure_ascii=True) }}", {"tools": [TOOL]}),
        ("{{ tools | tojson(true, 2, (',', ': '), true) }}", {"tools": [TOOL]}),
        ("{{ tools | tojson(separators=(',', ':'), sort_keys=True) }}", {"tools": [TOOL]}),
        ("{{ '<a href=\"x\">' | tojson }}{{ '<' }}", {}),
        ("{{ strftime_now('%Y') }}{{ dict(a=1) }}{{ dict.fromkeys([1], 2) }}", {}),
        ("{% set ns = namespace(a=1, self=2) %}{% set ns.a = ns.a + ns['self'] %}{{ ns.a }}", {}),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", {}),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", {}),
        ("  {% if true %}  \n a\n  {% endif %}\nb\n", {}),
        ("{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}", {}),
        ("{{ bos_token }}", {"bos_token": "own"}),
        ("{{ messages[0].tool_calls is defined }}{{ messages[0].x }}", {}),
        ("{{ x.a is none }}{{ x.b }}", {"x": {"a": None, "b": [1, 2.5, True]}}),
    ],
)
def test_the_environment_is_that_of_transformers(source: str, variables: dict[str, Any]) -> None:
    right = reference(source, Takes(), [USER], variables)
    assert ChatTemplate(source, SPECIAL, "x").render([USER], **variables) == right


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ dict.__class__.x }}",
        "{{ dict.mro() }}",
        "{{ messages[0].__class__.x }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.x }}",
    ],
)
def test_a_template_does_not_reach_python(source: str) -> None:
    with pytest.raises(UserError, match=r"chat template fails: .*(unsafe|underscore|no attribute)"):
        ChatTemplate(source, SPECIAL, "x").render([USER])


class Opens:
    def read(self) -> str:
        raise AssertionError("a template must not call this")


@pytest.mark.parametrize(
    ("messages", "variables", "error"),
    [
        ([{**USER, "x": Opens()}], {}, "message 0 has a Opens: expected what JSON can hold"),
        ([USER], {"x": Opens()}, "x has a Opens: expected what JSON can hold"),
        ([USER], {"tools": [Opens.read]}, "tools has a function: expected what JSON"),
        ([USER], {"tools": ["add"]}, r"tools\[0\] is of type str: expected an object"),
        ([USER], {"documents": {"text": "x"}}, "documents is of type dict: expected a list"),
    ],
)
def test_templates_see_plain_data_alone(
    messages: list[Any], variables: dict[str, Any], error: str
) -> None:
    with pytest.raises(UserError, match=error):
        ChatTemplate("{{ x }}", {}, "x").render(messages, **variables)


def test_deep_data_is_one_error() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UserError, match="message 0 is nested too deeply"):
        ChatTemplate("", {}, "x").render([{**USER, "x": deep}])


def templates(**sources: str) -> ChatTemplates:
    named = {name: (source, Path(name)) for name, source in sources.items()}
    return ChatTemplates(named, SPECIAL, Path("folder"))


def test_a_template_for_tools_is_for_conversations_with_tools() -> None:
    both = templates(default="none", tool_use="{{ tools | length }}", rag="{% if %}")
    assert both.render([USER], tools=[TOOL]) == "1"
    assert both.render([USER]) == both.render([USER], tools=[]) == "none"
    with pytest.raises(UserError, match="folder: its chat templates are rag, tool_use: expected"):
        templates(rag="", tool_use="{{ tools | length }}").render([USER])


def test_a_variable_that_no_template_reads_is_refused() -> None:
    both = templates(
        default="{% macro f(a) %}{{ a }}{% endmacro %}{% set b = x %}{{ f(b) }}{{ bos_token }}",
        tool_use="{% for t in tools %}{{ strftime_now(t) }}{% endfor %}",
    )
    assert both.variables == {"x", "bos_token", "tools"}
    both.check_variables(["x", "tools"])
    for name in ("a", "b", "t", "strftime_now", "documents", "X"):
        with pytest.raises(UserError, match=f"{name}: the chat template of .* bos_token, tools, x"):
            both.check_variables([name])
    for name in ("messages", "add_generation_prompt", "continue_final_message", "self"):
        with pytest.raises(UserError, match=f"{name}: this name is taken"):
            both.check_variables([name])
