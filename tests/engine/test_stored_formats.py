"""A weight format from outside of the package, in the whole engine."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusewright import LLM, SamplingParams
from fusewright.config import EngineOptions, Hardware, UserError, resolve
from fusewright.config.weight_format import STORED_FORMATS
from fusewright.engine.explain import explain_model
from fusewright.engine.worker.source import artifact_key
from fusewright.model_executor.hf_config import model_limits, read_spec
from tests.engine.test_parity import LogitsRecorder, prompts
from tests.engine.test_torchrun import launch
from tests.model_executor.stored_formats import INT4, INT8, TINY, admitted, logits_of, save

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("warm")
NUM_TOKENS = 8
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 64,
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(autouse=True)
def both_are_admitted() -> Iterator[None]:
    with admitted():
        yield


@pytest.mark.parametrize(
    ("name", "level"),
    [
        (INT8.name, 0),
        pytest.param(INT8.name, 2, marks=pytest.mark.slow),
        (INT4.name, 0),
        pytest.param(INT4.name, 1, marks=pytest.mark.thorough),
    ],
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
        missed = {p["name"]: p["missed"] for p in report["passes"]}["fuse_chain"]
        assert missed[0]["reason"] == "a weight is stored as 'int8 of 64': multiply_int8 reads it"
    elif level == 1:
        assert {c for c in chosen if c.startswith("linear")} == {"linear -> native"}


def test_an_admitted_format_is_an_option(tmp_path: Path) -> None:
    """A checkpoint that is not quantized answers as one that is."""
    reference = save(INT8.name, tmp_path / "stored")
    TINY.save(tmp_path / "plain")
    options = {"optimization_level": 0, **OPTIONS}
    llm = LLM(str(tmp_path / "plain"), quantization=INT8.name, **options)
    prompt = list(prompts()[2])
    ids = llm.generate([prompt], PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    expected = logits_of(reference, [*prompt, *ids][:-1])[-NUM_TOKENS:]
    assert expected.argmax(-1).tolist() == list(ids)
    with pytest.raises(UserError, match=r"'int3': expected fp8 or .* or int8 of 64 or "):
        LLM(str(tmp_path / "plain"), quantization="int3", **options)


def test_explain_names_the_format_and_its_kernel(tmp_path: Path) -> None:
    save(INT8.name, tmp_path)
    label, explanation = explain_model(EngineOptions(model=str(tmp_path), device="cpu"))
    assert "int8 of 64 weights" in label
    (layer, *_) = explanation.layers
    calls = [line for line in layer.after if "fw_admitted::linear" in line]
    assert len(calls) == 4 and all("int8 of 64" in call for call in calls)
    assert {"multiply_int8"} < {kernel for at in layer.ranges for kernel in at.kernels}


def test_an_artifact_is_of_one_definition_of_a_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another format under the same name, or another kernel, does not run the old code."""
    save(INT4.name, tmp_path)
    spec = read_spec(tmp_path)
    options = EngineOptions(model=str(tmp_path), **OPTIONS)
    config = resolve(options, Hardware(device="cpu", name="any"), model_limits(spec))
    key = artifact_key(spec, config)
    assert artifact_key(spec, config) == key
    monkeypatch.setitem(STORED_FORMATS, INT4.name, replace(INT4, zero_offset=1))
    changed = artifact_key(spec, config)
    assert {f for f in key.factors if key.factors[f] != changed.factors[f]} == {"weight_format"}


RANKS = """
import sys
sys.path.append({root!r})
from tests.model_executor.stored_formats import admit
from fusewright import LLM, SamplingParams
admit()
params = SamplingParams(temperature=0.0, max_tokens={tokens}, ignore_eos=True)
with LLM({folder!r}, tensor_parallel_size=2, optimization_level={level}, **{options}) as llm:
    outputs = llm.generate({prompts}, params, use_tqdm=False)
    print([list(output.outputs[0].token_ids) for output in outputs])
"""


@pytest.mark.thorough
def test_two_ranks_answer_as_the_stored_numbers_do(tmp_path: Path) -> None:
    """The ranks of torchrun run a script, which admits the formats in each of them."""
    folder, script = tmp_path / "model", tmp_path / "script.py"
    reference = save(INT8.name, folder)
    asked = [list(prompt) for prompt in prompts()]
    values = {"folder": str(folder), "level": 0, "options": OPTIONS, "prompts": asked}
    script.write_text(RANKS.format(root=str(ROOT), tokens=NUM_TOKENS, **values))
    done = launch(str(script))
    assert done.returncode == 0, done.stderr
    for prompt, ids in zip(asked, ast.literal_eval(done.stdout), strict=True):
        expected = logits_of(reference, [*prompt, *ids][:-1])[-NUM_TOKENS:]
        assert expected.argmax(-1).tolist() == ids
