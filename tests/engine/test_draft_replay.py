"""An acceptance that is given by position is replayed, the same at every run; speculative_config is
read by vLLM's names."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from fusewright import LLM
from fusewright.config import UserError
from fusewright.config.speculative import read_speculative

from .test_speculative import OPTIONS, params


def test_an_acceptance_is_replayed_by_position(said: list[logging.LogRecord]) -> None:
    asked = [0.8, 0.6, 0.5]
    config = {"method": "ngram", "acceptance": asked, "adaptive": False}
    outputs, reports = [], []
    for _ in range(2):
        llm = LLM("abacus", **OPTIONS | {"max_model_len": 256}, speculative_config=config)
        kind = params(max_tokens=100, ignore_eos=True)
        outputs.append(llm.generate(["1+1="] * 8, kind, use_tqdm=False))
        reports.append(llm.report()["drafts"])
    assert all(len(each.outputs[0].token_ids) == 100 for each in outputs[0])
    assert reports[0] == reports[1]
    warnings = [each.getMessage() for each in said if each.levelname == "WARNING"]
    assert len(warnings) == 2, "each start says that its outputs are not the model's"
    assert "acceptance=[0.8, 0.6, 0.5]" in warnings[0]
    assert "outputs are not those of the model" in warnings[0]
    report = reports[0]
    assert report["replayed"] and report["error"] == ""
    reached = [report["drafted_by_position"][0], *report["accepted_by_position"][:-1]]
    rates = [a / r for a, r in zip(report["accepted_by_position"], reached, strict=True)]
    assert rates == pytest.approx(asked, abs=0.08)


GOOD: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"model": "[ngram]", "num_speculative_tokens": 4}, {"method": "ngram", "model": None}),
    ({"model": "x/y", "num_speculative_tokens": 2}, {"method": "draft_model", "model": "x/y"}),
    (
        {"model": "x/y", "revision": "v2", "num_speculative_tokens": 2, "max_model_len": 64},
        {"model": "x/y@v2", "max_model_len": 64},
    ),
    (
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2},
        {"prompt_lookup_min": 2, "prompt_lookup_max": 2, "adaptive": True},
    ),
    (
        {
            "method": "ngram",
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [0.8, 0.4, 0.0],
        },
        {"num_speculative_tokens": 3, "acceptance": (0.8, 0.5, 0.0)},
    ),
    (
        {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "draft_tensor_parallel_size": 1,
            "disable_by_batch_size": 32,
            "parallel_drafting": False,
            "speculative_token_tree": None,
        },
        {"num_speculative_tokens": 3},
    ),
]


@pytest.mark.parametrize(("config", "read"), GOOD)
def test_fields_have_the_names_of_vllm(config: dict[str, Any], read: dict[str, Any]) -> None:
    found = read_speculative(json.dumps(config))
    assert {name: getattr(found, name) for name in read} == read


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"method": "eagle3", "num_speculative_tokens": 3}, "model=None: .* of an EAGLE-3 head"),
        ({"method": "ngram_gpu"}, "method='ngram_gpu': ngram looks them up on the GPU itself"),
        ({"method": "qwen3_next_mtp"}, "num_speculative_tokens=None: expected how many"),
        ({"method": "draft_model", "num_speculative_tokens": 3}, "model=None: expected the folder"),
        (
            {"method": "ngram", "model": "x", "num_speculative_tokens": 3},
            "is of method draft_model",
        ),
        ({"parallel_drafting": True}, "parallel_drafting=True: drafts are made one behind"),
        ({"use_heterogeneous_vocab": True}, "give one of the same vocabulary"),
        ({"acceptance": [0.5, 2]}, "expected 2 numbers in"),
        (
            {"method": "suffix", "prompt_lookup_min": 30},
            "prompt_lookup_min=30: expected suffix_decoding_max_tree_depth=24 or less",
        ),
        ({"acceptance": [True]}, r"acceptance=\[True\]: expected 1 numbers"),
        ({"acceptance": 0.5, "num_speculative_tokens": 1}, "acceptance=0.5: expected 1 numbers"),
        ({"synthetic_acceptance_rates": [0.5]}, "give 'synthetic' and the rates"),
        (
            {"synthetic_acceptance_rates": [0.5, 0.6], "rejection_sample_method": "synthetic"},
            "rates that do not rise",
        ),
        ({"adaptive": 1, "num_speculative_tokens": 3}, "adaptive=1: expected true or false"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens=65: expected an integer in"),
    ],
)
def test_what_is_not_there_says_what_to_use(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"speculative_config: .*{said}"):
        read_speculative(json.dumps({"method": "ngram"} | config))


def test_more_drafts_than_a_graph_holds_are_refused() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 8}
    options = {"optimization_level": 2, "cudagraph_capture_sizes": [1, 2, 4]}
    with pytest.raises(UserError, match="9 rows, and the largest of cudagraph_capture_sizes is 4"):
        LLM("/no/such/model", **options, speculative_config=config)
