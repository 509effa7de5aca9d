"""Where experts have no tuned tiles, the start says the exact command, loudly on other GPUs."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusewright.config import EngineOptions, Hardware, ResolvedConfig
from fusewright.config.device_table import DeviceTable
from fusewright.config.expert_tables import ExpertTable, ExpertTile
from fusewright.engine.worker.startup import read_model
from fusewright.engine.worker.untuned_experts import say_how_to_tune, why_tune
from fusewright.model_executor.spec import ModelSpec, quantize_online
from tests.model_executor.tiny_models import BY_NAME

H200 = Hardware("cuda", "NVIDIA H200", sm=90, num_sms=132, graphs="cuda")
H100 = replace(H200, name="NVIDIA H100 80GB HBM3")
TILE = ExpertTile(16, 64, 64, 1, 4, 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "a model"
    BY_NAME["qwen3_moe"].config().save_pretrained(made)
    return made


def resolved(folder: Path, hardware: Hardware, **given: Any) -> tuple[ModelSpec, ResolvedConfig]:
    _, spec, config = read_model(
        EngineOptions(model=str(folder), load_format="dummy", **given), hardware
    )
    return spec, config


def test_the_command_is_that_of_this_model_on_this_rank(folder: Path) -> None:
    note = why_tune(*resolved(folder, H200))
    assert "16 experts of 32, bfloat16, on NVIDIA H200: no tuned tiles" in note
    assert f"`fusewright tune moe '{folder}' --output DIR`" in note and "lose up to 5 %" in note
    spec, config = resolved(folder, H100)
    assert "how much is not known here" in why_tune(spec, config)
    halves = replace(spec, tensor_parallel_size=2)
    assert f"'{folder}' --tp 2 --output DIR`" in why_tune(halves, config)


def test_tuned_tiles_dense_models_and_a_cpu_need_no_command(folder: Path) -> None:
    spec, config = resolved(folder, H200)
    for kind in ("bfloat16", "fp8"):
        experts = ExpertTable(16, 32, kind, ((64, TILE),))
        table = DeviceTable("a.json", H200.name, 90, 132, experts=(experts,))
        with_table = replace(config, compile=replace(config.compile, tables=(table,)))
        assert bool(why_tune(spec, with_table)) is (kind == "fp8")
    assert not why_tune(replace(spec, moe=None), config)
    assert not why_tune(quantize_online(spec, "int4_g32"), config), "none are tuned of 4 bits"
    assert not why_tune(replace(spec, expert_parallel=True), config)
    assert not why_tune(spec, replace(config, hardware=Hardware("cpu", "a CPU")))


@pytest.mark.parametrize(
    ("hardware", "level"), [(H200, logging.INFO), (H100, logging.WARNING)], ids=["H200", "H100"]
)
def test_it_is_a_warning_where_the_rule_was_not_measured(
    folder: Path, hardware: Hardware, level: int, said: list[logging.LogRecord]
) -> None:
    say_how_to_tune(*resolved(folder, hardware))
    (line,) = said
    assert line.levelno == level and "no tuned tiles" in line.getMessage()
