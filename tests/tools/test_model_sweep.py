"""What `tools/model_sweep.py` says of types whose making is known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "model_sweep.py"


@pytest.mark.slow
def test_sweep_tells_how_models_are_made(tmp_path: Path) -> None:
    out = tmp_path / "sweep.jsonl"
    types = "gpt_oss,bloom,dbrx,gemma4_assistant,roberta,mamba"
    done = subprocess.run(
        [sys.executable, TOOL, "--types", types, "--out", out],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = {line["model_type"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert {name: line["group"] for name, line in found.items()} == {
        "gpt_oss": "plain decoder",
        "bloom": "attention: own",
        "dbrx": "experts not through the interface",
        "gemma4_assistant": "not run",
        "roberta": "plain decoder",
        "mamba": "recurrent layers",
    }
    assert found["gpt_oss"]["masks"] == ["causal", "sliding_window_causal"]
    assert "s_aux" in found["gpt_oss"]["attention_arguments"]
    assert found["gpt_oss"]["experts"] == "interface"
    assert found["gpt_oss"]["positions_from_zero"] and not found["roberta"]["positions_from_zero"]
    assert "hidden_size_per_layer_input must be 0" in found["gemma4_assistant"]["error"]
    assert "   2 plain decoder: gpt_oss, roberta" in done.stderr


@pytest.mark.usefixtures("warm")
def test_unknown_types_are_named() -> None:
    done = subprocess.run(
        [sys.executable, TOOL, "--types", "llama,lama"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no causal language models of transformers: lama" in done.stderr
