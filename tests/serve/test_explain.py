"""``fusewright explain MODEL``: sites, pieces, launches and bytes, without compiling anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fusewright.model_executor.abacus import FOLDER
from fusewright.serve.cli import main

Capture = pytest.CaptureFixture[str]
SM_90 = ("explain", "abacus", "--target-sm", "90")


def facts(capsys: Capture, *argv: str) -> Any:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_gpu_that_is_not_here_is_explained(capsys: Capture) -> None:
    told = facts(capsys, *SM_90)
    assert told["label"].endswith("bfloat16, -O2, sm_90")
    assert {p["name"]: (p["sites"], p["matched"]) for p in told["passes"]} == {
        "cleanup": (0, 0),
        "fuse_add_norm": (10, 10),
        "fuse_act": (5, 5),
        "fuse_norm_quant": (0, 0),
        "fuse_act_quant": (0, 0),
        "fuse_attn_quant": (0, 0),
        "fuse_rope_store": (5, 5),
    }
    assert [(p["uses"], p["emitter"]) for p in told["pieces"]] == [
        (1, "direct"),
        (4, "direct"),
        (1, "direct"),
    ]
    layer = [call["op"].partition("::")[2] for call in told["layer"]]
    assert layer[0] == "paged_attention" and layer.count("linear") == 4 and len(layer) == 9
    assert all(call["launches"] == 1 for call in told["layer"])
    # Five layers; embedding, first norm, gather and lm_head; each layer has two norms of its own.
    assert told["launches"] == 5 * 9 + 4
    weights = Path(FOLDER, "model.safetensors").stat().st_size
    assert 0.95 < told["bytes"] / weights < 1.1  # nearly all that a single token moves


def test_bytes_and_flops_follow_batch_and_context(capsys: Capture) -> None:
    one, wide, long = (
        facts(capsys, *SM_90, "--batch", b, "--context", c)
        for b, c in (("1", "128"), ("64", "128"), ("1", "4096"))
    )
    assert wide["flops"] == 64 * one["flops"] and wide["launches"] == one["launches"]
    attention = [told["layer"][0]["bytes"] for told in (one, long)]
    assert 30 < attention[1] / attention[0] < 32


def test_a_fusion_changes_what_is_launched(capsys: Capture) -> None:
    apart = facts(capsys, *SM_90, "--disable-passes", "fuse_rope_store")
    assert apart["launches"] == 5 * 10 + 4
    plain = facts(capsys, *SM_90, "--disable-passes", "fuse_act")
    assert plain["launches"] is None  # Inductor gets the activation
    before_the_first_mlp, *others = plain["pieces"]
    assert before_the_first_mlp["emitter"] == "direct"
    assert all(p["emitter"] == "inductor" and "silu" in p["reason"] for p in others)


def test_a_step_without_logits_is_explained(capsys: Capture) -> None:
    passes = ("--passes", "cleanup,fuse_lm_head_argmax")
    plain, either = facts(capsys, *SM_90, *passes[:1], "cleanup"), facts(capsys, *SM_90, *passes)
    assert plain["greedy"] is None and either["greedy"].endswith("::lm_head_argmax")
    assert all(either[key] == plain[key] for key in ("launches", "bytes", "flops", "layer"))
    assert {p["name"]: p["matched"] for p in either["passes"]}["fuse_lm_head_argmax"] == 1
    assert main([*SM_90, *passes]) == 0
    assert "without logits its last call is fw_" in capsys.readouterr().out


def test_the_text_has_every_part(capsys: Capture) -> None:
    assert main(["explain", "abacus", "-O1", "--device", "cpu", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    for part in ("-O1, cpu", "cleanup", "inductor: it can fuse", "rms_norm -> native", "in all"):
        assert part in out


def test_required_fusions_are_counted(capsys: Capture) -> None:
    assert main([*SM_90, "--require-all-fusions"]) == 0
    capsys.readouterr()
    assert main([*SM_90, "--require-fusion", "fuse_act:6"]) == 2
    assert "fuse_act:6: only 5 sites matched" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("explain",), "nothing to explain; name a model"),
        (("explain", "abacus", "-O0"), "-O0 rewrites and compiles nothing"),
        (("explain", "abacus", "-O3", "--target-sm", "90"), "-O3 chooses kernels by measurement"),
        (("explain", "abacus", "--batch", "0"), "batch=0, context=128: expected at least 1"),
        (("explain", "abacus", "--target-sm", "9"), "target_sm=9: expected a compute capability"),
    ],
)
def test_what_cannot_be_explained_is_refused(
    argv: tuple[str, ...], message: str, capsys: Capture
) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_a_missed_site_fails_when_all_are_required(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch import Tensor
    from torch.nn.functional import silu

    from fusewright.model_executor.models.decoder import MLP

    def up_first(self: MLP, x: Tensor) -> Tensor:
        up, gate = self.gate_up(x).chunk(2, dim=-1)
        return self.down(silu(gate) * up)  # type: ignore[no-any-return]

    monkeypatch.setattr(MLP, "forward", up_first)
    told = facts(capsys, *SM_90)
    (reason,) = {miss["reason"] for p in told["passes"] for miss in p["missed"]}
    assert main([*SM_90, "--require-all-fusions"]) == 2
    err = capsys.readouterr().err
    assert "require_all_fusions: 5 missed: fuse_act: " in err and reason in err
