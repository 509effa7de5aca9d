"""Files of a model's folder that are damaged, hostile or not files: one line, and no waiting."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusewright.config import UserError
from fusewright.engine.frontend.generation_config import find_eos_token_ids
from fusewright.engine.frontend.tokenizer import Tokenizer
from fusewright.model_executor.abacus import FOLDER as ABACUS
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.loader import load_model

CONFIG: dict[str, Any] = json.loads((ABACUS / "config.json").read_text())
TEXT = json.dumps(CONFIG)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**31)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


NOT_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "FIFO": (os.mkfifo, "no regular file"),
    "folder": (Path.mkdir, "Is a directory"),
    "2 GiB": (sparse, "has 2147483648 bytes"),
    "loop of links": (loop, "Too many levels of symbolic links"),
    "brackets": (lambda path: path.write_text("[" * 10**5) and None, "nested too deeply"),
    "list": (lambda path: path.write_text("[1]") and None, "holds a list"),
    "null": (lambda path: path.write_text("null") and None, "holds null"),
    "string": (lambda path: path.write_text('"x"') and None, "holds a string"),
    "nothing": (Path.touch, "not valid JSON"),
    "bytes": (lambda path: path.write_bytes(bytes(range(256))) and None, "not valid JSON"),
}


def refusal(act: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", NOT_FILES)
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "config of eos"]
)
def test_what_is_no_json_file_is_refused_at_once(name: str, kind: str, tmp_path: Path) -> None:
    make, words = NOT_FILES[kind]
    acts: dict[str, Callable[[], Any]] = {
        "config.json": lambda: read_spec(tmp_path),
        "generation_config.json": lambda: find_eos_token_ids(tmp_path, None),
        "tokenizer_config.json": lambda: Tokenizer(tmp_path),
        "config of eos": lambda: find_eos_token_ids(tmp_path, None),
    }
    (tmp_path / "tokenizer.json").write_bytes((ABACUS / "tokenizer.json").read_bytes())
    file = "config.json" if name == "config of eos" else name
    make(tmp_path / file)
    said = refusal(acts[name])
    assert words in said
    assert str(tmp_path / file) in said


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**15},
        {"num_attention_heads": 10**15},
        {"head_dim": 10**15},
        {"hidden_size": 10**15},
        {"vocab_size": 2**40},
        {"max_position_embeddings": 10**15},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": -1},
        {"rms_norm_eps": 1e99},
        {"rope_theta": float("inf")},
        {"rope_theta": 1e99},
        {"architectures": [["LlamaForCausalLM"]]},
        {"architectures": {}},
        {"architectures": "LlamaForCausalLM"},
        {"rope_scaling": YARN | {"factor": 1e30}},
        {"rope_scaling": YARN | {"beta_fast": -1}},
    ],
    ids=str,
)
def test_a_number_that_no_model_has_is_refused_by_name(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    said = refusal(lambda: read_spec(tmp_path))
    ((name, value),) = changes.items()
    if isinstance(value, dict) and value:
        *_, (name, _) = value.items() if "beta_fast" in value else {"factor": 0}.items()
    assert name in said
    assert "expected" in said


def test_a_damaged_tokenizer_is_refused_with_the_remedy(tmp_path: Path) -> None:
    text = (ABACUS / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text[: len(text) // 2])
    assert "download it again" in refusal(lambda: Tokenizer(tmp_path))


@pytest.mark.parametrize("template", [[1], [{"name": "default"}], [{"template": "x"}], 5])
def test_a_chat_template_of_another_form_counts_as_none(template: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((ABACUS / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    messages = [{"role": "user", "content": "x"}]
    assert "no chat template" in refusal(lambda: Tokenizer(tmp_path).render_chat(messages))


def test_weights_that_do_not_fit_into_memory_are_refused(tmp_path: Path) -> None:
    # 2 TB: more than any machine of ours has, and fewer than it would grant without asking.
    huge = CONFIG | {"hidden_size": 2**21, "intermediate_size": 2**18, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(huge))
    said = refusal(lambda: load_model(read_spec(tmp_path), tmp_path, "cpu", load_format="dummy"))
    assert "no room for" in said
    assert "smaller model" in said
