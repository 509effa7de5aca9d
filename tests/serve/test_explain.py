"""``fusewright explain MODEL``: sites, pieces, launches and bytes, without compiling anything."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fusewright.model_executor.abacus import FOLDER
from fusewright.serve.cli import main
from tests.serve.explained import explained_once

__all__ = ["explained_once"]
pytestmark = pytest.mark.usefixtures("explained_once")
Capture = pytest.CaptureFixture[str]
SM_90 = ("explain", "abacus", "--target-sm", "90")
STATIC = ("--quantization", "fp8_static", "--load-format", "dummy")


def facts(capsys: Capture, *argv: str) -> Any:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_sum_over_ranks_is_a_site_that_matches_or_says_why(capsys: Capture) -> None:
    """Five layers with two sums each, and the embedding's.  No process group is needed."""
    ranks = (*SM_90, "--tensor-parallel-size", "2")
    told = facts(capsys, *ranks)
    assert told["label"].endswith("sm_90, 2 ranks")
    sites = [site for site in told["sites"] if site["name"] == "fuse_all_reduce_norm"]
    assert {site["outcome"] for site in sites} == {"matched"}
    assert sum(site["count"] for site in sites) == 11
    joined = [site for site in told["sites"] if site["name"] == "fuse_chain"]
    # All sums but the embedding's and the last are between two linear layers.
    assert {site["outcome"] for site in joined} == {"matched"}
    assert sum(site["count"] for site in joined) == 9
    few = ("--passes", "cleanup,fuse_add_norm,fuse_all_reduce_norm")
    fused = facts(capsys, *ranks, *few)
    matched = {p["name"]: (p["sites"], p["matched"]) for p in fused["passes"]}
    assert matched["fuse_all_reduce_norm"] == (11, 11)
    more = facts(capsys, *SM_90, "--tensor-parallel-size", "4", *few)
    wire = [sum(c["bytes"] for c in t["layers"][1]["calls"]) for t in (fused, more)]
    assert wire[0] != wire[1], "bytes on the wire depend on the number of ranks"


def test_the_stages_of_a_pipeline_are_told(capsys: Capture) -> None:
    """Layers, ranks and bytes of all, and the program of one, whose layers keep their numbers."""
    ranks = (*SM_90, "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2", "--batch", "3")
    told = facts(capsys, *ranks, "--stage", "1")
    assert "3 layers" in told["label"] and told["label"].endswith(", 2 ranks, last of 2 stages")
    assert [tuple(stage.values()) for stage in told["stages"]] == [
        ([0, 1], [0, 1], "hidden states to stage 1", 3 * 256 * 2),
        ([2, 4], [2, 3], "logits to rank 0", 3 * 272 * 2),
    ]
    assert [layers["title"] for layers in told["layers"]] == ["layers 2 to 4", "outside of layers"]
    assert facts(capsys, *SM_90)["stages"] == []
    assert main([*ranks]) == 0
    assert re.search(r"0 +0 to 1 +0 to 1 +hidden states to stage 1 +1536", capsys.readouterr().out)
    assert main([*ranks, "--stage", "2"]) == 2
    assert "stage=2: expected 0 to 1" in capsys.readouterr().err


