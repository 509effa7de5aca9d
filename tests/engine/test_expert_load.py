"""Tokens are counted for the experts that transformers' routers choose for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fusewright import LLM, SamplingParams
from fusewright.config import UserError
from fusewright.serve.cli import main
from tests.model_executor.tiny_models import BY_NAME


@pytest.mark.product
@pytest.mark.parametrize(("name", "level"), [("qwen2_moe", 0), ("mixtral", 2)])
def test_every_computed_token_counts_once(name: str, level: int, tmp_path: Path) -> None:
    """Padding, which steps of three requests have in a graph, counts nowhere."""
    model = BY_NAME[name].model()
    model.save_pretrained(tmp_path)
    options = {"device": "cpu", "dtype": "float32", "record_expert_load": True}
    with LLM(str(tmp_path), optimization_level=level, max_num_seqs=4, **options) as llm:
        assert all(not sum(row["tokens"]) for row in llm.report()["expert_load"])
        prompts = [{"prompt_token_ids": list(range(3, n))} for n in (5, 9, 20)]
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found = {row["layer"]: row for row in llm.report()["expert_load"]}
    expected = dict.fromkeys(found, torch.zeros(()))
    for output in outputs:
        computed = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
        with torch.no_grad():
            result = model(torch.tensor([computed]), output_router_logits=True)
        for layer, logits in zip(found, result.router_logits, strict=True):
            chosen = logits.topk(model.config.num_experts_per_tok, -1).indices.flatten()
            counts = torch.bincount(chosen, minlength=model.config.num_experts)
            expected[layer] = expected[layer] + counts
    for layer, row in found.items():
        assert row["tokens"] == expected[layer].tolist()
        assert row["idle"] == row["tokens"].count(0)
        mean = sum(row["tokens"]) / len(row["tokens"])
        assert row["most_over_mean"] == pytest.approx(max(row["tokens"]) / mean, abs=1e-3)


def test_profile_says_how_experts_share_the_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    BY_NAME["qwen3_moe"].save(tmp_path / "model")
    sizes = ["--batch-size", "2", "--input-len", "4", "--output-len", "8", "--device", "cpu"]
    steps = ["--delay-iterations", "0", "--max-iterations", "2", "-O0", "--record-expert-load"]
    out = tmp_path / "out"
    assert main(["profile", str(tmp_path / "model"), *sizes, *steps, "--output", str(out)]) == 0
    assert "experts of layer" in capsys.readouterr().out
    rows = json.loads((out / "experts.json").read_text())["rows"]
    assert rows and all(sum(row["tokens"]) > 0 for row in rows)


def test_a_dense_model_has_nothing_to_count() -> None:
    with pytest.raises(UserError, match="record_expert_load: the model has no experts"):
        LLM("abacus", device="cpu", record_expert_load=True)
