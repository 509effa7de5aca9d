"""Decodes with sinks by csrc: however the work is divided, a head's sink is in its total once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.ops import PAGED_ATTENTION, Case
from fusewright.ops.attention.paged_attention_cases import as_rows, batch
from fusewright.ops.attention.paged_attention_cuda import decode
from fusewright.ops.conformance import check_case
from tests.ops.csrc import csrc_kernels

pytestmark = pytest.mark.gpu

CACHE, OUT, SINKS = 1, 5, 11
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

# On an H200: KV heads, contexts.
DIVISIONS: dict[str, tuple[int, list[int]]] = {
    "clusters of 8": (8, [700, 33]),
    "clusters of 4": (8, [300, 1, 17, 64, 700, 450]),
    "clusters of 2": (8, [300 + 9 * n for n in range(12)]),
    "blocks": (8, [300 + 9 * n for n in range(30)]),
    "teams of 2 warps": (8, [200 + n for n in range(60)]),
    "warps": (8, [200 + n for n in range(120)]),
    "shares": (8, [900] * 150),
    "cut sequences": (8, [60] * 7 + [20000, 0] + [60] * 8),
    "groups of shares": (1, [512] * 15 + [1 << 17] + [700] * 20),
    "parts of clusters of 8": (1, [40000, 17000]),
    "parts of clusters of 2": (8, [40000, 30000]),
}
LAYERS: list[tuple[int, int, torch.dtype, dict[str, Any]]] = [
    (8, 64, BF16, {"sinks": BF16}),
    (8, 64, BF16, {"sinks": F32, "window": 128}),
    (8, 64, BF16, {"sinks": BF16, "fp8": "scaled kv, out", "window": 5000}),
    (16, 64, F16, {"sinks": F16, "fp8": "kv", "cap": 5.0}),
    (3, 128, F16, {"sinks": F32, "fp8": "out"}),
    (9, 128, BF16, {"sinks": BF16, "window": 9000}),
]
"""Heads of a group, head_dim, dtype and options."""


def call(
    seed: int,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    **options: Any,
) -> tuple[Any, ...]:
    """A call whose sinks take about half of the weights in some heads, at any of its lengths, and
    whose values have a mean: what a sink takes is then seen beside the tolerance."""
    gen = torch.Generator("cuda").manual_seed(seed)
    args = batch(dtype, torch.device("cuda"), gen, lengths, heads, 16, **options)
    seen = [min(n, options.get("window", 0) or n) for _, n in lengths if n]
    low, high = (math.log(pick(seen)) + 0.5 for pick in (min, max))
    sinks = torch.linspace(low, high, heads[0], device="cuda")
    args[SINKS].copy_(sinks + torch.randn(heads[0], generator=gen, device="cuda"))
    values = args[CACHE][:, 1]
    mean = 16 if "scaled" in options.get("fp8", "") else 1  # times scales of 1/64 to 5/64
    values.copy_((values.float() + mean).to(values.dtype))
    return args


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize(("group", "dim", "dtype", "options"), LAYERS, ids=str)
def test_every_division_counts_a_sink_once(
    division: str, group: int, dim: int, dtype: torch.dtype, options: dict[str, Any], fw_seed: int
) -> None:
    csrc_kernels()
    kv_heads, contexts = DIVISIONS[division]
    heads = group * kv_heads, kv_heads, dim
    args = call(fw_seed, [(1, context) for context in contexts], heads, dtype, **options)
    tolerance = PAGED_ATTENTION.tolerances[args[OUT].dtype]
    check_case(PAGED_ATTENTION, decode, Case(f"--fw-seed={fw_seed}", args), tolerance)
    first = result(args)
    assert all(torch.equal(result(args), first) for _ in range(2))


def result(args: tuple[Any, ...], sinks: Tensor | None = None) -> Tensor:
    """The kernel's result of a call, with other sinks if they are given."""
    out = torch.full_like(args[OUT], 7.0)
    sinks = args[SINKS] if sinks is None else sinks
    decode(*args[:OUT], out, *args[OUT + 1 : SINKS], sinks, *args[SINKS + 1 :])
    return out.float()


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_sink_takes_nothing_or_all(division: str, dtype: torch.dtype, fw_seed: int) -> None:
    """A head whose sink is -inf has the bits of one without; one far above all logits has zeros."""
    csrc_kernels()
    kv_heads, contexts = DIVISIONS[division]
    lengths = [(1, context) for context in contexts]
    args = call(fw_seed, lengths, (8 * kv_heads, kv_heads, 64), BF16, sinks=dtype)
    without = (*args[:SINKS], None, *args[SINKS + 1 :])
    assert torch.equal(result(args, torch.full_like(args[SINKS], -torch.inf)), result(without))
    live = args[3] > 0
    for value in (130.0, 1e30):
        sinks = torch.full_like(args[SINKS], value)
        assert (result(args, sinks)[live] == 0).all(), value


ROWS: dict[str, list[tuple[int, float]]] = {
    "one of 12": [(12, 1.0)],
    "8 of 5": [(5, 1.0 + i / 8) for i in range(8)],
    "64 of 5": [(5, 1.0)] * 64,
    "300 of 3": [(3, 1.0 + i % 7) for i in range(300)],
}
"""Rows and relative context of each sequence: joined, they are items of several blocks, of a block,
of a few warps, and shares."""


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize(
    ("group", "dim", "options"),
    [
        (8, 64, {"sinks": BF16}),
        (8, 64, {"sinks": F32, "window": 0.95}),
        (8, 64, {"sinks": BF16, "fp8": "scaled kv, out"}),
        (3, 128, {"sinks": F32, "fp8": "out"}),
    ],
    ids=str,
)
def test_joined_rows_of_drafts_count_a_sink_once(
    shape: str, group: int, dim: int, options: dict[str, Any], fw_seed: int
) -> None:
    """Contexts are so long that joining saves 350 MB: csrc joins rows from 300 on.  A window is a
    share of the longest."""
    csrc_kernels()
    kv_heads, itemsize = 8, 1 if "kv" in options.get("fp8", "") else 2
    saved = sum((rows - 1) * share for rows, share in ROWS[shape])
    each = 350e6 / saved / (2 * kv_heads * dim * itemsize)
    lengths = [(rows, rows + int(each * share)) for rows, share in ROWS[shape]]
    window = int(options.get("window", 0) * max(context for _, context in lengths))
    heads = group * kv_heads, kv_heads, dim
    args = call(fw_seed, lengths, heads, BF16, padding=1, **options | {"window": window})
    expected = torch.full_like(args[OUT], 7.0)
    PAGED_ATTENTION.overload()(*args[:OUT], expected, *args[OUT + 1 :])
    rows = as_rows(args)
    got = result(rows)
    tolerance = PAGED_ATTENTION.tolerances[args[OUT].dtype]
    torch.testing.assert_close(got, expected.float(), rtol=tolerance.rtol, atol=tolerance.atol)
    assert torch.equal(result(rows), got)


def test_it_refuses_sinks_of_another_shape_or_dtype() -> None:
    csrc_kernels()
    args = call(0, [(1, 9)], (8, 2, 64), BF16, sinks=BF16)
    wrong: list[tuple[Tensor, str]] = [
        (args[SINKS][:7], r"sinks has shape \[7\] .* expected a contiguous \[8\]"),
        (args[SINKS].half(), "of float32 or q's dtype"),
        (args[SINKS].repeat(2)[::2], "expected a contiguous"),
        (args[SINKS].cpu(), "sinks is not on q's device"),
    ]
    for sinks, message in wrong:
        with pytest.raises(RuntimeError, match=message):
            result(args, sinks)