def test_a_gpu_that_is_not_here_is_explained(capsys: Capture) -> None:
    told = facts(capsys, *SM_90)
    assert told["label"].endswith("bfloat16, -O2, sm_90")
    assert {p["name"]: (p["sites"], p["matched"]) for p in told["passes"]} == {
        "cleanup": (0, 0),
        "fuse_add_norm": (10, 10),
        "fuse_act": (5, 5),
        "fuse_gated_linear": (5, 5),
        "fuse_moe": (0, 0),
        "fuse_norm_quant": (0, 0),
        "fuse_all_reduce_norm": (0, 0),
        "fuse_act_quant": (0, 0),
        "fuse_chain": (9, 9),
        "fuse_attn_quant": (0, 0),
        "fuse_rope_store": (5, 5),
    }
    assert [(p["uses"], p["emitter"]) for p in told["pieces"]] == [
        (1, "direct"),
        (4, "direct"),
        (1, "direct"),
    ]
    layers, outside = told["layers"]
    assert (layers["title"], outside["title"]) == ("layers 0 to 4", "outside of layers")
    assert [(c["op"].partition("::")[2], c["launches"]) for c in layers["calls"]] == [
        ("chain", 4),  # small layers are streamed too if they are joined
        ("rope_kv_store", 1),
        ("paged_attention", 1),
    ]
    assert (layers["launches"], outside["launches"]) == (6, 4)
    # Five layers; embedding, first norm, gather and lm_head; each layer has two norms of its own.
    assert (
        told["launches"] == 5 * 6 + 4 + 1
    )  # the last norm has no layer behind it to be joined with
    weights = Path(FOLDER, "model.safetensors").stat().st_size
    assert 0.95 < told["bytes"] / weights < 1.1  # nearly all that a single token moves


def test_bytes_and_flops_follow_batch_and_context(capsys: Capture) -> None:
    one, wide, long = (
        facts(capsys, *SM_90, "--batch", b, "--context", c)
        for b, c in (("1", "128"), ("64", "128"), ("1", "4096"))
    )
    assert wide["flops"] == pytest.approx(64 * one["flops"], rel=1e-3)
    assert wide["launches"] > one["launches"]  # few rows are streamed, and joined layers with them
    attention = [
        next(c["bytes"] for c in told["layers"][0]["calls"] if c["op"].endswith("paged_attention"))
        for told in (one, long)
    ]
    assert 30 < attention[1] / attention[0] < 32


def test_a_fusion_changes_what_is_launched(capsys: Capture) -> None:
    apart = facts(capsys, *SM_90, "--disable-passes", "fuse_rope_store")
    assert apart["launches"] == facts(capsys, *SM_90)["launches"] + 5
    plain = facts(capsys, *SM_90, "--disable-passes", "fuse_act")
    assert plain["launches"] is None  # Inductor gets the activation
    before_the_first_mlp, *others = plain["pieces"]
    assert before_the_first_mlp["emitter"] == "direct"
    assert all(p["emitter"] == "inductor" and "silu" in p["reason"] for p in others)


def test_the_text_has_every_part(capsys: Capture) -> None:
    assert main(["explain", "abacus", "-O1", "--device", "cpu", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    parts = ("-O1, cpu", "fuse_act", "inductor: it can fuse", "rms_norm -> native", "in all")
    more = ("off      -O1 does not run it", "decode of 1 or more", "moves at least")
    assert all(part in out for part in (*parts, *more))


def test_required_fusions_are_counted(capsys: Capture) -> None:
    assert main([*SM_90, "--require-all-fusions"]) == 0
    capsys.readouterr()
    assert main([*SM_90, "--require-fusion", "fuse_act:6"]) == 2
    assert "fuse_act:6: only 5 sites matched" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("explain", "abacus", "-O0"), "-O0 rewrites and compiles nothing"),
        ((*SM_90, "--against", "-O7"), "against=-O7: expected a level, such as -O3"),
        ((*SM_90, "--html", "/nowhere/x.html"), "html=/nowhere/x.html: cannot be written"),
        (("explain", "abacus", "--batch", "0"), "batch=0: expected at least 1"),
        (("explain", "abacus", "--target-sm", "9"), "target_sm=9: expected a compute capability"),
    ],
)
def test_what_cannot_be_explained_is_refused(
    argv: tuple[str, ...], message: str, capsys: Capture
) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_a_missed_site_fails_when_all_are_required(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, explained_once: dict[str, Any]
) -> None:
    from torch import Tensor
    from torch.nn.functional import silu

    from fusewright.model_executor.models.moe import GatedMLP

    def up_first(self: GatedMLP, x: Tensor) -> Tensor:
        up, gate = self.gate_up(x).chunk(2, dim=-1)
        return self.down(silu(gate) * up)  # type: ignore[no-any-return]

    monkeypatch.setattr(GatedMLP, "forward", up_first)
    explained_once.clear()
    told = facts(capsys, *SM_90)
    (reason,) = {miss["reason"] for p in told["passes"] for miss in p["missed"]}
    assert main([*SM_90, "--require-all-fusions"]) == 2
    err = capsys.readouterr().err
    assert "require_all_fusions: 5 missed: fuse_gated_linear: " in err and reason in err
    explained_once.clear()


