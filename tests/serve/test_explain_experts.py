"""What ``explain`` says of a mixture of experts: every layer joined, launches of a token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fusewright.serve.cli import main
from tests.model_executor.tiny_models import TinyModel
from tests.serve.explained import explained_once

__all__ = ["explained_once"]
pytestmark = pytest.mark.usefixtures("explained_once")
Capture = pytest.CaptureFixture[str]
WIDE = TinyModel(
    "wide",
    "Qwen3Moe",
    {
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 4,
        "dtype": "bfloat16",
    },
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("wide")
    WIDE.config().save_pretrained(made)
    return made


def facts(folder: Path, capsys: Capture, *flags: str) -> Any:
    words = ["explain", str(folder), "--load-format", "dummy", "--target-sm", "90", "--json"]
    assert main([*words, *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_layer_is_one_op_between_attention_and_rotary(folder: Path, capsys: Capture) -> None:
    told = facts(folder, capsys, "--require-all-fusions")
    passes = {p["name"]: (p["sites"], p["matched"]) for p in told["passes"]}
    assert passes["fuse_moe"] == (4, 4)
    assert not any(site["outcome"] == "missed" for site in told["sites"])
    layers, _ = told["layers"]
    assert layers["launches"] == 7  # of csrc's kernels
    assert sum("fw_cuda::chain" in call["op"] for call in layers["calls"]) == 1
    few, more = (
        next(r for r in layers["ranges"] if r["decode"] and r["first"] == first)["kernels"]
        for first in (1, 9)
    )
    choices = [text for each in layers["ranges"] for text in each["choices"]]
    assert any(text.startswith("linear [") and " (skinny_linear: " in text for text in choices)
    assert [kernel for kernel in few if kernel.startswith("moe_")] == [
        "moe_route",
        "moe_gate_up",
        "moe_down, add",
    ]
    assert more.count("_sort_by_expert_kernel") == 1
    assert more.count("_expert_linear_kernel") == 2
    many = next(r for r in layers["ranges"] if not r["decode"] and r["first"] == 257)["kernels"]
    assert many.count("_sort_by_expert_kernel") == 1
    assert many.count("moe_grouped_linear") == 2 and "_expert_linear_kernel" not in many
    (note,) = [note for note in told["notes"] if "no tuned tiles" in note]
    assert note.startswith("128 experts of 768, bfloat16, on sm_90: no tuned tiles")
    assert f"`fusewright tune moe {folder} --output DIR`" in note


@pytest.mark.product(2)
@pytest.mark.parametrize("kind", ["fp8", "fp8_block"])
def test_fp8_experts_run_the_grouped_gemm_from_fewer_tokens_on(
    folder: Path, capsys: Capture, kind: str
) -> None:
    ranges = facts(folder, capsys, "--quantization", kind)["layers"][0]["ranges"]
    for decode in (True, False):
        begins = [r["first"] for r in ranges if r["decode"] is decode]
        assert 129 in begins and 257 not in begins
        for found in ranges:
            if found["decode"] is decode and found["first"] > 8:
                grouped = found["kernels"].count("moe_grouped_linear")
                assert grouped == (2 if found["first"] >= 129 else 0)
                assert found["kernels"].count("_expert_linear_kernel") == 2 - grouped


def test_a_captured_model_launches_what_its_adapter_does(folder: Path, capsys: Capture) -> None:
    told = [facts(folder, capsys, "--model-impl", impl) for impl in ("adapter", "transformers")]
    ours, theirs = (
        [(layer["launches"], [r["kernels"] for r in layer["ranges"]]) for layer in each["layers"]]
        for each in told
    )
    assert ours == theirs
    assert not any(site["outcome"] == "missed" for site in told[1]["sites"])


def test_a_layer_of_few_tokens_is_ten_launches_of_triton(folder: Path, capsys: Capture) -> None:
    """Nothing is sorted for them."""
    told = facts(folder, capsys, "--kernels", "chain=library")
    layers = told["layers"][0]
    assert layers["launches"] == 10
    few = next(r for r in layers["ranges"] if r["decode"] and r["first"] == 1)["kernels"]
    assert "_sort_by_expert_kernel" not in few and few.count("_expert_linear_kernel") == 2


@pytest.mark.parametrize(("scheme", "most"), [("fp8", 2), ("fp8_block", 8)])
def test_few_tokens_of_fp8_are_not_quantized(
    folder: Path, capsys: Capture, scheme: str, most: int
) -> None:
    """They take the seven launches of bfloat16; more take ten, or more when sorted."""
    told = facts(folder, capsys, "--quantization", scheme, "--require-all-fusions")
    passes = {p["name"]: (p["sites"], p["matched"]) for p in told["passes"]}
    assert passes["fuse_moe"] == (4, 4)
    layers = told["layers"][0]
    assert layers["launches"] == 7
    few, *_, many = (r["kernels"] for r in layers["ranges"] if r["decode"])
    assert next(r["last"] for r in layers["ranges"] if r["decode"]) == most
    assert not any("quant" in kernel for kernel in few)
    assert [kernel for kernel in many if "quant" in kernel] == [
        *["_quant_kernel"] * 3,
        "_norm_quant_kernel",
    ]


def test_rows_that_the_library_refuses_are_tritons_for_any_tokens(capsys: Capture) -> None:
    """Blocks of 256 columns.  What runs in PyTorch reads ids on the host, which no graph holds."""
    told = facts(Path("abacus-moe"), capsys, "--quantization", "fp8_block")
    layers = told["layers"][0]
    assert [c["op"] for c in layers["calls"] if "chain" in c["op"]] == ["fw_cuda::chain"]
    for kernels in (r["kernels"] for r in layers["ranges"]):
        assert kernels.count("_linear_fp8_kernel") == 2


def test_fp8_experts_with_static_scales_are_joined_without_their_norms(
    folder: Path, capsys: Capture
) -> None:
    told = facts(folder, capsys, "--quantization", "fp8_static")
    missed = {s["reason"] for s in told["sites"] if s["name"] == "fuse_chain"}
    assert not any(s["outcome"] == "matched" for s in told["sites"] if s["name"] == "fuse_chain")
    assert (
        "the layer before it is FP8 and its x has a static scale, for which there is no kernel"
        in missed
    )
