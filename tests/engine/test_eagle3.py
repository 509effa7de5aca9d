"""An EAGLE-3 head drafts what its definition says; outputs are those without it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright import LLM
from fusewright.config import UserError
from fusewright.engine.core.request import Request

from .eagle3_heads import DRAFT_VOCAB, HIDDEN, Reference, config_of, random_weights, save_head
from .test_speculative import KINDS, OPTIONS, PROMPTS, params

NAMES = ("greedy", "on and on", "sampled", "several", "stop text", "prompt logprobs", "presence")
FEW = {kind: KINDS[kind] for kind in (*NAMES, "one token", "bad words", "grammar")}
BUNDLED = {
    "method": "eagle3",
    "model": "abacus-eagle3",
    "num_speculative_tokens": 4,
    "adaptive": False,
}


def recorded(llm: LLM) -> list[tuple[list[int], list[int]]]:
    """The tokens that are known at each proposal, and its drafts; filled while requests run."""
    proposals: list[tuple[list[int], list[int]]] = []
    drafter = llm.engine.core.scheduler.drafts._drafter  # type: ignore[attr-defined]
    propose = drafter.propose

    def proposed(requests: Sequence[Request], most: int) -> list[list[int]]:
        known = [list(each.tokens(0, each.num_known_tokens)) for each in requests]
        drafts: list[list[int]] = propose(requests, most)
        proposals.extend(zip(known, drafts, strict=True))
        return drafts

    drafter.propose = proposed
    return proposals


FORMS: dict[str, dict[str, Any]] = {
    "SGLang": {},
    "of a captured model": {"model_impl": "transformers"},
    "norm before residual": {"norm_before_residual": True},
    "nested layer ids": {
        "eagle_aux_hidden_state_layer_ids": None,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
    },
}


@pytest.mark.parametrize("changes", FORMS.values(), ids=FORMS)
def test_a_head_drafts_what_its_definition_says(changes: dict[str, Any], tmp_path: Path) -> None:
    weights = random_weights()
    of_target = {name: changes[name] for name in changes.keys() & {"model_impl"}}
    head = save_head(tmp_path / "head", weights, config_of(**changes))
    reference = Reference(weights, norm_before_residual="norm_before_residual" in changes)
    options = OPTIONS | of_target | {"block_size": 8}
    llm = LLM("abacus", **options, speculative_config=BUNDLED | {"model": head})
    proposals = recorded(llm)
    llm.generate(PROMPTS[2:4], params(ignore_eos=True, max_tokens=8), use_tqdm=False)
    assert len(proposals) >= 10
    for known, drafts in proposals:
        assert drafts == reference.drafts(known, len(drafts)), known
    assert llm.report()["drafts"]["error"] == ""


def changed(weights: dict[str, Tensor], name: str, value: Tensor | None) -> dict[str, Tensor]:
    others = {key: tensor for key, tensor in weights.items() if key != name}
    return others if value is None else others | {name: value}


BAD: dict[str, tuple[dict[str, Any], tuple[str, Tensor | None] | None, str]] = {
    "vocabulary": ({"vocab_size": 300}, None, "vocab_size=300, and the model's is 272"),
    "hidden size": ({"hidden_size": 128}, None, "hidden_size=128, and the model's hidden_size is"),
    "layers": (
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]},
        None,
        "expected different layers, 0 to 5: the model has 5 layers",
    ),
    "no layers": ({"eagle_aux_hidden_state_layer_ids": None}, None, "the layers that the head"),
    "other model": (
        {"speculators_config": {"verifier": {"architectures": ["Qwen3ForCausalLM"]}}},
        None,
        "Qwen3ForCausalLM.* it is a head for another model",
    ),
    "older head": ({"architectures": ["LlamaForCausalLMEagle"]}, None, "EAGLE 1 or 2"),
    "no head": ({"architectures": ["LlamaForCausalLM"]}, None, "expected an EAGLE-3 head"),
    "no map": ({}, ("d2t", None), "has no tensor d2t"),
    "map beyond": ({}, ("d2t", torch.full((DRAFT_VOCAB,), 260)), "expected different ones of 0..2"),
    "other map": ({}, ("t2d", torch.zeros(272, dtype=torch.bool)), "name other tokens"),
    "shape": ({}, ("fc.weight", torch.zeros(HIDDEN, HIDDEN)), "fc.weight .* has shape"),
    "tensor": ({}, ("norm.weight", None), "lacks weight norm.weight"),
}


@pytest.mark.parametrize(("changes", "tensor", "said"), BAD.values(), ids=BAD)
def test_a_head_of_another_model_is_refused_by_name(
    changes: dict[str, Any], tensor: tuple[str, Tensor | None] | None, said: str, tmp_path: Path
) -> None:
    weights = random_weights()
    weights = changed(weights, *tensor) if tensor else weights
    head = save_head(tmp_path / "head", weights, config_of(**changes))
    with pytest.raises(UserError, match=said):
        LLM("abacus", **OPTIONS, speculative_config=BUNDLED | {"model": head})


def test_a_head_is_no_model_and_no_draft_model(tmp_path: Path) -> None:
    head = save_head(tmp_path / "head", random_weights(), config_of())
    with pytest.raises(UserError, match="is a draft head and no model"):
        LLM(head, **OPTIONS)
    wrong = BUNDLED | {"model": head, "method": "draft_model"}
    with pytest.raises(UserError, match="say method='eagle3'"):
        LLM("abacus", **OPTIONS, speculative_config=wrong)


def test_a_head_as_speculators_write_it_drafts_the_same(tmp_path: Path) -> None:
    """Its layer's configuration is nested, and its tensors have other names."""
    weights, config = random_weights(), config_of()
    own = {"architectures", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids"}
    nested = {name: value for name, value in config.items() if name not in own}
    outer = {name: config[name] for name in own} | {"transformer_layer_config": nested}
    outer |= {
        "architectures": ["Eagle3Speculator"],
        "speculators_config": {"verifier": {"architectures": ["LlamaForCausalLM"]}},
    }
    renamed = {name.replace("midlayer.", "layers.0."): t for name, t in weights.items()}
    heads = [
        save_head(tmp_path / "SGLang", weights, config),
        save_head(tmp_path / "speculators", renamed, outer),
    ]
    drafts = []
    for head in heads:
        llm = LLM("abacus", **OPTIONS, speculative_config=BUNDLED | {"model": head})
        drafts.append(recorded(llm))
        llm.generate(PROMPTS[:2], params(ignore_eos=True, max_tokens=8), use_tqdm=False)
    assert drafts[0] and drafts[0] == drafts[1]