def test_requiring_all_fusions_where_none_is_expected_fails(capsys: Capture) -> None:
    assert main(["explain", "abacus", "--device", "cpu", "-O1", "--require-all-fusions"]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error:")]
    assert "no fusion is expected in" in line and "drop require_all_fusions" in line


LEFT_OUT = ("fuse_rope_store", "fuse_chain")


def test_every_site_has_a_place_and_a_reason_unless_it_matched(capsys: Capture) -> None:
    without = [part for name in LEFT_OUT for part in ("--disable-passes", name)]
    told = facts(capsys, *SM_90, "--quantization", "fp8", *without)
    sites = {(s["name"], s["layers"], s["module"]): s for s in told["sites"]}
    layers = "layers 0 to 4"
    assert sites["fuse_add_norm", layers, "attention_norm"]["count"] == 4  # layer 0 has no residual
    assert sites["fuse_add_norm", "outside of layers", "norm"]["count"] == 1
    missed = sites["fuse_attn_quant", layers, "attention.o"]
    assert missed["outcome"] == "missed" and "a scale a token" in missed["reason"]
    off = sites["fuse_rope_store", layers, "attention"]
    assert (off["outcome"], off["reason"], off["count"]) == ("off", "by --disable-passes", 5)
    told = facts(capsys, *SM_90, *STATIC)
    (gated,) = (s for s in told["sites"] if s["name"] == "fuse_gated_linear")
    assert gated["outcome"] == "off" and re.match("it (gains|loses)", gated["reason"])
    decode = r"decode 64 \S+ against \S+ ms \(\S+% ± \S+%\).*, fp8_static$"
    assert re.search(decode, gated["reason"])
    told = facts(capsys, *SM_90, "--quantization", "fp8_block")
    (gated,) = (s for s in told["sites"] if s["name"] == "fuse_gated_linear")
    assert gated["outcome"] == "missed" and "no launch would be saved" in gated["reason"]
    assert all(s["reason"] for s in told["sites"] if s["outcome"] != "matched")


def test_fusions_are_counted_or_say_why_not(capsys: Capture) -> None:
    told = facts(capsys, *SM_90, *STATIC)["fusions"]
    counts = {" + ".join(p["parts"]): p["calls"] for p in told}
    assert counts["add + RMSNorm + FP8 static"] == 9 and counts["add + RMSNorm + FP8 token"] == 0
    assert counts["RMSNorm + FP8 static"] == 1 and counts["add + RMSNorm"] == 1
    assert counts["attention + FP8 static"] == counts["rope + KV store"] == 5
    assert all(bool(p["op"]) != bool(p["reason"]) for p in told)


def test_kernels_are_told_by_range_of_tokens(capsys: Capture, tmp_path: Path) -> None:
    config = Path(__file__).with_name("golden") / "llama3-8b" / "config.json"
    shallow = {**json.loads(config.read_text()), "num_hidden_layers": 2}
    (tmp_path / config.name).write_text(json.dumps(shallow))
    argv = ("explain", str(tmp_path), "--load-format", "dummy", "--target-sm", "90", "--passes")
    few = "cleanup,fuse_add_norm,fuse_act,fuse_rope_store"
    ranges = facts(capsys, *argv, few)["layers"][0]["ranges"]
    ends = [(r["decode"], r["first"], r["last"]) for r in ranges]
    decodes = [(True, 1, 16), (True, 17, 64), (True, 65, None)]
    assert ends == [*decodes, (False, 2, 16), (False, 17, 64), (False, 65, None)]
    few, some, many, _, _, prompt = (r["kernels"] for r in ranges)
    assert few.count("skinny_linear") == 4 and "csrc paged_attention" in few
    assert some.count("cluster_linear") == 3 and some.count("cuBLAS") == 1  # gate_up
    assert many.count("cuBLAS") == 4 and "csrc prefill_attention" in prompt


def test_levels_are_compared(capsys: Capture) -> None:
    assert main([*SM_90, "--against", "-O1"]) == 0
    out = capsys.readouterr().out
    assert "fuse_act, layers 0 to 4, mlp" in out and "5 off: -O1 does not run it" in out
    assert "launches of the step" in out and "add_rms_norm -> " in out
    assert main([*SM_90, "--against=-O2"]) == 0
    assert capsys.readouterr().out == "-O2 and -O2 do the same\n"
    told = facts(capsys, *SM_90, "--against", "1")["against"]
    assert told["figures"]["launches of the step"] == ["35", "None"]


def test_a_level_that_measures_says_what_it_cannot_know(capsys: Capture) -> None:
    measured, *_ = facts(capsys, *SM_90, "-O3")["notes"]
    assert "-O3 chooses kernels by measurement" in measured
    assert main([*SM_90, "--against", "-O3"]) == 0
    sentence, header, _, row = capsys.readouterr().out.splitlines()
    assert sentence == "What holds of one of them only."
    assert header.split() == ["notes", "-O2", "-O3"], "sites, launches and bytes are the same"
    assert row.removeprefix(measured).split() == ["-", "holds"]


def test_the_page_stands_alone_and_has_graphs(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "explained.html"
    assert main([*SM_90, "--html", str(path), "--against", "-O1"]) == 0
    text = path.read_text()
    assert not re.search(r"(src|href)=|@import|<script|<link", text)
    # One layer and what is outside of all, before and after the passes.
    graphs = re.findall(r"<pre>(.*?)</pre>", text, re.DOTALL)
    assert len(graphs) == 4 and all(graphs)
    before, after = graphs[:2]
    assert "fw_cuda::chain" in after and "fw_cuda" not in before
    assert "Against -O1" in text and "fuse_add_norm" in text


def test_graphs_are_printed_before_and_after(capsys: Capture) -> None:
    assert main([*SM_90, "--graphs"]) == 0
    out = capsys.readouterr().out
    _, _, rest = out.partition("layers 0 to 4, before the passes:\n")
    before, _, rest = rest.partition("layers 0 to 4, after the passes:\n")
    after = rest.partition("\n\n")[0]
    assert "silu" in before and "silu_mul" not in before
    assert "fw_cuda::chain" in after and "fw_triton::rope_kv_store" in after


def test_what_was_verified_is_told(capsys: Capture) -> None:
    argv = [*SM_90, "--verify", "--passes", "cleanup,fuse_add_norm,fuse_act"]
    assert main(argv) == 0
    out = capsys.readouterr().out  # verified on a CPU, for a GPU
    assert re.search(r"\nfuse_add_norm +\S+ +the same bits\n", out)
    assert re.search(r"\nfuse_act +mul +within tolerance\n", out)
    assert main([*argv, "--verbose"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\nfuse_add_norm +\S+ +the same bits +0 +0 +0 +0 +\d+\n", out)
    numbers = r"\S+ +0\.007\d+ +1e-06 +0\.00781 +\d+"
    assert re.search(rf"\nfuse_act +mul +within tolerance +{numbers}\n", out)


def test_a_newcomer_can_read_it(capsys: Capture) -> None:
    """Each table is below a sentence, no figure is 0.000 of its unit, and a model without FP8
    is not bothered with it."""
    assert main([*SM_90]) == 0
    out = capsys.readouterr().out
    parts = out.split("\n\n")
    tables = [part.splitlines() for part in parts if re.search(r"^-+(  -+)+$", part, re.M)]
    assert len(tables) == 6
    assert all(re.fullmatch(r"[A-Z].*\.", lines[0]) and "---" in lines[2] for lines in tables)
    assert "35 kernel launches, moves 7." in parts[1] and "0.000 TFLOP" not in out
    assert "fp8" not in out.lower()
    assert main([*SM_90, "--quantization", "fp8"]) == 0
    assert "FP8 token" in capsys.readouterr().out
