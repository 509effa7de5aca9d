"""An EAGLE-3 head drafts what its definition says; outputs are those without it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fusewright import LLM
from fusewright.engine.core.request import Request

from .eagle3_heads import Reference, config_of, random_weights, save_head
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
    "norm before residual": {"norm_before_residual": True},
    "nested layer ids": {
        "eagle_aux_hidden_state_layer_ids": None,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
    },
}


@pytest.mark.parametrize("changes", FORMS.values(), ids=FORMS)
def test_a_head_drafts_what_its_definition_says(changes: dict[str, Any], tmp_path: Path) -> None:
    weights = random_weights()
    head = save_head(tmp_path / "head", weights, config_of(**changes))
    reference = Reference(weights, norm_before_residual="norm_before_residual" in changes)
    llm = LLM("abacus", **OPTIONS, block_size=8, speculative_config=BUNDLED | {"model": head})
    proposals = recorded(llm)
    kind = params(ignore_eos=True, max_tokens=12)
    llm.generate(PROMPTS, kind, use_tqdm=False)
    assert len(proposals) > 40
    for known, drafts in proposals:
        assert drafts == reference.drafts(known, len(drafts)), known
    assert llm.report()["drafts"]["error"] == ""
