"""A captured model has the fusions of one with an adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusewright.compiler.build import Lowered, lower_model
from fusewright.compiler.record import Record
from fusewright.compiler.timer import Timer
from fusewright.config import EngineOptions
from fusewright.engine.aot_compile import target_hardware
from fusewright.engine.worker.source import model_source
from fusewright.engine.worker.startup import read_model
from tests.engine.captured import save

OF_EVERY_LAYER = ("rope_table", "fuse_act", "fuse_gated_linear", "canonicalize_norm")
MODELS: dict[str, tuple[str, ...]] = {
    "llama": ("fuse_chain", "fuse_add_norm", "fuse_rope_store"),
    "gemma3_text": ("fuse_chain", "fuse_add_norm", "fuse_rope_store"),
    "olmo2": ("fuse_chain", "fuse_rope_store"),
    "glm4": ("fuse_chain", "fuse_add_norm", "fuse_rope_store"),
    "granite": ("fuse_chain", "fuse_add_norm", "fuse_rope_store"),
    "qwen3_moe": ("canonicalize_route", "fuse_moe", "fuse_rope_store"),
}
"""The passes that match in a layer of each type beside ``OF_EVERY_LAYER``: angles of two kinds;
norms of the whole width ahead of the heads; pairs of neighbours in a part of each head; products.
All but Llama and Granite have post-norms."""


def lowered(folder: Path) -> Lowered:
    """The model as it runs on an H100 at ``-O2``."""
    options = EngineOptions(
        model=str(folder), load_format="dummy", dtype="bfloat16", model_impl="transformers"
    )
    _, spec, config = read_model(options, target_hardware(options, 90))
    source, timer = model_source(spec, config), Timer(lambda phase: None)
    return lower_model(source, config.compile, sm=90, timer=timer, record=Record(), csrc=True)


@pytest.mark.product(6)
@pytest.mark.parametrize("model_type", MODELS)
def test_every_layer_has_its_fusions(model_type: str, tmp_path: Path) -> None:
    depth = save(model_type, tmp_path).config.num_hidden_layers
    made = lowered(tmp_path)
    found = {report.name: report for report in made.reports}
    for name in (*OF_EVERY_LAYER, *MODELS[model_type]):
        assert found[name].matched >= depth, name
        assert name == "fuse_chain" or not found[name].missed, name
    assert not found["drop_batch"].missed
    tables = {source.name for source in made.traced.inputs if "constants/" in source.name}
    assert len(tables) == len(made.plan.constants) == (2 if model_type == "gemma3_text" else 1)


def test_a_layer_of_layer_norms_and_relu_has_its_fusions(tmp_path: Path) -> None:
    depth = save("opt", tmp_path).config.num_hidden_layers
    found = {report.name: report for report in lowered(tmp_path).reports}
    for name in ("canonicalize_norm", "fuse_add_norm", "fuse_gated_linear", "scale_attention"):
        assert found[name].matched >= depth and not found[name].missed, name
    assert found["fuse_chain"].matched >= depth
