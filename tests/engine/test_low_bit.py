"""Models of 4 and 8 bits in the whole engine: every dialect, adapter and captured, one and two
ranks; and weights that are quantized while they are loaded."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright import LLM, SamplingParams
from fusewright.config.weight_format import MXFP4, NVFP4, STORED_FORMATS, W8A8
from fusewright.model_executor.abacus.problems import held_out
from fusewright.ops.linear.formats import dequantize, quantize
from fusewright.serve.commands.evaluate import greedy, solved
from tests.engine.test_parity import LogitsRecorder, prompts
from tests.model_executor.low_bit_checkpoints import (
    BY_NAME,
    DIALECTS,
    INPUT_SCALE,
    OF_EXPERTS,
    TINY,
    Dialect,
    save,
)
from tests.model_executor.low_bit_models import DEEPSEEK, MIXTRAL, MOES, QWEN3_MOE
from tests.model_executor.stored_formats import logits_of
from tests.model_executor.tiny_models import TinyModel

pytestmark = pytest.mark.usefixtures("warm")
NUM_TOKENS = 6
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 64,
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
IMPLS = ("auto", "transformers")


def check_tokens(reference: Any, outputs: list[Any]) -> None:
    """Every token is the greedy one of the reference, whose logits see no near tie."""
    for prompt, output in zip(prompts(), outputs, strict=True):
        ids = list(output.outputs[0].token_ids)
        expected = logits_of(reference, [*prompt, *ids][:-1])[-NUM_TOKENS:]
        chosen = expected.gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert (expected.amax(-1) - chosen).max() < 1e-4


def generate(llm: LLM) -> list[Any]:
    return llm.generate([list(prompt) for prompt in prompts()], PARAMS, use_tqdm=False)


@pytest.mark.product(8)
@pytest.mark.parametrize(
    ("dialect", "impl"),
    [*product(DIALECTS, IMPLS)],
    ids=lambda value: getattr(value, "name", value),
)
def test_logits_are_those_of_the_stored_numbers(
    dialect: Dialect, impl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = save(dialect, tmp_path)
    off = 1e-4
    if (form := STORED_FORMATS[dialect.kind]).x_dtype:
        off = 2e-2  # a number half way between two integers goes either way
        with_int8_inputs(reference, INPUT_SCALE if form.static else None)
    check_logits(reference, tmp_path, impl, off, monkeypatch)


def check_logits(
    reference: Any, folder: Path, impl: str, off: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(folder), optimization_level=0, model_impl=impl, **OPTIONS)
    recorder = LogitsRecorder(llm, monkeypatch)
    for prompt, output in zip(prompts(), generate(llm), strict=True):
        rows = [recorder.rows[output.request_id, len(prompt) + i] for i in range(NUM_TOKENS)]
        ids = [*prompt, *output.outputs[0].token_ids][:-1]
        expected = logits_of(reference, ids)[-NUM_TOKENS:]
        torch.testing.assert_close(torch.stack(rows), expected, atol=off, rtol=off)


@pytest.mark.product(16)
@pytest.mark.parametrize(
    ("dialect", "tiny", "impl"),
    [*product(OF_EXPERTS, MOES, IMPLS)],
    ids=lambda value: getattr(value, "name", value),
)
def test_logits_are_those_of_the_experts_stored_numbers(
    dialect: Dialect, tiny: TinyModel, impl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = save(dialect, tmp_path, tiny)
    check_logits(reference, tmp_path, impl, 1e-4, monkeypatch)


@pytest.mark.parametrize("name", ["AutoAWQ 32", "naive-quantized int4 g64"])
def test_experts_of_deepseek_are_read_by_their_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = save(BY_NAME[name], tmp_path, DEEPSEEK)
    check_logits(reference, tmp_path, "auto", 1e-4, monkeypatch)


def with_int8_inputs(reference: Any, scale: float | None) -> None:
    """Round what each layer of the library's model reads, by one scale or by one a row."""

    def rounded(module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        step = args[0].abs().amax(-1, keepdim=True) / 127 if scale is None else scale
        return ((args[0] / step).round().clamp(-128, 127) * step,)

    for name, module in reference.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(rounded)


COMPILED = ["AutoAWQ 64", "GPTQ v1 int4 g32 act-order", "ModelOpt NVFP4", "gpt-oss MXFP4"]


@pytest.mark.slow
@pytest.mark.product(8)
@pytest.mark.parametrize(("name", "impl"), [*product(COMPILED, IMPLS)])
def test_compiled_models_answer_as_the_stored_numbers_do(
    name: str, impl: str, tmp_path: Path
) -> None:
    reference = save(BY_NAME[name], tmp_path)
    llm = LLM(str(tmp_path), optimization_level=2, model_impl=impl, **OPTIONS)
    check_tokens(reference, generate(llm))


@pytest.mark.slow
@pytest.mark.product(16)
@pytest.mark.parametrize(
    ("name", "tiny", "impl"),
    [*product(("AutoAWQ 32", "GPTQ v1 int4 g128", "mixed precision"), MOES, IMPLS)],
    ids=lambda value: getattr(value, "name", value),
)
def test_compiled_experts_answer_as_the_stored_numbers_do(
    name: str, tiny: TinyModel, impl: str, tmp_path: Path
) -> None:
    """Experts of one format are one op with their router; of two formats they are two layers."""
    reference = save(BY_NAME[name], tmp_path, tiny)
    llm = LLM(str(tmp_path), optimization_level=2, model_impl=impl, **OPTIONS)
    check_tokens(reference, generate(llm))
    (of_experts,) = [each for each in llm.report()["passes"] if each["name"] == "fuse_moe"]
    reasons = {miss["reason"] for miss in of_experts["missed"]}
    two = {"the experts' layers are stored in two formats"}
    assert (of_experts["matched"] > 0, reasons) == (
        (False, two) if name == "mixed precision" else (True, set())
    )


SPREAD = ["AutoAWQ 32", "GPTQ v2 int4 g64 zero", "mixed precision", "ModelOpt NVFP4"]


@pytest.mark.slow
@pytest.mark.product(8)
@pytest.mark.parametrize(("name", "impl"), [*product(SPREAD, IMPLS)])
def test_two_ranks_answer_as_the_stored_numbers_do(name: str, impl: str, tmp_path: Path) -> None:
    reference = save(BY_NAME[name], tmp_path)
    how = {"tensor_parallel_size": 2, "optimization_level": 0, "model_impl": impl}
    with LLM(str(tmp_path), **how, **OPTIONS) as llm:
        check_tokens(reference, generate(llm))


OF_RANKS = [
    ("AutoAWQ 32", QWEN3_MOE, False),
    ("GPTQ v2 int4 g64 zero", MIXTRAL, False),
    ("AutoAWQ 64", QWEN3_MOE, True),
    ("pack-quantized int4 g32 zero", MIXTRAL, True),
]


@pytest.mark.slow
@pytest.mark.product(4)
@pytest.mark.parametrize(
    ("name", "tiny", "whole"), OF_RANKS, ids=lambda value: getattr(value, "name", value)
)
def test_two_ranks_answer_as_the_stored_experts_do(
    name: str, tiny: TinyModel, whole: bool, tmp_path: Path
) -> None:
    """Each has a part of every expert, or some experts whole."""
    reference = save(BY_NAME[name], tmp_path, tiny)
    how = {"tensor_parallel_size": 2, "optimization_level": 0, "enable_expert_parallel": whole}
    with LLM(str(tmp_path), **how, **OPTIONS) as llm:
        check_tokens(reference, generate(llm))


ONLINE = ["int4_g64", "int4_zero_g32", "int8", MXFP4, NVFP4]


def quantized(name: str) -> Any:
    """The library's model of the numbers that weights are rounded to."""
    model: Any = TINY.model()
    form, numbers = STORED_FORMATS[{"int8": "int8_channel"}.get(name, name)], model.state_dict()
    kinds = ("weight", "weight_scale", "weight_zero", "weight_row_scale")
    for tensor in (tensor for tensor in numbers if "_proj" in tensor):
        stored = quantize(form, numbers[tensor].float())
        numbers[tensor] = dequantize(form, *(stored.get(kind) for kind in kinds))  # type: ignore[arg-type]
    model.load_state_dict(numbers)
    return model


@pytest.mark.product
@pytest.mark.parametrize(
    ("name", "impl", "ranks"),
    [*product(ONLINE, IMPLS, (1,)), *product(("int4_g32", MXFP4), IMPLS, (2,))],
)
def test_weights_are_quantized_while_they_are_loaded(
    name: str, impl: str, ranks: int, tmp_path: Path
) -> None:
    TINY.save(tmp_path)
    how = {"tensor_parallel_size": ranks, "optimization_level": 0, "model_impl": impl}
    with LLM(str(tmp_path), quantization=name, **how, **OPTIONS) as llm:
        check_tokens(quantized(name), generate(llm))


@pytest.mark.product(6)
@pytest.mark.parametrize("model", ["abacus", "abacus-moe"])
@pytest.mark.parametrize("name", ["int8", "int4_g32", MXFP4, W8A8])
def test_bundled_models_stay_accurate(model: str, name: str) -> None:
    """Attention, feed-forward layers and experts are quantized alike."""
    problems = held_out(30, 0)
    how: dict[str, Any] = {"device": "cpu", "optimization_level": 0, "max_num_seqs": 30}
    with LLM(model, quantization=name, **how) as llm:
        prompts_of = [problem.prompt for problem in problems]
        outputs = llm.generate(prompts_of, greedy(problems), use_tqdm=False)
    right = sum(solved(p, output) for p, output in zip(problems, outputs, strict=True))
    assert right >= 28, f"{right} of 30"
