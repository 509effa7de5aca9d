"""How parameters of captured models are split follows from what reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GlmConfig, GPT2Config, LlamaConfig, Olmo2Config, Qwen3MoeConfig

from fusewright.config import UserError
from fusewright.model_executor.captured.facts import CapturedFacts
from fusewright.model_executor.captured.ranks import plan
from fusewright.model_executor.captured.read import spec_of

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "pad_token_id": 0,
}
LAYER = "model.layers.0."


def facts(config: Any, ranks: int) -> CapturedFacts:
    captured = spec_of(config, "a model", "Model", ranks=ranks).captured
    assert captured is not None
    return captured


def split(of: CapturedFacts) -> dict[str, tuple[str, list[tuple[int, int]]]]:
    """Kind, and size and units of each part, where several ranks hold a unit."""
    return {
        shard.name.removeprefix(LAYER).removesuffix(".weight"): (
            shard.kind,
            [(part.size, part.units * part.replicate) for part in shard.rule.parts],
        )
        for shard in of.shards
    }


def test_fewer_kv_heads_than_ranks_are_held_by_several() -> None:
    found = facts(LlamaConfig(**SIZES), 4)
    assert split(found) == {
        "model.embed_tokens": ("vocabulary", [(64, 0)]),
        "self_attn.q_proj": ("column", [(48, 0)]),
        "self_attn.k_proj": ("column", [(24, 2)]),
        "self_attn.v_proj": ("column", [(24, 2)]),
        "self_attn.o_proj": ("row", [(48, 0)]),
        "mlp.gate_proj": ("column", [(40, 0)]),
        "mlp.up_proj": ("column", [(40, 0)]),
        "mlp.down_proj": ("row", [(40, 0)]),
        "lm_head": ("column", [(64, 0)]),
    }
    assert [(call.ranks, call.local_kv_heads) for call in found.attention] == [(4, 1)]
    assert not found.unsplit


def test_heads_that_do_not_divide_stay_whole_and_say_why() -> None:
    sizes = {**SIZES, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16}
    found = facts(LlamaConfig(**sizes), 2)
    assert {*split(found)} >= {"mlp.gate_proj", "mlp.down_proj", "lm_head"}
    assert not [name for name in split(found) if "self_attn" in name]
    whole = dict(found.unsplit)
    assert whole["model.layers.*.self_attn.q_proj.weight"] == "3 units do not spread over 2 ranks"
    assert [call.ranks for call in found.attention] == [1]


@pytest.mark.parametrize(
    ("config", "name", "parts"),
    [
        (GlmConfig(**SIZES), "mlp.gate_up_proj", [(40, 0), (40, 0)]),
        (Olmo2Config(**SIZES), "self_attn.k_norm", [(24, 0)]),
        (
            GPT2Config(vocab_size=64, n_embd=48, n_layer=1, n_head=4, n_positions=64),
            "transformer.h.0.attn.c_attn",
            [(48, 0), (48, 0), (48, 0)],
        ),
        (
            Qwen3MoeConfig(**SIZES, moe_intermediate_size=10, num_experts=4, num_experts_per_tok=2),
            "mlp.experts.gate_up_proj",
            [(10, 0), (10, 0)],
        ),
    ],
    ids=["gate and up", "norm of all heads", "q, k and v", "experts"],
)
def test_what_one_weight_holds_is_split_by_its_parts(
    config: Any, name: str, parts: list[tuple[int, int]]
) -> None:
    assert split(facts(config, 2))[name][1] == parts


def test_a_plan_that_the_models_own_contradicts_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = plan.build

    def other(*args: Any) -> nn.Module:
        model: Any = real(*args)
        model._tp_plan = {"model.layers.*.mlp.down_proj": "colwise"}
        return model  # type: ignore[no-any-return]

    monkeypatch.setattr(plan, "build", other)
    with pytest.raises(UserError, match=r"down_proj\.weight would be split by rows, .*'colwise'"):
        facts(LlamaConfig(**SIZES), 2)


def test_layers_that_stay_whole_have_one_order_in_every_process() -> None:
    """Ranks compare their plans, and an artifact's key has them."""
    error = plan.NotSpreadError("a reason")
    error.origins = frozenset(f"layer_{letter}.weight" for letter in "abcdefghijklmnop")
    weights: Any = {name: torch.empty(1) for name in error.origins}
    planner = plan._Planner(2, "", {}, set(), {}, {}, {}, weights, {}, {})
    planner.refuse(error)
    assert [name for name, _ in planner.whole] == sorted(error.origins)


def test_a_model_of_which_nothing_divides_is_refused() -> None:
    with pytest.raises(UserError, match=r"tensor_parallel_size=7: nothing of .* can be split"):
        facts(LlamaConfig(**SIZES), 7)
