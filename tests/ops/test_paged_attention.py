"""paged_attention beyond conformance: random batches, NaN, batch invariance, graph safety."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from fusewright.ops import PAGED_ATTENTION as OP, Case, load_cuda_library
from fusewright.ops.attention.paged_attention_cases import batch
from fusewright.ops.core.desc import Tolerance
from fusewright.ops.launches import paged_attention as kernels
from fusewright.ops.oracles import check_case

IMPLEMENTATIONS = ["", "native", "triton"]
OUT = 5


def generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def run_on_copy(implementation: str, args: tuple[Any, ...]) -> torch.Tensor:
    out = args[OUT].clone()
    OP.overload(implementation)(*args[:OUT], out, *args[OUT + 1 :])
    return out


@pytest.mark.parametrize("place", ["query", "key", "all keys", "value"])
@pytest.mark.parametrize("implementation", ["", "native", "triton", "cuda"])
def test_nan_reaches_the_queries_that_see_it(
    implementation: str, place: str, device: torch.device
) -> None:
    """PyTorch's attention for CPUs makes zeros of it where a query has no other logit."""
    if implementation == "cuda" and (device.type != "cuda" or not load_cuda_library()):
        pytest.skip("needs a GPU and csrc")
    lengths = [(1, 3), (1, 40), (4, 4), (2, 21), (1, 1)]
    args = batch(torch.bfloat16, device, generator(device, 3), lengths, (4, 2, 64), 16)
    q, cache, table = args[:3]
    for s in range(len(lengths)):
        if place == "query":
            q[[0, 1, 2, 6, 8]] = torch.nan  # the first of each sequence
        elif place == "key":
            cache[table[s, 0], 0, 0, :, 5] = torch.nan
        elif place == "value":
            cache[table[s, 0], 1, 0] = torch.nan
        else:
            used = table[s, : -(-lengths[s][1] // 16)].long()
            cache[used, 0] = torch.nan
    got = run_on_copy(implementation, args).float().isnan()
    whole = torch.ones(9, dtype=torch.bool, device=device)
    if place == "query":
        whole[[3, 4, 5, 7]] = False
    assert torch.equal(got.all(-1).all(-1), whole) and torch.equal(got.any(-1).any(-1), whole)


TIGHT = {**OP.tolerances, torch.float32: Tolerance(2e-5, 2e-5)}


def _random_batch(device: torch.device, seed: int, fp8: str = "") -> tuple[Any, ...]:
    rng = random.Random(seed)
    lengths = []
    for _ in range(rng.randint(1, 5)):
        queries = rng.choice([1, 1, 2, rng.randint(3, 40)])
        lengths.append((queries, rng.choice([queries, queries + rng.randint(0, 90)])))
    kv_heads = rng.choice([1, 2, 3])
    heads = (kv_heads * rng.choice([1, 2, 3, 4]), kv_heads, rng.choice([16, 24, 32, 64]))
    return batch(
        torch.float32,
        device,
        generator(device, seed),
        lengths,
        heads,
        rng.choice([8, 16, 32]),
        window=rng.choice([0, 0, 1, 17, 64]),
        chunk=rng.choice([0, 0, 1, 24, 50]),
        sinks=rng.choice([None, torch.float32]),
        cap=rng.choice([0.0, 0.0, 2.0]),
        padding=rng.randint(0, 3),
        fp8=fp8,
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_matches_a_scalar_float64_oracle(
    implementation: str, seed: int, device: torch.device
) -> None:
    case = Case(f"seed {seed}", _random_batch(torch.device(device), seed), TIGHT)
    check_case(OP, case, torch.float32, OP.overload(implementation))


@pytest.mark.product
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fp8", ["kv", "scaled kv", "scaled kv, out"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fp8_matches_a_scalar_float64_oracle(
    implementation: str, fp8: str, seed: int, device: torch.device
) -> None:
    """In float32, so exact but for the rounding of ``out``."""
    case = Case(f"seed {seed}", _random_batch(torch.device(device), seed, fp8), TIGHT)
    check_case(OP, case, torch.float32, OP.overload(implementation))


@pytest.mark.parametrize("contexts", [[60], [700]])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fp8_output_saturates(
    implementation: str, queries: int, contexts: list[int], device: torch.device
) -> None:
    device = torch.device(device)
    lengths = [(queries, context) for context in contexts]
    args = list(
        batch(torch.float32, device, generator(device, 0), lengths, (2, 1, 16), 16, fp8="out")
    )
    args[-1].fill_(1e-9)
    out = run_on_copy(implementation, tuple(args))
    assert set(out.float().unique().tolist()) == {-448.0, 448.0}
    args[-1].fill_(1e3)
    assert (run_on_copy(implementation, tuple(args)).float() == 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("fp8", "changes", "message"),
    [
        ("kv", {0: torch.zeros(3, 2, 16, dtype=torch.float16)}, "out is torch.float32"),
        ("", {9: torch.ones(2, 1)}, "kv_scale is given for a kv_cache of torch.float32"),
        (
            "kv",
            {9: torch.ones(2, 2)},
            r"kv_scale is torch.float32 \[2, 2\], expected float32 \[2, 1",
        ),
        ("kv", {9: torch.ones(2, 1).double()}, "kv_scale is torch.float64"),
        ("", {10: torch.ones(1, 1)}, "out is torch.float32, expected torch.float8_e4m3fn with"),
        ("out", {10: None}, "out is torch.float8_e4m3fn, expected torch.float32 without"),
        ("out", {10: torch.ones(1)}, r"out_scale is torch.float32 \[1\], expected float32 \[1, 1"),
        ("", {11: torch.ones(1)}, r"sinks is torch.float32 \[1\], expected torch.float32 \[2\]"),
        ("", {11: torch.ones(2, dtype=torch.float16)}, "sinks is torch.float16"),
        ("", {12: -1}, "chunk is -1, expected a number of positions"),
        ("", {7: -1}, "sliding_window is -1"),
    ],
)
def test_scales_and_dtypes_that_disagree_are_refused(
    implementation: str, fp8: str, changes: dict[int, Any], message: str, device: torch.device
) -> None:
    device = torch.device(device)
    args = list(
        batch(torch.float32, device, generator(device, 0), [(3, 5)], (2, 1, 16), 16, fp8=fp8)
    )
    args += [None, 0]
    for i, value in changes.items():
        args[i] = value.to(device) if isinstance(value, torch.Tensor) else value
    with pytest.raises(ValueError, match=message):
        run_on_copy(implementation, tuple(args))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_rows_and_empty_sequences_stay_untouched(
    implementation: str, device: torch.device
) -> None:
    device = torch.device(device)
    lengths = [(2, 9), (1, 0), (1, 5)]
    args = batch(torch.float32, device, generator(device, 0), lengths, (2, 1, 32), 8, padding=4)
    out = run_on_copy(implementation, args)
    untouched = (out == 7.0).all(-1).all(-1).tolist()
    assert untouched == [False, False, True, False, True, True, True, True]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_head_size_is_right(implementation: str, device: torch.device) -> None:
    """Prefill, decode and split decode, with sinks and chunks; sizes that are no powers of two are
    padded."""
    lengths = [(3, 20), (1, 690)]
    for dim in (8, 16, 24, 32, 64, 80, 96, 112, 128, 192, 256, 512):
        args = batch(
            torch.float32, device, generator(device, dim), lengths, (2, 1, dim), 16,
            chunk=400, sinks=torch.float32
        )  # fmt: skip
        assert not OP.implementation(implementation or "native").supports(OP.describe(args))
        case = Case(f"head_dim {dim}", args, TIGHT)
        check_case(OP, case, torch.float32, OP.overload(implementation))


@pytest.mark.parametrize("value", [-torch.inf, 200.0])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_sink_that_takes_nothing_or_all(
    implementation: str, value: float, device: torch.device
) -> None:
    """A head whose sink is -inf is one without; one far above all logits has a result of zero."""
    lengths = [(5, 20), (1, 700), (1, 3)]
    args = batch(torch.float32, device, generator(device, 0), lengths, (4, 2, 16), 16)
    sinks = torch.full((4,), value, device=device)
    got = run_on_copy(implementation, (*args, sinks, 0))
    want = run_on_copy(implementation, args) if value < 0 else torch.zeros_like(got)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_padded_to_the_width_of_keys_give_zeros_behind_their_own(
    implementation: str, device: torch.device
) -> None:
    """So a model whose V is narrower than K stores V padded, and slices the result."""
    lengths, narrow = [(5, 20), (1, 300), (1, 9)], 16
    args = batch(torch.float32, device, generator(device, 0), lengths, (4, 2, 24), 16)
    whole = run_on_copy(implementation, args)
    args[1][:, 1, :, :, narrow:] = 0
    out = run_on_copy(implementation, args)
    assert (out[..., narrow:] == 0).all()
    torch.testing.assert_close(out[..., :narrow], whole[..., :narrow], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_chunks_are_separate_sequences(implementation: str, device: torch.device) -> None:
    """A prompt in chunks of 32 is as many prompts, whose blocks are those of the chunks."""
    args = batch(torch.float32, device, generator(device, 0), [(90, 90)], (4, 2, 16), 16)
    got = run_on_copy(implementation, (*args, None, 32))
    table = args[2][0]
    tables = torch.stack([table[0:2], table[2:4], table[4:6]])
    lens = torch.tensor([32, 32, 26], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 32, 64, 90], dtype=torch.int32, device=device)
    want = run_on_copy(implementation, (*args[:2], tables, lens, starts, *args[5:]))
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


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
    args = batch(torch.bfloat16, device, generator(device, 1), lengths, (4, 2, 64), 16)
    mixed = run_on_copy("triton", args)
    q, cache, table, seq_lens, starts, out, *rest = args
    keep = torch.tensor([0, 2, 3], device=device)
    tokens = starts[:-1][keep].long()
    decodes = run_on_copy(
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
        alone = run_on_copy("triton", _one_sequence(args, s, 0, 1))
        assert torch.equal(alone[0], decodes[i])
        assert torch.equal(alone[0], mixed[int(starts[s])])


@pytest.mark.parametrize("window", [0, 50])
def test_prefill_in_chunks_is_the_whole_prefill(window: int, device: torch.device) -> None:
    device = torch.device(device)
    args = batch(
        torch.bfloat16, device, generator(device, 2), [(150, 150)], (4, 2, 64), 16, window=window
    )
    whole = run_on_copy("triton", args)
    first = 0
    for queries in (7, 64, 79):
        chunk = run_on_copy("triton", _one_sequence(args, 0, first, queries))
        here = whole[first : first + queries]
        torch.testing.assert_close(chunk, here, atol=1e-2, rtol=1.6e-2)
        # The interpreter's matmul (NumPy) rounds a row by its place in the tile.
        assert device.type == "cpu" or torch.equal(chunk, here)
        first += queries


def test_split_decode_repeats_and_leaves_its_counters_zero(device: torch.device) -> None:
    device = torch.device(device)
    args = batch(torch.float32, device, generator(device, 3), [(1, 600), (1, 900)], (4, 2, 32), 16)
    (decode,), _ = kernels.paged_attention(*args)
    assert decode.args["max_splits"] > 1
    first, second = run_on_copy("triton", args), run_on_copy("triton", args)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, run_on_copy("", args), atol=2e-5, rtol=2e-5)
    assert not kernels._counters(device).any()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"chunk": 500, "sinks": torch.float32}], ids=str)
