"""A warm start of a captured model reads its description instead of importing its library."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fusewright import LLM, SamplingParams
from fusewright.compiler.artifacts.store import Store
from fusewright.config.errors import UserError
from fusewright.model_executor.captured import described
from fusewright.model_executor.captured.described import described_spec
from fusewright.model_executor.captured.skeleton import Skeleton
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.hf_json import read_json
from fusewright.model_executor.spec import ModelSpec
from tests.engine.damages import flip
from tests.engine.start_process import environment, open_folder, run

pytestmark = pytest.mark.slow

GREEDY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
PROMPTS = [[5, 9, 3], list(range(3, 40))]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Cold:
    """A folder with a small model without an adapter, a store with its artifact, and what the start
    that compiled it gave."""

    def __init__(self, folder: Path) -> None:
        from transformers import StableLmConfig, StableLmForCausalLM

        self.folder, self.store = folder / "model", folder / "store"
        config = StableLmConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            initializer_range=0.5,
        )
        torch.manual_seed(0)
        StableLmForCausalLM(config).save_pretrained(self.folder)
        # Both tensors of the tied pair are there, so that their bits decide.
        file = self.folder / "model.safetensors"
        tensors = load_file(file)
        save_file(tensors | {HEAD: tensors[EMBEDDING].clone()}, file, {"format": "pt"})
        self.tokens, llm = self.start()
        assert llm["artifact"]["built"]
        self.key, self.reads = llm["artifact"]["key"], llm["reads"]
        self.weights = llm["memory"]["weights"]

    def options(self, **more: Any) -> dict[str, Any]:
        given = {
            "model": str(self.folder),
            "device": "cpu",
            "dtype": "float32",
            "optimization_level": 1,
            "proof": False,
            "compile_cache_dir": (str(self.store),),
            "max_model_len": 64,
            "num_gpu_blocks_override": 32,
        }
        return given | more

    def start(self, **more: Any) -> tuple[list[list[int]], dict[str, Any]]:
        with LLM(**self.options(**more)) as llm:
            outputs = llm.generate(PROMPTS, SamplingParams(**GREEDY), use_tqdm=False)
            facts = llm.report() | {"model": type(llm.engine.weights.result())}  # type: ignore[attr-defined]
        return [list(each.outputs[0].token_ids) for each in outputs], facts

    def described(self) -> ModelSpec | None:
        """The spec as the store describes it."""
        values = read_json(self.folder / "config.json")
        return described_spec(self.folder, values, Store([self.store]).having)


@pytest.fixture(scope="module")
def cold() -> Iterator[Cold]:
    with open_folder() as folder:
        yield Cold(folder)


@pytest.fixture
def copy(cold: Cold, tmp_path: Path) -> Cold:
    """The model and the store, to be changed."""
    made = Cold.__new__(Cold)
    vars(made).update(vars(cold), folder=tmp_path / "model", store=tmp_path / "store")
    shutil.copytree(cold.folder, made.folder)
    shutil.copytree(cold.store, made.store)
    return made


def test_a_warm_start_imports_neither_the_library_nor_a_compiler(cold: Cold) -> None:
    with open_folder() as folder:
        env = environment(folder) | {
            name: value for name, value in os.environ.items() if name == "TRITON_INTERPRET"
        }
        start = cold.options(require_cache=True, compile_cache_dir=[str(cold.store)])
        batches = [[[prompt, GREEDY] for prompt in PROMPTS]]
        done = run("start_all", env=env, guard=True, starts=[start], batches=batches)
    (told,) = done["told"]
    assert [each["token_ids"] for each in told["outputs"][0]] == cold.tokens
    assert told["artifact"] == {"key": cold.key, "built": False}
    assert done["loaded"] == []


def test_a_described_model_has_the_tensors_of_the_captured_one(cold: Cold) -> None:
    tokens, facts = cold.start(require_cache=True)
    assert facts["model"] is Skeleton
    assert tokens == cold.tokens
    assert (facts["reads"], facts["memory"]["weights"]) == (cold.reads, cold.weights)
    assert cold.described() == read_spec(cold.folder)


def test_a_damaged_description_is_refused_and_made_again(copy: Cold) -> None:
    (file,) = copy.store.glob("artifacts/*/described/*/model.json")
    flip(file, 100)
    with pytest.raises(UserError, match=r"model\.json: has SHA-256 .* expected") as refused:
        copy.start(require_cache=True)
    assert "\n" not in str(refused.value)
    tokens, facts = copy.start()
    assert facts["artifact"] == {"key": copy.key, "built": True}
    assert tokens == copy.tokens
    assert copy.described() is not None


def change_header(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def untie(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[HEAD][0] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def change_config(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 96', '"vocab_size": 95'))


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("change", [change_header, untie, change_config, remove_weights])
def test_another_model_is_not_described(copy: Cold, change: Any) -> None:
    assert copy.described() is not None
    change(copy.folder)
    assert copy.described() is None


def test_a_checkpoint_of_another_form_is_read_by_the_library(copy: Cold) -> None:
    change_header(copy.folder)
    tokens, facts = copy.start(require_cache=True)
    assert facts["model"] is not Skeleton
    assert (tokens, facts["artifact"]) == (copy.tokens, {"key": copy.key, "built": False})


def test_the_version_of_the_library_counts_where_it_is_installed(
    cold: Cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = described.version

    def other(package: str) -> str:
        return "4.0.0" if package == "transformers" else real(package)

    def none(package: str) -> str:
        if package == "transformers":
            raise PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(described, "version", other)
    assert cold.described() is None
    monkeypatch.setattr(described, "version", none)
    spec = cold.described()
    assert spec is not None
    assert "transformers is not installed" in spec.notes[-1]
