"""Launches, tiles, costs and limits of paged_attention: what is decided before anything runs."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from fusewright.ops import PAGED_ATTENTION as OP, TensorDesc
from fusewright.ops.attention.paged_attention import context_symbols
from fusewright.ops.attention.paged_attention_cases import batch
from fusewright.ops.launches import paged_attention as kernels
from fusewright.ops.launches.paged_attention_plan import plan
from tests.ops.test_paged_attention import generator, run_on_copy

FP8_CACHE = TensorDesc(torch.float8_e4m3fn, (9, 2, 16, 2, 64))


def test_launches_depend_on_shapes_only(device: torch.device) -> None:
    device = torch.device(device)
    args = batch(torch.float32, device, generator(device, 4), [(3, 40), (1, 9)], (4, 2, 32), 16)
    changed = list(args)
    for i in (2, 3, 4):
        changed[i] = torch.empty_like(args[i]).random_(0, 1 << 20)

    def described(call: Any) -> list[Any]:
        launches, _ = kernels.paged_attention(*call)
        scalars = [
            {k: v for k, v in x.args.items() if not isinstance(v, torch.Tensor)} for x in launches
        ]
        return [
            (x.kernel, x.grid, s, x.constexprs, x.num_warps, x.num_stages)
            for x, s in zip(launches, scalars, strict=True)
        ]

    assert described(args) == described(changed)


def test_pure_decode_is_one_launch(device: torch.device) -> None:
    device = torch.device(device)
    args = batch(torch.float32, device, generator(device, 5), [(1, 40), (1, 9)], (4, 2, 32), 16)
    launches, _ = kernels.paged_attention(*args)
    assert len(launches) == 1 and "decode" in launches[0].kernel


@pytest.mark.parametrize("queries", [1, 2, 70])
@pytest.mark.parametrize("padding", [3, 20])
def test_one_sequence_is_one_launch_whatever_of_its_tokens_is_padding(
    queries: int, padding: int, device: torch.device
) -> None:
    device = torch.device(device)
    lengths = [(queries, queries + 33)]
    args = batch(
        torch.float32, device, generator(device, 5), lengths, (4, 2, 32), 16, padding=padding
    )
    (launch,), _ = kernels.paged_attention(*args)
    assert "prefill" in launch.kernel
    torch.testing.assert_close(
        run_on_copy("triton", args), run_on_copy("", args), atol=2e-5, rtol=2e-5
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "rows", "registers"),
    [
        (128, 1, 64, 0),
        (575, 64, 64, 0),  # 63 decodes and a prompt
        (2048, 4, 64, 0),
        (2048, 1, 128, 128),
        (7956, 18, 128, 128),
        (2255, 256, 128, 128),  # 255 decodes and a prompt
        (2048, 16, 128, 128),
    ],
)
def test_prefill_tiles_follow_what_was_measured(
    num_tokens: int, num_seqs: int, rows: int, registers: int
) -> None:
    p = plan(num_tokens, num_seqs, 4096, 8, 4, 128, 16, 2, 2, num_sms=132)
    assert (p.prefill_constexprs["BLOCK_M"], p.prefill_registers) == (rows, registers)
    assert p.prefill_constexprs["BLOCK_N"] == 64
    with_fp8 = plan(num_tokens, num_seqs, 4096, 8, 4, 128, 16, 2, 1, num_sms=132)
    assert with_fp8.prefill_registers == 0


def test_prefill_tiles_cover_every_split_of_the_tokens() -> None:
    rng = random.Random(0)
    for _ in range(300):
        group = rng.choice([1, 3, 4, 7, 16])
        lens = [rng.randint(1, 200) for _ in range(rng.randint(1, 30))]
        p = plan(sum(lens), len(lens), 4096, 2, group, 64, 16, 2, 2, 132)
        block_q = p.prefill_constexprs["BLOCK_M"] // group
        assert sum(math.ceil(n / block_q) for n in lens) <= p.prefill_grid[1]


SHAPES = [
    (8, 4, 128, 2),
    (8, 4, 64, 2),
    (1, 16, 256, 2),
    (2, 1, 256, 4),
    (32, 1, 128, 4),
    (4, 64, 64, 2),
    (1, 8, 512, 2),
    (1, 64, 512, 2),
    (1, 64, 512, 4),
]


@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "itemsize"), SHAPES)
def test_the_persistent_decode_programs_are_resident_together(
    kv_heads: int, group: int, head_dim: int, itemsize: int
) -> None:
    p = plan(256, 256, 4096, kv_heads, group, head_dim, 16, itemsize, itemsize, 132)
    tile_bytes = p.decode_constexprs["BLOCK_N"] * head_dim * itemsize
    # K and V of every stage but one, which is in registers; q; what Triton needs besides.
    q_bytes = p.decode_constexprs["BLOCK_M"] * head_dim * itemsize
    shared_bytes = (p.decode_stages - 1) * 2 * tile_bytes + q_bytes + 2048
    assert shared_bytes * p.decode_grid[0] / 132 <= 227 * 1024
    assert 32 * p.decode_warps * p.decode_grid[0] / 132 <= 2048


@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "itemsize"), SHAPES)
def test_the_tiles_of_a_decode_do_not_depend_on_its_batch(
    kv_heads: int, group: int, head_dim: int, itemsize: int
) -> None:
    rounding = {
        (tuple(p.decode_constexprs[n] for n in ("BLOCK_N", "MERGE_BLOCK")), p.decode_warps)
        for num_seqs in (1, 7, 64, 200)
        for num_tokens in (num_seqs, num_seqs + 300)
        for p in [
            plan(num_tokens, num_seqs, 4096, kv_heads, group, head_dim, 16, itemsize, itemsize, 132)
        ]
    }
    assert len(rounding) == 1


def test_costs_count_what_a_query_by_query_walk_counts() -> None:
    rng = random.Random(0)
    for _ in range(200):
        window, chunk = rng.choice([0, 1, 5, 30]), rng.choice([0, 0, 1, 7, 30])
        queries = [rng.randint(1, 20) for _ in range(3)]
        contexts = [rng.choice([0, n + rng.randint(0, 40)]) for n in queries]
        seen = [
            {
                k
                for k in range(p + 1 if c else 0)
                if (not window or k > p - window) and (not chunk or k // chunk == p // chunk)
            }
            for n, c in zip(queries, contexts, strict=True)
            for p in range(c - n, c)
        ]
        starts = [sum(queries[:s]) for s in range(4)]
        tokens = sum(len(set().union(*seen[starts[s] : starts[s + 1]])) for s in range(3))
        want = {"context_tokens": tokens, "query_context_pairs": sum(map(len, seen))}
        assert context_symbols(queries, contexts, window, chunk) == want


def test_cost_of_a_decode_is_its_kv_bytes(device: torch.device) -> None:
    device = torch.device(device)
    args = batch(torch.bfloat16, device, generator(device, 6), [(1, 40), (1, 24)], (8, 2, 64), 16)
    cost = OP.cost(OP.describe(args))
    values = context_symbols([1, 1], [40, 24])
    assert cost.bytes.subs(values) == 2 * (2 * 8 * 64 * 2) + 64 * (2 * 2 * 64 * 2)
    assert cost.flops.subs(values) == 4 * 8 * 64 * 64


def test_cost_of_fp8_is_a_byte_an_element(device: torch.device) -> None:
    device, lengths = torch.device(device), [(1, 40), (1, 24)]
    args = batch(
        torch.bfloat16, device, generator(device, 6), lengths, (8, 2, 64), 16, fp8="kv, out"
    )
    cost = OP.cost(OP.describe(args))
    values = context_symbols([1, 1], [40, 24])
    assert cost.bytes.subs(values) == 2 * 8 * 64 * (2 + 1) + 64 * (2 * 2 * 64)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"q": TensorDesc(torch.bfloat16, (3, 8, 520))}, "head_dim 520"),
        ({"q": TensorDesc(torch.bfloat16, (3, 128, 512))}, ""),
        (
            {"q": TensorDesc(torch.bfloat16, (3, 130, 264))},
            "130 heads share 2 KV heads: with head_dim 264 a group has at most 64",
        ),
        ({"q": TensorDesc(torch.bfloat16, (3, 8, 20))}, "head_dim 20"),
        ({"kv_cache": TensorDesc(torch.bfloat16, (9, 2, 24, 2, 64))}, "block size 24"),
        ({"kv_cache": TensorDesc(torch.float16, (9, 2, 16, 2, 64))}, "float16"),
        ({"q": TensorDesc(torch.bfloat16, (3, 260, 64))}, "260 heads"),
        ({"scale": 0.0}, "scale 0.0"),
        ({"kv_cache": FP8_CACHE, "sm": 80}, "kv_cache is FP8, which sm_80 cannot convert"),
        ({"kv_cache": FP8_CACHE, "sm": 90}, ""),
        ({"kv_cache": FP8_CACHE}, ""),
        ({}, ""),
    ],
)
def test_triton_says_what_it_cannotrun_on_copy(changes: dict[str, Any], reason: str) -> None:
    cpu = torch.device("cpu")
    desc = OP.describe(batch(torch.bfloat16, cpu, generator(cpu, 7), [(3, 3)], (8, 2, 64), 16))
    changed = tuple((name, changes.get(name, value)) for name, value in desc.args)
    call = type(desc)(desc.op, changed, desc.device, changes.get("sm", 0))
    answer = OP.implementation("triton").supports(call)
    assert reason in answer and bool(reason) == bool(answer)


def test_strided_heads_are_refused(device: torch.device) -> None:
    device = torch.device(device)
    args = batch(torch.float32, device, generator(device, 8), [(4, 4)], (4, 2, 32), 16)
    with pytest.raises(ValueError, match="heads must be contiguous"):
        run_on_copy("triton", (args[0][:, ::2], *args[1:]))


def test_more_sequences_than_the_plan_holds_are_refused(device: torch.device) -> None:
    device = torch.device(device)
    args = list(batch(torch.float32, device, generator(device, 9), [(1, 1)], (2, 1, 16), 8))
    args[2] = args[2].expand(4097, -1)
    with pytest.raises(ValueError, match="4096 sequences"):
        run_on_copy("triton", tuple(args))