@pytest.mark.parametrize("lengths", [[(1, 700), (1, 20), (1, 0)], [(40, 90), (1, 600)]])
def test_a_captured_graph_follows_lengths_written_after_capture(lengths: Any, options: Any) -> None:
    device = torch.device("cuda")
    heads = (8, 2, 128)
    args = batch(torch.bfloat16, device, generator(device, 10), lengths, heads, 16, **options)
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
        want = run_on_copy("", (*args[:OUT], torch.full_like(args[OUT], 7.0), *args[OUT + 1 :]))
        torch.testing.assert_close(args[OUT], want, atol=1e-2, rtol=1.6e-2)


@pytest.mark.parametrize(
    "contexts",
    [[1], [256], [257], [900], [257, 1, 600], [5, 0, 700, 256, 31], [130] * 40, [300] * 9],
)
@pytest.mark.parametrize("sinks", [None, torch.float32], ids=str)
def test_long_decodes_are_right_however_the_batch_splits_them(
    contexts: list[int], sinks: torch.dtype | None, device: torch.device
) -> None:
    device = torch.device(device)
    lengths = [(1, context) for context in contexts]
    gen = generator(device, 4)
    args = batch(torch.float32, device, gen, lengths, (2, 1, 16), 16, sinks=sinks)
    torch.testing.assert_close(
        run_on_copy("triton", args), run_on_copy("", args), atol=2e-5, rtol=2e-5
    )
