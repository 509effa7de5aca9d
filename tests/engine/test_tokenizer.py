"""Tokenizer folders as they come: chat templates, end-of-sequence ids, files that are missing."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from fusewright.config import UserError
from fusewright.engine.frontend.chat_template import ChatTemplate
from fusewright.engine.frontend.generation_config import find_eos_token_ids
from fusewright.engine.frontend.inputs import InputProcessor
from fusewright.engine.frontend.tokenizer import Tokenizer, load_tokenizer
from fusewright.engine.messages.sampling_params import SamplingParams

from .toy import TOKENIZER

USER = {"role": "user", "content": "1+2"}
TEXT = {"type": "text", "text": "1+2"}
DEFAULT = SamplingParams()


def folder_with(tmp_path: Path, **files: Any) -> Path:
    """abacus's tokenizer.json and the given JSON files."""
    shutil.copy(TOKENIZER.folder / "tokenizer.json", tmp_path)
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    return tmp_path


def inputs(tokenizer: Tokenizer | None = TOKENIZER, max_model_len: int = 32) -> InputProcessor:
    return InputProcessor(tokenizer, Path("/models/x"), 272, max_model_len)


def test_encode_adds_the_special_tokens_of_a_prompt() -> None:
    assert TOKENIZER.encode("ab") == [256, 97, 98]
    assert TOKENIZER.encode("ab", add_special_tokens=False) == [97, 98]
    assert TOKENIZER.decode([256, 97, 271]) == "a", "ids beyond the vocabulary have no text"
    assert TOKENIZER.token_text(256) == "<|bos|>"


def test_truncation_and_padding_in_the_file_change_no_prompt(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    stored = json.loads((folder / "tokenizer.json").read_text())
    stored["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    assert Tokenizer(folder).encode("abcdefgh") == [256, *b"abcdefgh"]


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, {5, 6, 257}),
        ({"eos_token_id": 5}, {}, {5, 257}),
        ({}, {"eos_token_id": 7}, {7, 257}),
        ({}, {}, {257}),
    ],
)
def test_eos_ids_of_all_files(
    tmp_path: Path, generation: dict[str, Any], config: dict[str, Any], ids: set[int]
) -> None:
    folder = folder_with(
        tmp_path,
        generation_config=generation,
        config=config,
        tokenizer_config={"eos_token": {"content": "<|eos|>", "special": True}},
    )
    assert find_eos_token_ids(folder, Tokenizer(folder)) == ids
    assert find_eos_token_ids(folder, None) == ids - {257}


def test_ends_that_are_no_token_ids_are_refused(tmp_path: Path) -> None:
    for bad in ("</s>", ["</s>"], [[1]], -1, True):
        folder = folder_with(tmp_path, generation_config={"eos_token_id": bad})
        with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id is .* a token"):
            find_eos_token_ids(folder, None)


def test_the_bundled_chat_template_writes_its_own_bos() -> None:
    prompt = inputs().chat_prompt([{"role": "system", "content": "x"}, USER])
    assert prompt == {"prompt": "<|bos|>1+2=", "prompt_token_ids": [256, *b"1+2="]}


def test_a_template_file_wins_over_the_config(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, tokenizer_config={"chat_template": "config"})
    assert Tokenizer(folder).render_chat([USER]) == "config"
    (folder / "chat_template.jinja").write_text("file {{ messages | length }}")
    assert Tokenizer(folder).render_chat([USER]) == "file 1"


def test_the_default_of_named_templates_is_used(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    folder = folder_with(tmp_path, tokenizer_config={"chat_template": named})
    assert Tokenizer(folder).render_chat([USER]) == "d"


def test_what_published_templates_use() -> None:
    source = """
    {%- for message in messages %}
        {%- if loop.index0 > 0 %}{% break %}{% endif %}
        {{- '<' + message.role + '>' }}{% generation %}{{ message.content }}{% endgeneration %}
    {%- endfor %}
    {%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}
    {{- tools | tojson }}{{ strftime_now('%Y') | length }}"""
    template = ChatTemplate(source, {}, "x")
    text = template.render([USER, USER], tools=[{"q": "<é>"}])
    assert text == '<user>1+2<assistant>[{"q": "<é>"}]4'
    text = template.render([USER], add_generation_prompt=False)
    assert text == "<user>1+2null4"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "chat template fails: roles must"),
        ("{% if %}", "does not compile"),
        ("{{ messages[0].__class__.__mro__ }}", "chat template fails: .*unsafe"),
        ("{{ messages.append(1) }}", "chat template fails: .*unsafe|chat template fails: .*append"),
        ("{{ 1 // 0 }}", "chat template fails: .*zero"),
    ],
)
def test_a_bad_template_is_one_error(source: str, message: str) -> None:
    with pytest.raises(UserError, match=f"chat.jinja: .*{message}"):
        ChatTemplate(source, {}, "chat.jinja").render([USER])


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "messages is empty"),
        (["hi"], "message 'hi': expected"),
        ("hi", "messages 'hi': expected a list"),
        ({"role": "user", "content": "x"}, "expected a list"),
        ([{"content": "x"}], "expected {'role'"),
        ([{"role": "user"}], r"message 0 \(user\) has no content: expected text"),
        ([{"role": "tool", "content": None}], r"message 0 \(tool\) has no content"),
        ([{"role": "user", "content": 5}], r"message 0 \(user\) has content=5: expected text"),
        ([{"role": "user", "content": []}], r"has content=\[\]: expected text"),
        ([{"role": "usr", "content": "x"}], "message 0: role 'usr': expected system, developer"),
        ([{"role": 5, "content": "x"}], "message 0: role 5: expected system"),
        (
            [{"role": "user", "content": [TEXT, {"type": "image_url", "image_url": {"url": "x"}}]}],
            "message 0 has a part of type 'image_url': models here read text alone",
        ),
        ([{"role": "user", "content": [{"text": "x"}]}], "message 0 has the part {'text': 'x'}"),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 0 has the part"),
    ],
)
def test_bad_messages_are_refused(messages: Any, error: str) -> None:
    with pytest.raises(UserError, match=error):
        inputs().chat_prompt(messages)


