"""FP8 weights and FP8 KV cache in the whole engine: logits of a model whose weights, activations
and keys are rounded by plain torch, and the bundled model's exact answers."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from fusewright import LLM, SamplingParams
from fusewright.benchmarks.fp8_error import measure, relative_errors
from fusewright.model_executor.abacus import FOLDER as ABACUS
from fusewright.model_executor.abacus.problems import held_out, training
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.layers import Linear
from fusewright.model_executor.loader import load_model
from fusewright.model_executor.quant.scheme import KINDS
from tests.engine.test_parity import LogitsRecorder, prompts
from tests.model_executor.paged_steps import PagedSteps
from tests.model_executor.quant_checkpoints import (
    BY_NAME,
    FUSED,
    TINY,
    Dialect,
    Tensors,
    expected_linear,
    requantize,
    save,
    spread,
    to_e4m3,
)
from tests.model_executor.tiny_models import TinyModel

NUM_TOKENS = 12


class Rounded(nn.Module):
    """A linear layer of dequantized weights, whose input is rounded to FP8 and back."""

    def __init__(self, weight: Tensor, kind: str, input_scale: Tensor | None) -> None:
        super().__init__()
        self.weight, self.kind, self.input_scale = weight, kind, input_scale

    def forward(self, x: Tensor) -> Tensor:
        size = 128 if self.kind == "fp8_block" else x.shape[-1]
        groups = x.unflatten(-1, (-1, size))
        scale = self.input_scale
        if scale is None:
            scale = groups.abs().amax(-1, keepdim=True) * (1 / 448)
        rounded = to_e4m3(groups * (1 / scale)).float() * scale
        return F.linear(rounded.flatten(-2), self.weight)


class RoundedCache(DynamicCache):
    """Keys and values are rounded to FP8 and back as they are stored."""

    def __init__(self, scales: list[tuple[float, float]]) -> None:
        super().__init__()
        self.scales = scales

    def update(self, k: Tensor, v: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        k, v = (to_e4m3(x / s).float() * s for x, s in zip((k, v), self.scales[layer], strict=True))
        return super().update(k, v, layer, *args, **kwargs)


def reference(dialect: Dialect, tensors: Tensors) -> Any:
    """The transformers model with every quantized layer rounded."""
    model: Any = TINY.model()
    for layer in range(2):
        for linear, parts in FUSED.items():
            weight, scale, input_scale = expected_linear(dialect, tensors, layer, linear)
            whole = weight.float() * spread(scale, weight)
            sizes = [len(tensors[f"model.layers.{layer}.{part}.weight"]) for part in parts]
            for part, rows in zip(parts, whole.split(sizes), strict=True):
                parent, _, name = f"model.layers.{layer}.{part}".rpartition(".")
                rounded = Rounded(rows, dialect.kind, input_scale)
                setattr(model.get_submodule(parent), name, rounded)
    return model


def kv_scales(dialect: Dialect, tensors: Tensors) -> list[tuple[float, float]]:
    if dialect.kv_scales is None:
        return [(1.0, 1.0)] * 2
    k, v = dialect.kv_scales
    names = [(f"model.layers.{i}.{k}", f"model.layers.{i}.{v}") for i in range(2)]
    return [(tensors[k].item(), tensors[v].item()) for k, v in names]


def run(folder: Path, level: int, kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(token ids, logits of the last ones) of each of ``prompts()``, in ragged chunks."""
    llm = LLM(
        str(folder),
        optimization_level=level,
        device="cpu",
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=128,
    )
    recorder = LogitsRecorder(llm, monkeypatch)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate([list(p) for p in prompts()], params, use_tqdm=False)
    for prompt, output in zip(prompts(), outputs, strict=True):
        rows = [recorder.rows[output.request_id, len(prompt) + i] for i in range(NUM_TOKENS)]
        yield [*prompt, *output.outputs[0].token_ids][:-1], torch.stack(rows)


def errors(model: Any, got: Any, scales: list[tuple[float, float]] | None) -> Tensor:
    """The largest error of each row of logits."""
    found = []
    for ids, rows in got:
        cache = RoundedCache(scales) if scales else DynamicCache()
        with torch.inference_mode():
            logits = model(torch.tensor([ids]), past_key_values=cache).logits[0]
        found.append((rows - logits[-NUM_TOKENS:]).abs().amax(1))
    return torch.cat(found)


DIALECTS = ("compressed static", "compressed channel", "fp8 block")


