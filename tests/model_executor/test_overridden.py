"""``hf_overrides``: the same model with other values in its config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fusewright import LLM, SamplingParams
from fusewright.config import UserError
from fusewright.model_executor.hf_config import model_folder
from fusewright.model_executor.sources.overridden import with_values

CPU: dict[str, Any] = {"device": "cpu", "optimization_level": 0}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_an_engine_has_the_values(cache: Path) -> None:
    with LLM("abacus", hf_overrides={"max_position_embeddings": 64}, **CPU) as llm:
        assert llm.report()["model"]["max_model_len"] == 64
        (output,) = llm.generate("1+1=", SamplingParams(temperature=0), use_tqdm=False)
        assert output.outputs[0].text == "2"
    with pytest.raises(UserError, match="the model was made for 64 positions"):
        LLM("abacus", hf_overrides='{"max_position_embeddings": 64}', max_model_len=65, **CPU)
    assert len(list((cache / "overridden").iterdir())) == 1, "the same values have one folder"
    with pytest.raises(UserError, match=r"hf_overrides=.*: not JSON: Object of type function"):
        LLM("abacus", hf_overrides={"a": lambda: 1}, **CPU)


def test_files_that_come_later_are_there_too(tmp_path: Path) -> None:
    source = tmp_path / "m"
    source.mkdir()
    (source / "config.json").write_text('{"a": 1, "b": 2}')
    made = model_folder(str(source), overrides='{"b": 3}')
    assert json.loads((made / "config.json").read_text()) == {"a": 1, "b": 3}
    (source / "model.safetensors").write_bytes(b"x")
    assert model_folder(str(source), overrides='{"b": 3}') == made
    assert (made / "model.safetensors").read_bytes() == b"x" and made.name == "m"
    (source / "config.json").write_text('{"a": 4}')
    other = model_folder(str(source), overrides='{"b": 3}')
    assert other != made and json.loads((other / "config.json").read_text()) == {"a": 4, "b": 3}


def test_parts_are_merged_and_values_replaced() -> None:
    config = {"text_config": {"a": 1, "b": 2}, "rope_parameters": {"c": 3}}
    values = {"text_config": {"b": 5}, "rope_parameters": {"d": 4}, "e": None}
    assert with_values(config, values) == {
        "text_config": {"a": 1, "b": 5},
        "rope_parameters": {"d": 4},
        "e": None,
    }