def test_content_parts_are_their_text() -> None:
    one = inputs().chat_prompt([{"role": "user", "content": [TEXT]}])
    assert one == inputs().chat_prompt([USER])
    template = ChatTemplate("{% for m in messages %}<{{ m.content }}>{% endfor %}", {}, "x")
    parts = [TEXT, {"type": "text", "text": "more"}]
    assert template.render([{"role": "user", "content": parts}, USER]) == "<1+2\nmore><1+2>"


def test_tool_calls_and_the_roles_of_a_template_are_passed_on() -> None:
    source = "{% for m in messages %}{{ m.role }}:{{ m.content or m.tool_calls }};{% endfor %}"
    messages = [{"role": "assistant", "tool_calls": [1]}, {"role": "tool", "content": "3"}]
    assert ChatTemplate(source, {}, "x").render(messages) == "assistant:[1];tool:3;"
    ipython = [{"role": "ipython", "content": "3"}]
    named = source + "{# 'ipython' #}"
    assert ChatTemplate(named, {}, "x").render(ipython) == "ipython:3;"
    with pytest.raises(UserError, match="role 'ipython': expected"):
        ChatTemplate(source, {}, "x").render(ipython)


def test_a_model_without_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no chat template"):
        Tokenizer(folder_with(tmp_path)).render_chat([USER])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"tokenizer\.json: no such file; give prompts as token ids"
    ):
        Tokenizer(tmp_path)
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)
    folder = folder_with(tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"tokenizer_config\.json holds a list"):
        Tokenizer(folder)


@pytest.mark.parametrize(
    ("prompt", "ids", "text"),
    [
        ("ab", [256, 97, 98], "ab"),
        ([5, 6], [5, 6], None),
        ((5, 6), [5, 6], None),
        ({"prompt_token_ids": [5]}, [5], None),
        ({"prompt_token_ids": [5], "prompt": "x"}, [5], "x"),
        ({"prompt": "a"}, [256, 97], "a"),
        ({"prompt": "a", "multi_modal_data": None, "cache_salt": "x"}, [256, 97], "a"),
    ],
)
def test_forms_of_a_prompt(prompt: Any, ids: list[int], text: str | None) -> None:
    assert inputs().prepare(prompt, DEFAULT) == (ids, text)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ({"prompt_token_ids": []}, "prompt is empty"),
        ("x" * 40, "prompt of 41 tokens: max_model_len=32 leaves room for 31"),
        ([1] * 32, "prompt of 32 tokens"),
        ([5, 272], r"token id 272: outside the vocabulary, 0\.\.271"),
        ([-1], "token id -1: outside"),
        ([True], "token id True: expected an integer"),
        (["a"], "token id 'a': expected an integer"),
        ({"text": "a"}, r"keys \['text'\]"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "multi_modal_data is not served; exp"),
        ({"prompt": "a", "max_tokens": 3, "n": 2}, "max_tokens, n is not served"),
        ({"prompt_embeds": [1.0]}, "prompt_embeds is not served"),
        ({"prompt_token_ids": [5], "prompt": 5}, r"prompt has keys .*: expected prompt \(text\)"),
        ({"prompt_token_ids": 5}, r"prompt_token_ids \(a list of integers\)"),
        ({"prompt_token_ids": "ab", "prompt": "ab"}, r"prompt_token_ids \(a list of integers\)"),
        (7, "prompt of type int"),
        ("\ud800", "not valid Unicode"),
    ],
)
def test_bad_prompts_are_one_error(prompt: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        inputs().prepare(prompt, DEFAULT)


def test_a_stop_id_outside_the_vocabulary_is_an_error() -> None:
    with pytest.raises(UserError, match="stop_token_ids has 272"):
        inputs().prepare("a", SamplingParams(stop_token_ids=[272]))


def test_without_tokenizer_only_token_ids_work() -> None:
    without = inputs(None)
    assert without.prepare([5], DEFAULT) == ([5], None)
    with pytest.raises(UserError, match=r"/models/x/tokenizer\.json: no such file.*as token ids"):
        without.prepare("text", DEFAULT)
    with pytest.raises(UserError, match=r"stop=\('a',\) needs text: /models/x/tokenizer\.json"):
        without.prepare([5], SamplingParams(stop="a"))
    with pytest.raises(UserError, match=r"/models/x/tokenizer\.json"):
        without.chat_prompt([USER])


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    count, is_done = 0, threading.Event()

    def run() -> None:
        nonlocal count
        while not is_done.is_set():
            count += 1

    thread = threading.Thread(target=run)
    thread.start()
    before = count
    TOKENIZER.encode("1+1=" * 200_000)
    after = count
    is_done.set()
    thread.join()
    assert after > before


def test_a_text_that_no_prompt_could_have_is_refused_before_it_is_encoded() -> None:
    made = inputs(max_model_len=32)
    longest = max(16, TOKENIZER.most_characters) * 32
    with pytest.raises(UserError, match=f"prompt of {longest + 1} tokens: max_model_len=32"):
        made.prepare("1" * longest, DEFAULT)
    words = (
        f"prompt of {longest + 1} characters: max_model_len=32 leaves room for {longest} at most"
    )
    for form in ("1" * (longest + 1), {"prompt": "1" * (longest + 1)}):
        with pytest.raises(UserError, match=words):
            made.prepare(form, DEFAULT)
