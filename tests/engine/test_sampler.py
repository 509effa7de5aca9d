"""What the sampler hands to its ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusewright import LLM, SamplingParams


def test_logits_are_copied_only_where_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("abacus", device="cpu", dtype="bfloat16", optimization_level=0, max_model_len=64)
    sampler = llm.engine.core.runner.sampler
    table, seen = sampler._ops, set()

    def recorded(name: str, *args: Any) -> Any:
        if name == "sample":
            seen.add(args[0].dtype)
        return table(name, *args)

    monkeypatch.setattr(sampler, "_ops", recorded)
    drawn: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "max_tokens": 3, "seed": 5}
    for given, expected in [
        ({}, torch.bfloat16),
        ({"presence_penalty": 0.1}, torch.float32),
        ({"min_tokens": 3}, torch.float32),
    ]:
        seen.clear()
        llm.generate("37+58=", SamplingParams(**drawn, **given), use_tqdm=False)
        assert seen == {expected}, given
