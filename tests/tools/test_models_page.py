"""The page of models is what its JSON renders to, and has every type that is installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from models_page import PAGE, RESULT, page  # type: ignore[import-not-found] # noqa: E402


def test_the_page_is_rendered_from_its_result() -> None:
    assert PAGE.read_text() == page(json.loads(RESULT.read_text())), "run `make models`"


def test_the_page_has_every_type_of_the_installed_library() -> None:
    record = json.loads(RESULT.read_text())
    names = {model["name"] for model in record["models"]}
    assert names == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), "run `make models`"
    assert all(f"`{name}`" in PAGE.read_text() for name in names)


def test_no_model_differs_from_its_own_code() -> None:
    models = json.loads(RESULT.read_text())["models"]
    assert not [model["why"] for model in models if model["outcome"] == "differs"]
