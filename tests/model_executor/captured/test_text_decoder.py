"""A model of several parts is served as its text decoder, with the weights of the whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fusewright.config import UserError
from fusewright.model_executor.captured.model import CapturedModel
from fusewright.model_executor.captured.shrink import shrunk
from fusewright.model_executor.captured.twin import Twin, compare, make_twin
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.loader import load_model


def twin_of(model_type: str, architecture: str) -> Twin:
    config: Any = CONFIG_MAPPING[model_type]()
    config.architectures = [architecture]
    return make_twin(config, model_type)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Twin]:
    """A folder as the library writes it, under the names of checkpoints."""
    folder = tmp_path_factory.mktemp("llava")
    twin = twin_of("llava", "LlavaForConditionalGeneration")
    whole: Any = twin.unmodified
    whole.save_pretrained(folder)
    return folder, twin


def test_logits_are_those_of_the_whole_model(llava: tuple[Path, Twin]) -> None:
    folder, twin = llava
    names = load_file(folder / "model.safetensors")
    assert any(name.startswith("language_model.model.layers") for name in names)
    spec = read_spec(folder)
    ours = load_model(spec, folder, "cpu")
    assert isinstance(ours, CapturedModel)
    assert not any("vision" in name for name, _ in ours.named_parameters())
    compare(replace(twin, spec=spec, ours=ours), ours, "llava")
    (note,) = spec.notes
    vision = sum(name.startswith("vision_tower.") for name in names)
    assert note.startswith("the text decoder of LlavaForConditionalGeneration is served alone")
    assert f"{vision} of vision_tower.*" in note and "4 of multi_modal_projector.*" in note


def test_a_tensor_that_no_part_has_is_refused(llava: tuple[Path, Twin], tmp_path: Path) -> None:
    folder, _ = llava
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"vision_tower.novel": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"has weight vision_tower\.novel, unknown to Llava"):
        load_model(read_spec(tmp_path), tmp_path, "cpu")


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("gemma3", "Gemma3ForConditionalGeneration"),
        ("mistral3", "Mistral3ForConditionalGeneration"),
        ("qwen2_audio", "Qwen2AudioForConditionalGeneration"),
    ],
)
def test_the_twin_is_compared_with_the_whole_model(model_type: str, architecture: str) -> None:
    twin = twin_of(model_type, architecture)
    assert type(twin.unmodified).__name__ == architecture and twin.ours.facts.whole
    compare(twin, twin.ours, model_type)


REFUSED = {
    ("t5", "T5ForConditionalGeneration"): "has an encoder and a decoder, which is not served",
    ("whisper", "WhisperForConditionalGeneration"): "has an encoder and a decoder",
    ("vit", "ViTForImageClassification"): "generates no text: transformers .* 'vit'; choose a",
    ("qwen2_vl", "Qwen2VLForConditionalGeneration"): "text decoder of type 'qwen2_vl_text', of",
    ("gemma3", "LlavaForConditionalGeneration"): "config.json must be the model's own",
}


@pytest.mark.parametrize(("model_type", "architecture"), list(REFUSED))
def test_what_has_no_decoder_of_its_own_is_refused(
    model_type: str, architecture: str, tmp_path: Path
) -> None:
    config = {**CONFIG_MAPPING[model_type]().to_dict(), "architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(UserError, match=REFUSED[model_type, architecture]):
        read_spec(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_config_without_a_dtype_has_that_of_the_checkpoint(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    config = shrunk(CONFIG_MAPPING["llama"]())
    values = {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_spec(tmp_path, "transformers").dtype_name == "float32"
    save_file({"model.norm.weight": torch.ones(4, dtype=dtype)}, tmp_path / "model.safetensors")
    spec = read_spec(tmp_path, "transformers")
    assert spec.dtype == dtype == read_spec(tmp_path).dtype