@pytest.mark.product(5)
@pytest.mark.parametrize(
    ("name", "level", "kv_cache_dtype"),
    [
        *[(name, 0, kv) for name in DIALECTS for kv in ("auto", "fp8")],
        # A level each.
        ("compressed static", 1, "fp8"),
        ("fp8 block", 2, "fp8"),
        ("compressed channel", 3, "auto"),
    ],
)
def test_logits_are_those_of_a_rounded_model(
    name: str, level: int, kv_cache_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is float32, so that only values within 1e-6 of the middle of two FP8 values may be
    rounded to the other one; this then shows in the rest of the sequence."""
    dialect = BY_NAME[name]
    tensors = save(dialect, tmp_path)
    model = reference(dialect, tensors)
    scales = kv_scales(dialect, tensors) if kv_cache_dtype == "fp8" else None
    got = list(run(tmp_path, level, kv_cache_dtype, monkeypatch))
    error = errors(model, got, scales)
    assert (error < 1e-5).float().mean() >= 0.7 and error.max() < 0.5, error
    # Rounding neither weights nor activations, and of the cache alone, is seen.
    assert errors(TINY.model(), got, scales).median() > 1e-2
    assert errors(model, got, None if scales else [(1.0, 1.0)] * 2).median() > 1e-3


def test_random_weights_of_a_scheme_stay_near_those_that_they_quantize(
    tmp_path: Path, fw_seed: int, fw_cases: int
) -> None:
    """Over 32 layers, with an FP8 KV cache; nothing overflows or vanishes.  Every second scheme has
    its turn with each seed."""
    deep = TinyModel("deep", "Llama", {**TINY.options, "num_hidden_layers": 32})
    deep.config().save_pretrained(tmp_path)
    options = {"optimization_level": 0, "device": "cpu", "max_num_seqs": 16}
    _, expected = measure(str(tmp_path), (None, "auto"), [], **options)
    kinds = KINDS if fw_cases > 1 else KINDS[fw_seed % 2 :: 2]
    for kind in kinds:
        _, logits = measure(str(tmp_path), (kind, "fp8"), [], **options)
        error = relative_errors(logits, expected)
        assert 0.01 < error.median() < error.max() < 0.3, kind


GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROBLEMS = held_out(1000, seed=3)


def calibrated(folder: Path) -> Path:
    """A static checkpoint of the bundled model: scales for the largest input of every layer over
    some problems that it learned."""
    shutil.copytree(ABACUS, folder, ignore=shutil.ignore_patterns("*.py"))
    model = load_model(replace(read_spec(ABACUS), dtype_name="float32"), ABACUS, "cpu")
    largest: dict[str, float] = {}

    def watch(name: str) -> Any:
        def hook(module: Linear, args: tuple[Tensor]) -> None:
            largest[name] = max(largest.get(name, 0.0), args[0].abs().max().item())

        return hook

    for name, module in model.named_modules():
        if isinstance(module, Linear):
            module.register_forward_pre_hook(watch(name))
    tokens = [[256, *f"{p.prompt}{p.answer}".encode()] for p in training(128, seed=1)]
    PagedSteps(model, tokens).step({i: len(ids) for i, ids in enumerate(tokens)})
    scales = {
        f"model.layers.{layer}.{part}": largest[f"layers.{layer}.{linear}"] / 448
        for layer in range(5)
        for linear, parts in FUSED.items()
        for part in parts
    }
    requantize(BY_NAME["fp8 static"], folder, input_scales=scales)
    return folder


@pytest.mark.product
@pytest.mark.parametrize(
    ("scheme", "kv_cache_dtype", "level"),
    [
        *[(scheme, "fp8", 2) for scheme in ("unquantized", "fp8_static")],
        # On a CPU the logits above are those of these two with compiled code.
        *[
            (scheme, "fp8", 2 if torch.cuda.is_available() else 0)
            for scheme in ("fp8", "fp8_block")
        ],
        # On a CPU the logits above are those of each kind without an FP8 cache.
        *[(scheme, "auto", 2) for scheme in KINDS if torch.cuda.is_available()],
    ],
)
def test_exact_match_stays_within_half_a_point(
    scheme: str, kv_cache_dtype: str, level: int, tmp_path: Path, device: torch.device
) -> None:
    """Half a point below 100 %, which float32 reaches on a CPU and bfloat16 on a GPU."""
    options: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype}
    model = "abacus"
    if scheme == "fp8_static":
        model = str(calibrated(tmp_path / "static"))
    elif scheme != "unquantized":
        options["quantization"] = scheme
    llm = LLM(
        model,
        optimization_level=level,
        device=device.type,
        dtype="bfloat16" if device.type == "cuda" else "float32",
        max_num_seqs=64,
        max_model_len=64,
        **options,
    )
    problems = PROBLEMS[: 1000 if device.type == "cuda" else 200]
    outputs = llm.generate([p.prompt for p in problems], GREEDY, use_tqdm=False)
    given = [output.outputs[0].text for output in outputs]
    wrong = [p for p, answer in zip(problems, given, strict=True) if p.answer != answer]
    assert len(wrong) <= len(problems) // 200, wrong
