"""Site tables of real models at the level that fuses, as files that a change of the passes moves.

``pytest tests/serve/test_golden.py --fw-update-golden`` writes them anew: read the difference
before you commit it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fusewright.compiler.inspect.explain import Explanation
from fusewright.config import EngineOptions
from fusewright.engine.explain import explain_model
from fusewright.serve.commands.explain_text import golden

GOLDEN = Path(__file__).with_name("golden")
MODELS = ("llama3-8b", "qwen3-8b")
WEIGHTS = ("bfloat16", "fp8_static", "fp8", "fp8_block")
MOST_LAUNCHES = {"bfloat16": 6, "fp8": 6, "fp8_static": 9}
"""Most launches of a layer at one token (vLLM: 14.9)."""


def explained(model: str, weights: str) -> Explanation:
    options = EngineOptions(
        model=str(GOLDEN / model),
        load_format="dummy",
        quantization=None if weights == "bfloat16" else weights,
        optimization_level=2,
    )
    return explain_model(options, target_sm=90)[1]


@pytest.mark.product
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("model", MODELS)
def test_sites_and_launches_are_as_checked_in(
    model: str, weights: str, pytestconfig: pytest.Config
) -> None:
    facts = explained(model, weights)
    path = GOLDEN / model / f"{weights}.txt"
    if pytestconfig.getoption("--fw-update-golden"):
        path.write_text(golden(facts))
    assert golden(facts) == path.read_text(), "see the head of this file"
    assert all(site.reason for site in facts.sites if site.outcome != "matched")
    layer = facts.layers[0]
    assert layer.launches is not None
    assert layer.launches <= MOST_LAUNCHES.get(weights, 10)
