"""A tokenizer's folder is read as ``transformers`` reads it, whatever files say of its tokens."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer as LibraryTokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from fusewright.config import UserError
from fusewright.engine.frontend.tokenizer import Tokenizer

TEXTS = ["ab <s>b</s>", "a[PAD] b", "<tool> a <end>b", " <x>  a", "[MASK]ab<unk>é"]
Files = dict[str, Any]


def token(text: str, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"content": text, **plain, **flags}


def tagged(text: str, **flags: bool) -> dict[str, Any]:
    return {"__type": "AddedToken", **token(text, **flags)}


def library_tokenizer() -> LibraryTokenizer:
    """Letters and a few words, of which <s> alone is marked as special; </s> is a mere word."""
    words = ["<unk>", "<s>", "</s>", *"ab <>/stolendxPADMK[]", "_", "ab", "<tool>"]
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words))}
    made = LibraryTokenizer(models.BPE(vocab, [("a", "b")], unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "_")
    made.decoder = decoders.Replace("_", " ")
    made.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    return made


NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
FOLDERS: dict[str, Files] = {
    "bare": {},
    "named": {"tokenizer_config": NAMED},
    "new": {"tokenizer_config": {**NAMED, "pad_token": "[PAD]", "mask_token": None}},
    "objects": {"tokenizer_config": {**NAMED, "pad_token": tagged("[PAD]", lstrip=True)}},
    "decoder": {
        "tokenizer_config": {
            **NAMED,
            "added_tokens_decoder": {
                "2": token("</s>", special=True),
                "40": token("<end>", rstrip=True, normalized=True),
                "7": token("<tool>"),
                "41": token("<x>", special=True, lstrip=True),
            },
        },
        "special_tokens_map": {"pad_token": "[PAD]"},
    },
    "decoder flags": {
        "tokenizer_config": {
            **NAMED,
            "added_tokens_decoder": {"1": token("<s>", rstrip=True), "2": token("</s>")},
        }
    },
    "map": {
        "tokenizer_config": {**NAMED, "eos_token": "<tool>"},
        "special_tokens_map": {
            "eos_token": token("</s>", rstrip=True),
            "pad_token": "[PAD]",
            "additional_special_tokens": ["<tool>", "<x>"],
        },
    },
    "added": {
        "tokenizer_config": NAMED,
        "added_tokens": {"<x>": 30, "[PAD]": 29, "</s>": 2, "<s>": 1},
        "special_tokens_map": {"pad_token": "[PAD]"},
    },
    "additional": {"tokenizer_config": {**NAMED, "additional_special_tokens": ["<x>", "<tool>"]}},
    "extra list": {"tokenizer_config": {**NAMED, "extra_special_tokens": ["<x>", "</s>"]}},
    "extra names": {"tokenizer_config": {**NAMED, "extra_special_tokens": {"tool_token": "<x>"}}},
    "own names": {"tokenizer_config": {**NAMED, "image_token": "<x>", "add_bos_token": False}},
    "flags": {"tokenizer_config": {**NAMED, "add_eos_token": True, "add_bos_token": False}},
    "split": {"tokenizer_config": {**NAMED, "split_special_tokens": True}},
}


def folder_of(path: Path, files: Files) -> Path:
    library_tokenizer().save(str(path / "tokenizer.json"))
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_read_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, FOLDERS[name])
    ours, right = Tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert ours.special_tokens == right.special_tokens_map
    assert ours.eos_token_id == right.eos_token_id
    assert ours.vocab_size == len(right)
    for text in TEXTS:
        for special in (True, False):
            ids = right.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids, text
            assert ours.decode(ids, special) == right.decode(ids, skip_special_tokens=special)


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({"tokenizer_config": {"eos_token": 5}}, "tokenizer_config.json: eos_token is '5'"),
        ({"tokenizer_config": {"eos_token": {"id": 5}}}, "eos_token is .* expected a token"),
        ({"special_tokens_map": {"pad_token": ["x"]}}, "special_tokens_map.json: pad_token is"),
        ({"tokenizer_config": {"added_tokens_decoder": [1]}}, "expected an object of tokens"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": {}}}}, "added_tokens_decoder.x is"),
        ({"tokenizer_config": {"added_tokens_decoder": {"1": "x"}}}, "an object with its content"),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"1": token("x") | {"lstrip": 1}}}},
            "flags that are true or false",
        ),
        ({"tokenizer_config": {"extra_special_tokens": "x"}}, "expected a list of tokens"),
        ({"tokenizer_config": {"additional_special_tokens": [5]}}, "extra_special_tokens is '5'"),
        ({"tokenizer_config": {"eos_token": "\ud800"}}, "eos_token is .* no lone surrogate"),
        ({"added_tokens": {"\ud800": 3}}, "added_tokens.json: .* no lone surrogate"),
        ({"tokenizer_config": {"added_tokens_decoder": {"9" * 5000: {}}}}, "a token id as key"),
        ({"added_tokens": {"x": "y"}}, "added_tokens.json: x is 'y'; expected a token id"),
        ({"added_tokens": {"": 3}}, "added_tokens.json:  is '3'; expected a token id"),
    ],
)
def test_a_token_that_is_none_is_refused_by_name(files: Files, error: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=error):
        Tokenizer(folder_of(tmp_path, files))


MESSAGES = [{"role": "user", "content": "a"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
LISTED = [
    {"name": "tool_use", "template": "listed {{ tools | length }}"},
    {"name": "default", "template": "listed"},
]


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ("text", {}),
        (LISTED, {}),
        (LISTED, {"chat_template.jinja": "file"}),
        ("text", {"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "t"}),
        ("text", {"additional_chat_templates/tool_use.jinja": "t"}),
        ("text", {"chat_template.jinja": "file", "additional_chat_templates/rag.jinja": "r"}),
        (LISTED[:1], {}),
        (None, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_the_chat_template_is_that_of_transformers(
    config: Any, files: dict[str, str], tools: Any, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, {"tokenizer_config": {"chat_template": config}})
    (folder / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    try:
        right = reference.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
    except ValueError:
        with pytest.raises(UserError, match="chat template"):
            Tokenizer(folder).render_chat(MESSAGES, tools=tools)
    else:
        ours = Tokenizer(folder)
        assert ours.render_chat(MESSAGES, tools=tools, add_generation_prompt=False) == right
        if tools:
            assert ours.chat_template.replace("{{ tools | length }}", "1") == right


def test_the_template_of_a_processor_is_the_last_resort(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"chat_template": {"chat_template": "legacy"}})
    assert Tokenizer(folder).render_chat(MESSAGES) == "legacy"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config"}))
    assert Tokenizer(folder).render_chat(MESSAGES) == "config"
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"chat_template\.jinja is not UTF-8"):
        Tokenizer(folder).render_chat(MESSAGES)


def charsmap(size: int, data: bytes) -> dict[str, Any]:
    encoded = base64.b64encode(size.to_bytes(4, "little") + data).decode()
    return {"type": "Precompiled", "precompiled_charsmap": encoded}


HOSTILE = {
    # The library would allocate 32 GiB for the first two, which ends the process.
    "huge map": {"normalizer": charsmap(2**32 - 16, b"abc")},
    "nested map": {
        "normalizer": {"type": "Sequence", "normalizers": [charsmap(2**32 - 16, b"abc")]}
    },
    "short map": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "YWI="}},
    "no base64": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "%%"}},
    "steps of nothing": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "unknown special": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "q", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tokenizer_is_one_line(name: str, tmp_path: Path) -> None:
    path = folder_of(tmp_path, {}) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | HOSTILE[name]))
    with pytest.raises(UserError, match=r"tokenizer\.json: .*; download it again$") as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_is_no_regular_small_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate(2**27 + 1)  # sparse
    with pytest.raises(UserError, match="134217729 bytes, expected at most"):
        Tokenizer(tmp_path)


def test_what_a_tokenizer_cannot_encode_or_decode_ends_nothing_else(tmp_path: Path) -> None:
    library = LibraryTokenizer(models.WordLevel({"a": 0}, unk_token="?"))
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"the tokenizer fails: .*Missing .*UNK.*; give token ids"):
        Tokenizer(tmp_path).encode("b")
    broken = Tokenizer(tmp_path)
    broken._tokenizer.pre_tokenizer = pre_tokenizers.FixedLength(0)
    with pytest.raises(UserError, match="the tokenizer fails: chunk size"):  # a panic
        broken.encode("a")
    broken._tokenizer.decoder = decoders.Strip("a", 2**60, 2**60)  # at a start, it is refused
    assert broken.decode([0]) == "\N{REPLACEMENT CHARACTER}"
