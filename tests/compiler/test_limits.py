"""What bounds a step agrees with known byte limits of real models, and with formulas of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fusewright.compiler.inspect.limits import (
    StepLimit,
    StepSize,
    StepWork,
    Work,
    equal_steps,
    limit_of,
)
from fusewright.config import EngineOptions
from fusewright.config.device_table import Ceilings, ceilings, shipped
from fusewright.engine.limits import step_works

CEILINGS = {table.gpu: ceilings(table) for table in shipped()}
H200, H100 = CEILINGS["NVIDIA H200"], CEILINGS["NVIDIA H100 80GB HBM3"]
LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
ONE_LAYER = {"num_hidden_layers": 1}


def works(folder: Path, config: dict[str, Any], *steps: StepSize, **options: Any) -> list[StepWork]:
    (folder / "config.json").write_text(json.dumps(config))
    asked = EngineOptions(model=str(folder), **options)
    return step_works(asked, 90, steps)[1]


def on(gpu: Ceilings, works: list[StepWork]) -> list[StepLimit]:
    return [limit_of(work, gpu) for work in works]


def test_llama_3_8b_is_bound_as_measured_peers_say(tmp_path: Path) -> None:
    steps = equal_steps([1, 64, 256], 192, [8192], 128)
    done = works(tmp_path, LLAMA_3_8B, *steps)
    one, many, most, prefill = on(H200, done)
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    head, kv = 4096 * 128256, 2 * 8 * 128 * 2
    assert one.ms == pytest.approx(3.5, rel=0.01) and one.bound == "bytes"
    assert on(H100, done)[0].ms == pytest.approx(5.0, rel=0.02)
    for step, rows in ((one, 1), (many, 64), (most, 256)):
        parts = step.families
        weights_ms = 2 * 32 * layer / 4.28e9
        assert parts["linears"].bytes_ms == pytest.approx(weights_ms, rel=5e-3)
        linears_ms = 2 * 32 * layer * rows / 790e9
        assert parts["linears"].arithmetic_ms == pytest.approx(linears_ms, rel=5e-3)
        cached_ms = 32 * rows * 192 * kv / 4.28e9
        assert parts["attention"].bytes_ms == pytest.approx(cached_ms, rel=0.07)
        assert parts["head"].arithmetic_ms == pytest.approx(2 * head * rows / 790e9, rel=1e-3)
        assert not parts["experts"].ms
        assert step.overlapped_ms <= step.ms <= step.bytes_ms + step.arithmetic_ms
    assert (many.bound, most.bound, prefill.bound) == ("bytes", "arithmetic", "arithmetic")
    assert prefill.families["linears"].ms == pytest.approx(145, rel=0.01)
    assert prefill.families["head"].bound == "bytes", "of each prompt's last token alone"
    assert one.launches == 32 * 6 + 8


def test_experts_count_as_often_as_tokens_choose_them(tmp_path: Path) -> None:
    """At one token 1.5 ms are known, and 13.4 at 64, which the experts alone take."""
    one, many = on(H200, works(tmp_path, QWEN3_30B_A3B, *equal_steps([1, 64], 128, [], 128)))
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    for step, share in ((one, 8 / 128), (many, 1 - (1 - 8 / 128) ** 64)):
        ms = share * experts / 4.28e9
        assert step.families["experts"].bytes_ms == pytest.approx(ms, rel=0.01)
    assert one.ms == pytest.approx(1.5, rel=0.06)
    assert many.families["experts"].ms == pytest.approx(13.4, rel=0.01)


def test_fp8_halves_bytes_and_arithmetic_of_linears_and_ranks_share_them(tmp_path: Path) -> None:
    config, step = LLAMA_3_8B | ONE_LAYER, StepSize(512, 1, 192)
    (plain,) = on(H200, works(tmp_path, config, step))
    (fp8,) = on(H200, works(tmp_path, config, step, quantization="fp8"))
    (two,) = on(H200, works(tmp_path, config, step, tensor_parallel_size=2))
    for bytes_or_arithmetic in ("bytes_ms", "arithmetic_ms"):
        whole, half, shared = (
            getattr(each.families["linears"], bytes_or_arithmetic) for each in (plain, fp8, two)
        )
        assert half == pytest.approx(whole / 2, rel=0.05)
        assert shared == pytest.approx(whole / 2, rel=0.05)
    assert fp8.families["head"] == plain.families["head"], "it stays in 16 bits"
    assert two.families["attention"].ms == pytest.approx(
        plain.families["attention"].ms / 2, rel=0.1
    )


def test_a_window_and_an_fp8_cache_bound_what_attention_reads(tmp_path: Path) -> None:
    config = LLAMA_3_8B | ONE_LAYER | {"model_type": "mistral", "sliding_window": 512}
    config["architectures"] = ["MistralForCausalLM"]
    steps = equal_steps([64], 4096, [], 128)
    (windowed,) = on(H200, works(tmp_path, config, *steps))
    (short,) = on(H200, works(tmp_path, config | {"sliding_window": None}, StepSize(64, 1, 512)))
    assert windowed.families["attention"].ms == pytest.approx(short.families["attention"].ms)
    (fp8,) = on(H200, works(tmp_path, config, *steps, kv_cache_dtype="fp8"))
    assert fp8.families["attention"].ms == pytest.approx(
        windowed.families["attention"].ms / 2, rel=0.1
    )


def test_calls_take_the_longer_of_two_times_one_after_the_other() -> None:
    gpu = Ceilings("a GPU", copy_tb_s=1.0, bfloat16_tflop_s=10.0, fp8_tflop_s=20.0)
    works = (
        Work("linears", bytes=4e9, flops=1e10, fp8=False),  # 4 and 1 ms
        Work("linears", bytes=1e9, flops=2e10, fp8=False),  # 1 and 2
        Work("experts", bytes=1e9, flops=6e10, fp8=True),  # 1 and 3
    )
    limit = limit_of(StepWork(StepSize(1, 1, 1), works, None, 0), gpu)
    assert (limit.families["linears"].ms, limit.families["experts"].ms) == (6.0, 3.0)
    assert (limit.ms, limit.overlapped_ms) == (9.0, 6.0)
    assert (limit.bytes_ms, limit.arithmetic_ms) == (6.0, 6.0)
    assert limit.families["linears"].bound == "bytes" and limit.bound == "arithmetic"
    assert limit.families["experts"].bound == "arithmetic"


def test_what_a_table_lacks_comes_from_its_fastest_linear_layer() -> None:
    assert (H200.copy_tb_s, H200.bfloat16_tflop_s, H200.fp8_tflop_s) == (4.28, 790.0, 1580.0)
    assert (H100.copy_tb_s, H100.bfloat16_tflop_s) == (2.97, 736.0)
    assert len(H200.notes) == 1 and "fastest measured linear layer" in H100.notes[0]
