"""Which numbers of tokens are captured follows from the batch and from a layer's weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from fusewright.config import (
    EngineOptions,
    Hardware,
    ModelLimits,
    capture_sizes,
    resolve,
)

GPU = Hardware("cuda", "a GPU", sm=90, num_sms=132, graphs="cuda")
LIMITS = ModelLimits(max_position_embeddings=4096, dtype="bfloat16")


def test_capture_sizes_of_the_default_are_the_51_of_the_rule() -> None:
    sizes = capture_sizes(256)
    assert sizes == (1, 2, 4, *range(8, 249, 8), *range(256, 513, 16))
    assert len(sizes) == 51


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, (1, 2)),
        (3, (1, 2, 3, 4)),
        (5, (1, 2, 4, 5, 8)),
        (16, (1, 2, 4, 8, 16, 24, 32)),
    ],
)
def test_capture_sizes_of_small_batches(max_num_seqs: int, sizes: tuple[int, ...]) -> None:
    assert capture_sizes(max_num_seqs) == sizes


LLAMA_3_8B = 4096.0 * (2 * 40 * 128 + 3 * 14336)
LLAMA_3_2_1B = 2048.0 * (2 * 40 * 64 + 3 * 8192)


@pytest.mark.parametrize(
    ("layer_params", "options", "largest"),
    [
        (LLAMA_3_2_1B, {}, 2432),
        (LLAMA_3_8B, {}, 640),
        (LLAMA_3_8B, {"quantization": "fp8"}, 1024),
        (1e4, {"tensor_parallel_size": 2}, 512),
        (1e4, {"pipeline_parallel_size": 2}, 512),
        (1e4, {}, 4096),
        (1e4, {"max_num_batched_tokens": 1000}, 896),
        (1e4, {"cudagraph_mode": "FULL"}, 512),
        (1e4, {"cudagraph_mode": "FULL_DECODE_ONLY"}, 512),
        (1e4, {"max_num_seqs": 16}, 32),
        (1e12, {}, 512),
        (0.0, {}, 512),
    ],
)
def test_steps_that_would_wait_for_their_launches_are_captured(
    layer_params: float, options: dict[str, Any], largest: int
) -> None:
    limits = replace(LIMITS, layer_params=layer_params)
    chosen = {"max_num_seqs": 256, **options}
    sizes = resolve(EngineOptions(**chosen), GPU, limits).capture.sizes
    assert sizes[-1] == largest
    assert sizes[:51] == capture_sizes(chosen["max_num_seqs"])
    assert sizes[51:] == tuple(range(640, largest + 1, 128))


@pytest.mark.parametrize(
    ("options", "rows", "largest"),
    [
        ({"max_num_seqs": 64}, 320, 512),
        ({"max_num_seqs": 1}, 5, 8),
        ({"max_num_seqs": 256}, 512, 512),
        ({"max_num_seqs": 600}, 600, 512),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 100}, 100, 100),
        ({"max_num_seqs": 64, "cudagraph_capture_sizes": (16, 128)}, 128, 128),
        ({"max_num_seqs": 64, "cudagraph_capture_sizes": (16,)}, 64, 16),
    ],
)
def test_rows_of_drafts_come_beside_requests_as_far_as_graphs_go(
    options: dict[str, Any], rows: int, largest: int
) -> None:
    for config in (None, '{"method": "ngram", "num_speculative_tokens": 4}'):
        config_of = resolve(EngineOptions(**options, speculative_config=config), GPU, LIMITS)
        seqs = options["max_num_seqs"]
        assert config_of.scheduler.max_num_seqs == seqs
        assert config_of.scheduler.max_num_rows == (rows if config else seqs)
    assert config_of.capture.sizes[-1] == largest


@given(st.integers(1, 2000))
def test_capture_sizes_ascend_end_at_the_limit_and_hold_the_full_batch(n: int) -> None:
    sizes = capture_sizes(n)
    limit = min(2 * n, 512)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] <= limit
    assert (n in sizes) == (n <= limit)
    rule = {1, 2, 4, *range(8, 249, 8), *range(256, 513, 16)}
    assert set(sizes) - {n} == {s for s in rule if s <= limit} - {n}
