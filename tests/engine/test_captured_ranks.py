"""Two ranks of a model without an adapter give what its unmodified implementation gives."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusewright import LLM, SamplingParams
from fusewright.config import EngineOptions, Hardware, ModelLimits
from fusewright.config.resolve import resolve
from fusewright.engine.worker.proof import Program, rewritten_program
from fusewright.model_executor.captured.model import CapturedModel
from fusewright.model_executor.captured.skeleton import Skeleton
from fusewright.model_executor.captured.twin import Twin, compare
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.loader import load_model
from fusewright.model_executor.parallel import GROUP
from fusewright.model_executor.spec import ModelSpec
from tests.engine.captured import save
from tests.ranks import in_ranks, name_world

FEW = ("phi3", "olmo2", "gpt2", "gpt_oss")
MORE = (
    ("llama", "qwen3", "gemma2", "glm4"),
    ("gemma3_text", "cohere2", "granite", "opt"),
    ("qwen3_moe", "mixtral", "qwen2_moe", "gpt_neox"),
)
"""Of the few: packed q, k and v, gate and up; norms over all heads; matrices that are transposed;
experts with biases in pairs of columns, and sinks.  The more are split in the same ways."""


@dataclass
class Prepared:
    """A family before its ranks are forked: with the model of rank 0, whose tensors the program
    has."""

    folder: Path
    unmodified: Any
    spec: ModelSpec
    model: CapturedModel
    program: Program


_prepared: dict[str, Prepared] = {}


def prepare(world: int) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    options = EngineOptions(optimization_level=2, device="cpu")
    config = resolve(options, Hardware("cpu", "cpu"), ModelLimits(4096, "float32")).compile
    for name in os.environ["FAMILIES"].split():
        folder = Path(os.environ["FOLDER"]) / name
        unmodified = save(name, folder)
        spec = replace(
            read_spec(folder, "transformers", ranks=world),
            tensor_parallel_size=world,
            dtype_name="float32",
        )
        model = load_model(spec, folder, "cpu")
        assert isinstance(model, CapturedModel)
        program = rewritten_program(spec, model, config)
        _prepared[name] = Prepared(folder, unmodified, spec, model, program)


def run(rank: int, world: int) -> dict[str, list[float]]:
    """The largest differences of the logits of each family: as it is, and rewritten."""
    name_world(GROUP)
    found = {}
    for name, of in _prepared.items():
        own = load_model(of.spec, of.folder, "cpu", rank=rank)
        tensors = [*of.model.parameters(), *of.model.buffers()]
        for tensor, mine in zip(tensors, [*own.parameters(), *own.buffers()], strict=True):
            tensor.copy_(mine)
        twin = Twin(of.spec, of.model, of.unmodified)
        steps = (of.model, of.program.step)
        found[name] = [compare(twin, step, name).error for step in steps]
    return found


def answer(families: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAMILIES", " ".join(families))
    monkeypatch.setenv("FOLDER", str(folder / "models"))
    (folder / "ranks").mkdir()
    for found in in_ranks(run, 2, folder / "ranks"):
        assert [*found] == [*families]
        assert max(error for errors in found.values() for error in errors) < 1e-4, found


@pytest.mark.product(3, of="ranks that compile")
def test_two_ranks_give_the_logits_of_the_unmodified_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fw_seed: int, fw_cases: int
) -> None:
    """In chunks and decodes, as the model is and as the passes of ``-O2`` rewrite it; one of the
    few has its turn with each seed."""
    answer(FEW if fw_cases > 1 else FEW[fw_seed % 4 :: 4], tmp_path, monkeypatch)


@pytest.mark.thorough
@pytest.mark.parametrize("families", MORE, ids=lambda families: families[0])
def test_two_ranks_of_more_families_give_their_logits(
    families: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(families, tmp_path, monkeypatch)


@pytest.mark.product(3, of="ranks that compile")
@pytest.mark.slow
def test_ranks_answer_as_one_and_start_warm_without_the_library(tmp_path: Path) -> None:
    """Through the whole engine; the second start of two ranks has tensors without code."""
    folder = tmp_path / "model"
    save("phi3", folder)
    one = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_model_len": 64}
    two = {**one, "tensor_parallel_size": 2, "compile_cache_dir": (str(tmp_path / "store"),)}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    given = []
    for options in (
        {**one, "optimization_level": 0},
        {**two, "optimization_level": 2, "proof": False},
        {**two, "optimization_level": 2, "proof": False, "require_cache": True},
    ):
        with LLM(str(folder), **options) as llm:
            outputs = llm.generate([[5, 9, 3], list(range(3, 40))], params, use_tqdm=False)
            given.append([list(each.outputs[0].token_ids) for each in outputs])
            report, model = llm.report(), llm.engine.weights.result()  # type: ignore[attr-defined]
            if llm.engine.spec.tensor_parallel_size == 2:  # type: ignore[attr-defined]
                depth = model.spec.num_layers
                split = {"vocabulary": 1, "column": 2 * depth + 1, "row": 2 * depth}
                assert report["ranks"]["split"] == split
    assert given[1] == given[0] == given[2]
    assert isinstance(model, Skeleton)
