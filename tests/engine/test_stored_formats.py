"""A weight format from outside of the package, in the whole engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fusewright import LLM, SamplingParams
from fusewright.config import EngineOptions, Hardware, resolve
from fusewright.config.weight_format import STORED_FORMATS
from fusewright.engine.explain import explain_model
from fusewright.engine.worker.source import artifact_key
from fusewright.model_executor.hf_config import model_limits, read_spec
from tests.engine.test_parity import LogitsRecorder, prompts
from tests.engine.test_torchrun import launch
from tests.model_executor.stored_formats import INT4, INT8, TINY, logits_of, save

ROOT = Path(__file__).resolve().parents[2]
NUM_TOKENS = 8
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 64,
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.mark.parametrize(
    ("name", "level"), [(INT8.name, 0), (INT8.name, 2), (INT4.name, 0), (INT4.name, 1)]
)
def test_logits_are_those_of_the_stored_numbers(
    name: str, level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At -O2 by the kernel that is admitted with the format, for more rows and for int4 by
    dequantizing; the fused activation stays behind either."""
    reference = save(name, tmp_path)
    llm = LLM(str(tmp_path), optimization_level=level, **OPTIONS)
    recorder = LogitsRecorder(llm, monkeypatch)
    outputs = llm.generate([list(p) for p in prompts()], PARAMS, use_tqdm=False)
    plain: Any = TINY.model()
    for prompt, output in zip(prompts(), outputs, strict=True):
        rows = [recorder.rows[output.request_id, len(prompt) + i] for i in range(NUM_TOKENS)]
        ids = [*prompt, *output.outputs[0].token_ids][:-1]
        expected = logits_of(reference, ids)[-NUM_TOKENS:]
        torch.testing.assert_close(torch.stack(rows), expected, atol=1e-4, rtol=1e-4)
        assert (logits_of(plain, ids)[-NUM_TOKENS:] - expected).abs().max() > 1e-2
    report = llm.report()
    chosen = [choice.partition(" (")[0] for choice in report["choices"]]
    if level == 2:
        assert "linear -> admitted" in chosen
        missed = {p["name"]: p["missed"] for p in report["passes"]}["fuse_norm_linear"]
        assert "a weight is stored as 'int8 of 64'" in missed[0]["reason"]
    elif level == 1:
        assert {c for c in chosen if c.startswith("linear")} == {"linear -> native"}
