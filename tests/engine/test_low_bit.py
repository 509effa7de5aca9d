"""Models of 4 and 8 bits in the whole engine: every dialect, adapter and captured, one and two
ranks; and weights that are quantized while they are loaded."""

from __future__ import annotations

from collections.abc import Iterator
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
    WIDE,
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


def by_name(value: Any) -> Any:
    return getattr(value, "name", value)


def generate(llm: LLM) -> list[Any]:
    return llm.generate([list(prompt) for prompt in prompts()], PARAMS, use_tqdm=False)


def logits(
    dialect: Dialect, reference: Any, folder: Path, patch: pytest.MonkeyPatch, how: dict[str, Any]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits [tokens, vocab] of each request, of the engine and of the library's model of the
    stored numbers; the latter may be changed."""
    if (form := STORED_FORMATS[dialect.kind]).x_dtype:
        ranks = how.get("tensor_parallel_size", 1)
        with_int8_inputs(reference, INPUT_SCALE if form.static else None, ranks)
    with LLM(str(folder), **OPTIONS | how) as llm:
        recorder = LogitsRecorder(llm, patch)
        outputs = generate(llm)
    for prompt, output in zip(prompts(), outputs, strict=True):
        rows = [recorder.rows[output.request_id, len(prompt) + i] for i in range(NUM_TOKENS)]
        ids = [*prompt, *output.outputs[0].token_ids][:-1]
        yield torch.stack(rows), logits_of(reference, ids)[-NUM_TOKENS:]


def check_logits(dialect: Dialect, *of: Any) -> None:
    """A number of x half way between two integers goes either way, which moves a request's logits
    from there on: with inputs of 8 bits half of the requests may be off.  A wrong scale moves
    all."""
    pairs = [*logits(dialect, *of)]
    exact = [torch.allclose(ours, expected, 1e-4, 1e-4) for ours, expected in pairs]
    needed = len(pairs) // 2 if STORED_FORMATS[dialect.kind].x_dtype else len(pairs)
    assert sum(exact) >= needed, [(ours - expected).abs().max() for ours, expected in pairs]
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected, atol=0.1, rtol=0.02)


@pytest.mark.product(16)
@pytest.mark.parametrize(
    ("dialect", "tiny", "impl"),
    [*product(OF_EXPERTS, MOES, IMPLS)],
    ids=by_name,
)
def test_logits_are_those_of_the_experts_stored_numbers(
    dialect: Dialect, tiny: TinyModel, impl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = save(dialect, tmp_path, tiny)
    how: dict[str, Any] = {"optimization_level": 0, "model_impl": impl}
    check_logits(dialect, reference, tmp_path, monkeypatch, how)


@pytest.mark.parametrize("name", ["AutoAWQ 32", "naive-quantized int4 g64"])
def test_experts_of_deepseek_are_read_by_their_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = save(BY_NAME[name], tmp_path, DEEPSEEK)
    check_logits(BY_NAME[name], reference, tmp_path, monkeypatch, {"optimization_level": 0})


def with_int8_inputs(reference: Any, scale: float | None, ranks: int) -> None:
    """Round what each layer of the library's model reads, by one scale or by one a row, of which
    each rank has the scale of its own columns."""
    for name, module in reference.named_modules():
        parts = ranks if name.endswith(("o_proj", "down_proj")) else 1

        def rounded(module: Any, args: tuple[Tensor], parts: int = parts) -> tuple[Tensor]:
            x = args[0].unflatten(-1, (parts, -1))
            step = x.abs().amax(-1, keepdim=True) / 127 if scale is None else scale
            return (((x / step).round().clamp(-128, 127) * step).flatten(-2),)

        if name.endswith("_proj"):
            module.register_forward_pre_hook(rounded)


@pytest.mark.product(8)
@pytest.mark.parametrize(("dialect", "impl"), [*product(DIALECTS, IMPLS)], ids=by_name)
def test_logits_are_those_of_the_stored_numbers(
    dialect: Dialect, impl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = save(dialect, tmp_path)
    how: dict[str, Any] = {"optimization_level": 0, "model_impl": impl}
    check_logits(dialect, reference, tmp_path, monkeypatch, how)


@pytest.mark.slow
@pytest.mark.product(18)
@pytest.mark.parametrize(
    ("name", "tiny", "impl"),
    [*product(("AutoAWQ 32", "GPTQ v1 int4 g128", "mixed precision"), MOES, IMPLS)],
    ids=by_name,
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


@pytest.mark.slow
@pytest.mark.product(168)
@pytest.mark.parametrize(
    ("dialect", "level", "impl"), [*product(DIALECTS, (1, 2, 3), IMPLS)], ids=by_name
)
def test_compiled_models_have_these_logits_too(
    dialect: Dialect, level: int, impl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = save(dialect, tmp_path)
    how: dict[str, Any] = {"optimization_level": level, "model_impl": impl}
    check_logits(dialect, reference, tmp_path, monkeypatch, how)


SPREAD = [
    (dialect, level, impl)
    for dialect, level, impl in product(DIALECTS, range(4), IMPLS)
    if "act-order" not in dialect.name
    and (impl == "auto" or not STORED_FORMATS[dialect.kind].x_dtype)
]
"""Ranks share these; the others are refused by name."""


@pytest.mark.slow
@pytest.mark.product(200)
@pytest.mark.usefixtures("no_engine_is_left")
@pytest.mark.parametrize(("dialect", "level", "impl"), SPREAD, ids=by_name)
def test_two_ranks_have_these_logits_too(
    dialect: Dialect, level: int, impl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = save(dialect, tmp_path, WIDE)
    how: dict[str, Any] = {"optimization_level": level, "model_impl": impl}
    how["tensor_parallel_size"] = 2
    check_logits(dialect, reference, tmp_path, monkeypatch, how)


FAMILIES = [
    *("AutoAWQ 128", "GPTQ v2 int4 g64 zero", "GPTQ v1 int4 g32 act-order", "mixed precision"),
    *("pack-quantized int4 g128", "int-quantized int8 channel", "int-quantized W8A8 dynamic"),
    *("mxfp4-pack-quantized", "ModelOpt int4", "ModelOpt NVFP4", "gpt-oss MXFP4"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_a_gpu_has_the_logits_of_the_stored_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled, from graphs, in bfloat16: on a CPU it is 2 % off, with inputs of 8 bits 5 %."""
    dialect = BY_NAME[name]
    reference = save(dialect, tmp_path, WIDE)
    how: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "kv_cache_memory_bytes": 2**26}
    most = 0.1 if STORED_FORMATS[dialect.kind].x_dtype else 0.04
    for ours, expected in logits(dialect, reference, tmp_path, monkeypatch, how):
        assert (ours - expected).norm() < most * expected.norm()


OF_RANKS = [
    ("AutoAWQ 32", QWEN3_MOE, False),
    ("GPTQ v2 int4 g64 zero", MIXTRAL, False),
    ("AutoAWQ 64", QWEN3_MOE, True),
    ("pack-quantized int4 g32 zero", MIXTRAL, True),
]


@pytest.mark.slow
@pytest.mark.product(4)
@pytest.mark.parametrize(("name", "tiny", "whole"), OF_RANKS, ids=by_name)
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


@pytest.mark.product(7)
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


@pytest.mark.product(8)
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
