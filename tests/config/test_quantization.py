"""FP8 options against the checkpoint and the hardware."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fusewright.config import EngineOptions, Hardware, ModelLimits, UserError, resolve

H200 = Hardware("cuda", "NVIDIA H200", sm=90, num_sms=132, graphs="cuda")
A100 = Hardware("cuda", "NVIDIA A100", sm=80, num_sms=108, graphs="cuda")
CPU = Hardware("cpu", "a CPU")


def resolved(
    checkpoint: str = "none", hardware: Hardware = H200, **options: Any
) -> tuple[str, str]:
    """(quantization, dtype of the KV cache)."""
    limits = ModelLimits(4096, "bfloat16", checkpoint)
    config = resolve(EngineOptions(**options), hardware, limits)
    return config.precision.quantization, config.precision.kv_cache_dtype


def refusal(*args: Any, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        resolved(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_unset_options_follow_the_checkpoint() -> None:
    assert resolved() == ("none", "bfloat16")
    assert resolved(dtype="float16") == ("none", "float16")
    for kind in ("fp8", "fp8_block", "fp8_static"):
        assert resolved(kind) == (kind, "bfloat16")
        assert resolved(kind, quantization=kind) == (kind, "bfloat16")


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_an_fp8_kv_cache_has_two_names(name: str) -> None:
    assert resolved("fp8_block", kv_cache_dtype=name) == ("fp8_block", "fp8_e4m3")


def test_unquantized_weights_are_quantized_by_what_is_found_at_run_time() -> None:
    assert resolved(quantization="fp8") == ("fp8", "bfloat16")
    assert resolved(quantization="fp8_block", hardware=CPU) == ("fp8_block", "bfloat16")
    message = refusal(quantization="fp8_static")
    assert "scales of activations must be in the checkpoint" in message and "use fp8 or" in message
    assert resolved(quantization="fp8_static", load_format="dummy")[0] == "fp8_static"


def test_a_checkpoint_keeps_its_scheme() -> None:
    assert refusal("fp8_static", quantization="fp8") == (
        "quantization=fp8: the checkpoint is quantized as fp8_static already; drop it, or give "
        "unquantized weights"
    )


@pytest.mark.parametrize(
    ("checkpoint", "options", "expected"),
    [
        ("none", {"quantization": "fp8"}, "quantization=fp8: FP8 needs compute capability 8.9"),
        ("fp8_block", {}, "quantization of the checkpoint=fp8_block: FP8 needs"),
        ("none", {"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8: FP8 needs"),
    ],
)
def test_a_gpu_without_fp8_is_refused(
    checkpoint: str, options: dict[str, str], expected: str
) -> None:
    message = refusal(checkpoint, A100, **options)
    assert message.startswith(expected)
    assert "8.9 or higher, NVIDIA A100 has 8.0" in message
    assert resolved(checkpoint, CPU, **options)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"quantization": "int3"}, "quantization='int3': expected fp8 or fp8_block or fp8_static"),
        ({"quantization": "awq"}, "quantization='awq': a checkpoint says itself that it is quant"),
        ({"quantization": "gptq_marlin"}, "quantization='gptq_marlin': a checkpoint says itself"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8': expected auto or fp8 or fp8_e4m3"),
    ],
)
def test_an_unknown_value_is_refused(option: dict[str, str], expected: str) -> None:
    assert refusal(**option).startswith(expected)


def test_formats_of_weights_alone_have_short_names() -> None:
    assert resolved(quantization="int4") == ("int4_g128", "bfloat16")
    assert resolved(quantization="int8", hardware=A100) == ("int8_channel", "bfloat16")
    assert resolved("int4_g128", quantization="int4")[0] == "int4_g128"
    assert refusal("int4_g32", quantization="int4").startswith("quantization=int4_g128: the check")
    for name in ("int4", "int8", "int4_g32"):
        draft = {"model": "abacus-draft", "num_speculative_tokens": 2, "quantization": name}
        assert resolved(speculative_config=json.dumps(draft)), "a draft model's are the engine's"
