"""paged_attention beyond conformance: an independent oracle, batch invariance, graph safety."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from fusewright.ops import PAGED_ATTENTION as OP
from fusewright.ops import TensorDesc
from fusewright.ops.launches.paged_attention_plan import plan
from fusewright.ops.paged_attention import _batch, context_symbols

IMPLEMENTATIONS = ["", "native", "triton"]
OUT = 5


def _gen(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def _run(implementation: str, args: tuple[Any, ...]) -> torch.Tensor:
    out = args[OUT].clone()
    OP.overload(implementation)(*args[:OUT], out, *args[OUT + 1 :])
    return out


def _oracle(args: tuple[Any, ...]) -> torch.Tensor:
    """One query, head and position at a time, in float64."""
    q, cache, table, seq_lens, starts, out, scale, window, cap = (
        a.cpu() if isinstance(a, torch.Tensor) else a for a in args
    )
    want, page, group = out.double(), cache.shape[2], q.shape[1] // cache.shape[3]
    for s, context in enumerate(seq_lens.tolist()):
        begin, end = starts[s].item(), starts[s + 1].item()
        for token in range(begin, end) if context else ():
            position = context - end + token
            oldest = max(0, position - window + 1) if window else 0
            slots = [(int(table[s, p // page]), p % page) for p in range(oldest, position + 1)]
            for head in range(q.shape[1]):
                keys, values = (
                    torch.stack([cache[b, i, o, head // group].double() for b, o in slots])
                    for i in (0, 1)
                )
                logits = keys @ q[token, head].double() * scale
                logits = cap * torch.tanh(logits / cap) if cap else logits
                want[token, head] = torch.softmax(logits, 0) @ values
    return want


def _random_batch(device: torch.device, seed: int) -> tuple[Any, ...]:
    rng = random.Random(seed)
    lengths = []
    for _ in range(rng.randint(1, 5)):
        queries = rng.choice([1, 1, 2, rng.randint(3, 40)])
        lengths.append((queries, rng.choice([queries, queries + rng.randint(0, 90)])))
    kv_heads = rng.choice([1, 2, 3])
    heads = (kv_heads * rng.choice([1, 2, 3, 4]), kv_heads, rng.choice([16, 24, 32, 64]))
    return _batch(
        torch.float32,
        device,
        _gen(device, seed),
        lengths,
        heads,
        rng.choice([8, 16, 32]),
        window=rng.choice([0, 0, 1, 17, 64]),
        cap=rng.choice([0.0, 0.0, 2.0]),
        padding=rng.randint(0, 3),
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_matches_a_scalar_float64_oracle(
    implementation: str, seed: int, device: torch.device
) -> None:
    args = _random_batch(torch.device(device), seed)
    got = _run(implementation, args).cpu().double()
    torch.testing.assert_close(got, _oracle(args), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_rows_and_empty_sequences_stay_untouched(
    implementation: str, device: torch.device
) -> None:
    device = torch.device(device)
    lengths = [(2, 9), (1, 0), (1, 5)]
    args = _batch(torch.float32, device, _gen(device, 0), lengths, (2, 1, 32), 8, padding=4)
    out = _run(implementation, args)
    untouched = (out == 7.0).all(-1).all(-1).tolist()
    assert untouched == [False, False, True, False, True, True, True, True]


def _one_sequence(args: tuple[Any, ...], s: int, first: int, queries: int) -> tuple[Any, ...]:
    """The same call for ``queries`` queries of sequence ``s`` alone, from its query ``first``."""
    q, cache, table, seq_lens, starts, out, *rest = args
    begin = int(starts[s])
    context = seq_lens[s] - (starts[s + 1] - starts[s]) + first + queries
    rows = slice(begin + first, begin + first + queries)
    new_starts = torch.tensor([0, queries], dtype=torch.int32, device=q.device)
    return (
        q[rows],
        cache,
        table[s : s + 1],
        context[None].int(),
        new_starts,
        out[rows].clone(),
        *rest,
    )


def test_an_unsplit_decode_is_bitwise_the_same_alone_among_decodes_and_in_a_mixed_batch(
    device: torch.device,
) -> None:
    device = torch.device(device)
    lengths = [(1, 256), (30, 60), (1, 130), (1, 31)]
    args = _batch(torch.bfloat16, device, _gen(device, 1), lengths, (4, 2, 64), 16)
    mixed = _run("triton", args)
    q, cache, table, seq_lens, starts, out, *rest = args
    keep = torch.tensor([0, 2, 3], device=device)
    tokens = starts[:-1][keep].long()
    decodes = _run(
        "triton",
        (
            q[tokens],
            cache,
            table[keep],
            seq_lens[keep],
            torch.arange(4, dtype=torch.int32, device=device),
            out[tokens],
            *rest,
        ),
    )
    for i, s in enumerate(keep.tolist()):
        alone = _run("triton", _one_sequence(args, s, 0, 1))
        assert torch.equal(alone[0], decodes[i])
        assert torch.equal(alone[0], mixed[int(starts[s])])


@pytest.mark.parametrize("window", [0, 50])
def test_prefill_in_chunks_is_the_whole_prefill(window: int, device: torch.device) -> None:
    device = torch.device(device)
    args = _batch(
        torch.bfloat16, device, _gen(device, 2), [(150, 150)], (4, 2, 64), 16, window=window
    )
    whole = _run("triton", args)
    first = 0
    for queries in (7, 64, 79):
        chunk = _run("triton", _one_sequence(args, 0, first, queries))
        here = whole[first : first + queries]
        torch.testing.assert_close(chunk, here, atol=1e-2, rtol=1.6e-2)
        # The interpreter's matrix product (NumPy) rounds a row by its place in the tile.
        assert device.type == "cpu" or torch.equal(chunk, here)
        first += queries


def test_split_decode_repeats_and_leaves_its_counters_zero(device: torch.device) -> None:
    from fusewright.ops.launches import paged_attention as kernels

    device = torch.device(device)
    args = _batch(torch.float32, device, _gen(device, 3), [(1, 600), (1, 900)], (4, 2, 32), 16)
    (decode,), _ = kernels.paged_attention(*args)
    assert decode.args["max_splits"] > 1
    first, second = _run("triton", args), _run("triton", args)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, _run("", args), atol=2e-5, rtol=2e-5)
    assert not kernels._counters(device).any()


def test_launches_depend_on_shapes_only(device: torch.device) -> None:
    from fusewright.ops.launches import paged_attention as kernels

    device = torch.device(device)
    args = _batch(torch.float32, device, _gen(device, 4), [(3, 40), (1, 9)], (4, 2, 32), 16)
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
    from fusewright.ops.launches import paged_attention as kernels

    device = torch.device(device)
    args = _batch(torch.float32, device, _gen(device, 5), [(1, 40), (1, 9)], (4, 2, 32), 16)
    launches, _ = kernels.paged_attention(*args)
    assert len(launches) == 1


def test_prefill_tiles_cover_every_split_of_the_tokens() -> None:
    rng = random.Random(0)
    for _ in range(300):
        group = rng.choice([1, 3, 4, 7, 16])
        lens = [rng.randint(1, 200) for _ in range(rng.randint(1, 30))]
        p = plan(sum(lens), len(lens), 4096, 2, group, 64, 16, 2, 132)
        block_q = p.prefill_constexprs["BLOCK_M"] // group
        assert sum(math.ceil(n / block_q) for n in lens) <= p.prefill_grid[1]


SHAPES = [
    (8, 4, 128, 2),
    (8, 4, 64, 2),
    (1, 16, 256, 2),
    (2, 1, 256, 4),
    (32, 1, 128, 4),
    (4, 64, 64, 2),
]


@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "itemsize"), SHAPES)
def test_the_persistent_decode_programs_are_resident_together(
    kv_heads: int, group: int, head_dim: int, itemsize: int
) -> None:
    p = plan(256, 256, 4096, kv_heads, group, head_dim, 16, itemsize, 132)
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
        (tuple(p.decode_constexprs[n] for n in ("BLOCK_N", "CHUNK")), p.decode_warps)
        for num_seqs in (1, 7, 64, 200)
        for num_tokens in (num_seqs, num_seqs + 300)
        for p in [plan(num_tokens, num_seqs, 4096, kv_heads, group, head_dim, 16, itemsize, 132)]
    }
    assert len(rounding) == 1


def test_costs_count_what_a_query_by_query_walk_counts() -> None:
    rng = random.Random(0)
    for _ in range(200):
        window = rng.choice([0, 1, 5, 30])
        queries = [rng.randint(1, 20) for _ in range(3)]
        contexts = [rng.choice([0, n + rng.randint(0, 40)]) for n in queries]
        seen = [
            set(range(max(0, p - window + 1) if window else 0, p + 1)) if c else set()
            for n, c in zip(queries, contexts, strict=True)
            for p in range(c - n, c)
        ]
        starts = [sum(queries[:s]) for s in range(4)]
        tokens = sum(len(set().union(*seen[starts[s] : starts[s + 1]])) for s in range(3))
        want = {"context_tokens": tokens, "query_context_pairs": sum(map(len, seen))}
        assert context_symbols(queries, contexts, window) == want


def test_cost_of_a_decode_is_its_kv_bytes(device: torch.device) -> None:
    device = torch.device(device)
    args = _batch(torch.bfloat16, device, _gen(device, 6), [(1, 40), (1, 24)], (8, 2, 64), 16)
    cost = OP.cost(OP.describe(args))
    values = context_symbols([1, 1], [40, 24])
    assert cost.bytes.subs(values) == 2 * (2 * 8 * 64 * 2) + 64 * (2 * 2 * 64 * 2)
    assert cost.flops.subs(values) == 4 * 8 * 64 * 64


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"q": TensorDesc(torch.bfloat16, (3, 8, 512))}, "head_dim 512"),
        ({"q": TensorDesc(torch.bfloat16, (3, 8, 20))}, "head_dim 20"),
        ({"kv_cache": TensorDesc(torch.bfloat16, (9, 2, 24, 2, 64))}, "block size 24"),
        ({"kv_cache": TensorDesc(torch.float16, (9, 2, 16, 2, 64))}, "float16"),
        ({"q": TensorDesc(torch.bfloat16, (3, 260, 64))}, "260 heads"),
        ({"scale": 0.0}, "scale 0.0"),
        ({}, ""),
    ],
)
def test_triton_says_what_it_cannot_run(changes: dict[str, Any], reason: str) -> None:
    cpu = torch.device("cpu")
    desc = OP.describe(_batch(torch.bfloat16, cpu, _gen(cpu, 7), [(3, 3)], (8, 2, 64), 16))
    changed = tuple((name, changes.get(name, value)) for name, value in desc.args)
    answer = OP.implementation("triton").supports(type(desc)(desc.op, changed, desc.device))
    assert reason in answer and bool(reason) == bool(answer)


def test_strided_heads_are_refused(device: torch.device) -> None:
    device = torch.device(device)
    args = _batch(torch.float32, device, _gen(device, 8), [(4, 4)], (4, 2, 32), 16)
    with pytest.raises(ValueError, match="heads must be contiguous"):
        _run("triton", (args[0][:, ::2], *args[1:]))


def test_more_sequences_than_the_plan_holds_are_refused(device: torch.device) -> None:
    device = torch.device(device)
    args = list(_batch(torch.float32, device, _gen(device, 9), [(1, 1)], (2, 1, 16), 8))
    args[2] = args[2].expand(4097, -1)
    with pytest.raises(ValueError, match="4096 sequences"):
        _run("triton", tuple(args))


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[(1, 700), (1, 20), (1, 0)], [(40, 90), (1, 600)]])
def test_a_captured_graph_follows_lengths_written_after_capture(lengths: Any) -> None:
    device = torch.device("cuda")
    heads = (8, 2, 128)
    args = _batch(torch.bfloat16, device, _gen(device, 10), lengths, heads, 16)
    cache = torch.randn_like(args[1])
    table = torch.zeros(len(lengths), 100, dtype=torch.int32, device=device)
    args = (args[0].clone(), cache, table, *args[3:])
    OP.overload("triton")(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        OP.overload("triton")(*args)
    rng = random.Random(0)
    for _ in range(5):
        # Other contexts, in another order, for as many tokens, in the captured buffers.
        grown = [(n, n + rng.randint(0, 1000)) for n, _ in lengths[::-1]]
        starts = [sum(n for n, _ in grown[:s]) for s in range(len(grown) + 1)]
        args[0].normal_()
        table.random_(0, len(cache))
        args[3].copy_(torch.tensor([c for _, c in grown]))
        args[4].copy_(torch.tensor(starts))
        args[OUT].fill_(7.0)
        graph.replay()
        want = _run("", (*args[:OUT], torch.full_like(args[OUT], 7.0), *args[OUT + 1 :]))
        torch.testing.assert_close(args[OUT], want, atol=1e-2, rtol=1.6e-2)


@pytest.mark.parametrize(
    "contexts",
    [[1], [256], [257], [900], [257, 1, 600], [5, 0, 700, 256, 31], [130] * 40, [300] * 9],
)
def test_long_decodes_are_right_however_the_batch_splits_them(
    contexts: list[int], device: torch.device
) -> None:
    device = torch.device(device)
    lengths = [(1, context) for context in contexts]
    args = _batch(torch.float32, device, _gen(device, 4), lengths, (2, 1, 16), 16)
    torch.testing.assert_close(_run("triton", args), _run("", args), atol=2e-5, rtol=2e-5)
