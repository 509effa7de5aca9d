"""``fw_cuda::prefill_attention``: what it computes beyond the cases of ``paged_attention``."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.ops import PAGED_ATTENTION, Case
from fusewright.ops.attention.paged_attention_cases import batch
from fusewright.ops.conformance import check_case
from fusewright.ops.launches.paged_attention import AttentionArgs
from tests.ops.csrc import csrc_kernels
from tests.ops.replays import AttentionReplays

pytestmark = pytest.mark.gpu

HEADS = (8, 2, 128)
OUT = 5
Kernel = Callable[..., None]


@pytest.fixture
def kernel() -> Kernel:
    op: Kernel = csrc_kernels().prefill_attention.default

    def run(*args: Any, fewest: int = 1) -> None:
        op(*AttentionArgs(*args), fewest)

    return run


def made(seed: int, lengths: Sequence[tuple[int, int]], **options: Any) -> tuple[Any, ...]:
    gen = torch.Generator("cuda").manual_seed(seed)
    dtype = options.pop("dtype", torch.bfloat16)
    heads, block_size = options.pop("heads", HEADS), options.pop("block_size", 16)
    return batch(dtype, torch.device("cuda"), gen, lengths, heads, block_size, **options)


def check(kernel: Kernel, label: str, args: tuple[Any, ...]) -> None:
    tolerance = PAGED_ATTENTION.tolerances[args[OUT].dtype]
    check_case(PAGED_ATTENTION, kernel, Case(label, args), tolerance)


BATCHES = {
    "one query": [(1, 1)],
    "edges of a tile": [(n, n) for n in (2, 63, 64, 65, 127, 128, 129, 255, 256, 257)],
    "edges of blocks": [(3, n) for n in (7, 8, 9, 15, 16, 17, 31, 33, 127, 128, 129)],
    "one": [(1500, 1500)],
    "chunks": [(300, 1300), (128, 1000), (77, 900), (500, 640)],
    "mixed": [(1, 40), (23, 23), (0, 0), (5, 150), (1, 0), (260, 264), (1, 1000)],
    "many": [(n % 50 + 1, 3 * n % 700 + 60) for n in range(200)],
    "more than fit at once": [(500, 500 + 10 * n) for n in range(40)],
    "all skipped": [(1, 0), (2, 0)],
}
SHAPES = [
    ((8, 2, 128), 16, torch.bfloat16),
    ((3, 3, 128), 8, torch.float16),
    ((6, 1, 128), 64, torch.float16),
    ((20, 1, 128), 256, torch.bfloat16),
    ((8, 2, 64), 16, torch.bfloat16),
    ((3, 1, 64), 128, torch.float16),
    ((4, 2, 256), 16, torch.bfloat16),
    ((2, 2, 256), 64, torch.float16),
]
# FP8 of a head_dim of 256 leaves room for few sequences.
MOST_SEQS_OF_256_FP8 = 64


@pytest.mark.parametrize("formats", [("", "out"), ("kv", "scaled kv, out")], ids=["16", "fp8"])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_it_matches_the_reference(
    kernel: Kernel, lengths: list[tuple[int, int]], formats: tuple[str, str], fw_seed: int
) -> None:
    for i, (heads, block_size, dtype) in enumerate(SHAPES):
        fp8 = formats[i % 2]
        if heads[2] == 256 and "kv" in fp8 and len(lengths) > MOST_SEQS_OF_256_FP8:
            continue
        args = made(fw_seed, lengths, heads=heads, block_size=block_size, dtype=dtype, fp8=fp8)
        check(kernel, f"{heads}, block size {block_size}, --fw-seed={fw_seed}", args)


FEATURES: list[dict[str, Any]] = [
    {"window": 300},
    {"window": 1},
    {"window": 128, "sinks": torch.bfloat16},
    {"window": 77, "cap": 5.0},
    {"cap": 3.0, "sinks": torch.float32},
    {"sinks": torch.float32},
    {"chunk": 200},
    {"chunk": 384, "window": 250, "sinks": torch.float32},
]


@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_it_takes_windows_chunks_caps_and_sinks(
    kernel: Kernel, features: dict[str, Any], fw_seed: int
) -> None:
    lengths = [(1000, 1000), (2, 600), (1, 0), (333, 700), (130, 1400)]
    for i, (heads, block_size, dtype) in enumerate(SHAPES):
        fp8 = ("", "scaled kv")[(i + FEATURES.index(features)) % 2]
        if heads[2] == 64 and features.keys() != {"sinks"}:
            continue  # those are Triton's
        options = features | {"heads": heads, "block_size": block_size, "dtype": dtype, "fp8": fp8}
        if features.get("sinks") == torch.bfloat16:
            options["sinks"] = dtype
        args = made(fw_seed, lengths, **options)
        check(kernel, f"{heads}, block size {block_size}, --fw-seed={fw_seed}", args)


def test_it_matches_the_reference_at_128k(kernel: Kernel, fw_seed: int) -> None:
    for lengths in ([(5, 1 << 17)], [(2, 5), (150, (1 << 17) - 1), (9, 700)]):
        check(kernel, f"--fw-seed={fw_seed}", made(fw_seed, lengths))


@pytest.mark.parametrize("factor", [1e-30, 1e-5, 3e5, 1e9])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_queries_of_any_size_meet_fp8(
    kernel: Kernel, head_dim: int, factor: float, fw_seed: int
) -> None:
    """The kernel multiplies in fp16, which holds neither such numbers nor logits of them."""
    lengths = [(70, 200), (300, 300)]
    args = [*made(fw_seed, lengths, heads=(8, 2, head_dim), fp8="scaled kv")]
    args[0] = args[0] * factor
    args[6] /= factor
    check(kernel, f"--fw-seed={fw_seed}", tuple(args))


def test_random_batches_match_the_reference(kernel: Kernel, fw_seed: int) -> None:
    rng = random.Random(fw_seed)
    for i in range(20):
        queries = [rng.choice([0, 1, rng.randint(1, 300)]) for _ in range(rng.randint(1, 64))]
        lengths = [(n, n + rng.choice([0, rng.randint(0, 900)])) for n in queries]
        heads, block_size, dtype = SHAPES[i % len(SHAPES)]
        options = {"heads": heads, "block_size": block_size, "dtype": dtype, "padding": i % 3}
        args = made(fw_seed + i, lengths, fp8="kv" if i % 5 == 0 else "", **options)
        check(kernel, f"{lengths}, --fw-seed={fw_seed}", args)


def test_it_leaves_what_has_fewer_queries(kernel: Kernel, fw_seed: int) -> None:
    args = made(fw_seed, [(1, 40), (3, 700), (1, 900), (0, 0), (2, 2)], padding=2)
    want = args[OUT].clone()
    PAGED_ATTENTION.overload()(*args[:OUT], want, *args[OUT + 1 :])
    kernel(*args, fewest=2)
    several = torch.tensor([1, 2, 3, 5, 6], device="cuda")
    torch.testing.assert_close(args[OUT][several], want[several], atol=1e-2, rtol=1.6e-2)
    others = torch.tensor([0, 4, 7, 8], device="cuda")
    assert (args[OUT][others] == 7.0).all()


def rows_of(kernel: Kernel, args: tuple[Any, ...], chunks: Sequence[tuple[int, int, int]]) -> Any:
    """Results of chunks (sequence, first query, one past the last) of the batch's sequences."""
    q, cache, table, _, starts, _, *rest = args

    def ints(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    begins = starts.tolist()
    queries = torch.cat([q[begins[s] + first : begins[s] + stop] for s, first, stop in chunks])
    counts = [stop - first for _, first, stop in chunks]
    new_starts = ints([sum(counts[:i]) for i in range(len(counts) + 1)])
    result = torch.full_like(queries, 7.0)
    tables = table[[s for s, _, _ in chunks]]
    kernel(queries, cache, tables, ints([c for _, _, c in chunks]), new_starts, result, *rest)
    return result.split(counts)


@pytest.mark.parametrize(
    ("dtype", "heads", "fp8", "window"),
    [
        *((torch.bfloat16, HEADS, "", window) for window in (0, 131, 200, 512)),
        *((torch.float16, HEADS, "", window) for window in (0, 131, 200, 512)),
        *((torch.bfloat16, HEADS, "scaled kv", window) for window in (0, 200)),
        *((torch.bfloat16, (4, 2, 256), "", window) for window in (0, 131)),
        (torch.bfloat16, (8, 2, 64), "", 0),
        (torch.bfloat16, (8, 2, 64), "kv", 0),
    ],
)
def test_a_query_has_the_same_bits_in_any_batch_and_chunk(
    kernel: Kernel,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    fp8: str,
    window: int,
    fw_seed: int,
) -> None:
    """A kernel that scaled sums by one and an ulp failed at one chunk in twenty, so there are many:
    random ones beside whole prompts and a last token alone."""
    lengths, rng = [700, 300, 1000], random.Random(fw_seed)
    batches = [
        [(0, 0, 700)],
        [(2, 0, 1000), (0, 0, 700)],
        [(1, 250, 300), (0, 100, 333), (2, 999, 1000)],
    ]
    for _ in range(6):
        sequences = rng.sample(range(3), 2)
        batches.append([(s, *sorted(rng.sample(range(lengths[s] + 1), 2))) for s in sequences])
    for seed in range(fw_seed, fw_seed + 6):
        args = made(seed, [(n, n) for n in lengths], dtype=dtype, heads=heads, fp8=fp8)
        args = (*args[:7], window, *args[8:])
        want = rows_of(kernel, args, [(s, 0, n) for s, n in enumerate(lengths)])
        for chunks in batches:
            for (s, first, stop), got in zip(chunks, rows_of(kernel, args, chunks), strict=True):
                assert torch.equal(got, want[s][first:stop]), (
                    f"{(s, first, stop)} of {chunks}, --fw-seed={fw_seed}"
                )


@pytest.mark.parametrize("num_seqs", [1, 5, 40])
def test_a_captured_graph_follows_lengths_written_after_capture(
    kernel: Kernel, num_seqs: int, fw_seed: int
) -> None:
    torch.manual_seed(fw_seed)
    rng = random.Random(fw_seed)
    args = made(fw_seed, [(1200 // num_seqs, 1500)] * num_seqs)
    args = (args[0].clone(), torch.randn_like(args[1]), *args[2:])
    replays = AttentionReplays(kernel, args, OUT)
    for _ in range(6):
        queries = [rng.choice([0, 1, rng.randint(1, 1200 // num_seqs)]) for _ in range(num_seqs)]
        contexts = [n + rng.choice([0, rng.randint(0, 300)]) for n in queries]
        args[0].normal_()
        args[2].random_(0, len(args[1]))
        args[3].copy_(torch.tensor(contexts))
        args[4].copy_(torch.tensor([sum(queries[:i]) for i in range(num_seqs + 1)]))
        replays.check(f"{queries} of {contexts}, --fw-seed={fw_seed}")


def test_it_refuses_what_it_cannot_read(kernel: Kernel) -> None:
    args = made(0, [(1, 9), (3, 40)])
    wrong: list[tuple[int, Any, str]] = [
        (0, args[0].cpu(), "q is not on a CUDA device"),
        (0, args[0].float(), r"q has shape \[4, 8, 128\] and elements of 4 bytes"),
        (0, args[0][:, ::2], "expected heads without gaps"),
        (0, args[0][..., :32].contiguous(), r"expected \[num_tokens, num_heads, 64, 128 or 256\]"),
        (0, args[0][..., :64].contiguous(), "kv_cache has shape .*, 64] of q's dtype"),
        (1, args[1].half(), "kv_cache has shape .* of q's dtype or float8_e4m3fn"),
        (1, args[1][:, :, :12].contiguous(), "block_size of kv_cache .* is 12"),
        (1, args[1][:, :, :, :1].expand(-1, -1, -1, 3, -1).contiguous(), "8 heads share 3"),
        (2, args[2][:1], r"block_table has shape \[1, 6\], expected \[2, 1 or more\]"),
        (3, args[3].long(), r"seq_lens has shape \[2\], expected a contiguous \[2\] of int32"),
        (4, args[4][1:], r"query_start_loc has shape \[2\], expected a contiguous \[3\]"),
        (OUT, args[OUT].float(), "out has shape .* of q's dtype"),
        (6, 0.0, "scale 0, sliding_window 0"),
        (9, torch.ones(2, 2, device="cuda"), "kv_scale is given, but kv_cache"),
        (10, torch.ones(1, 1, device="cuda"), "float8_e4m3fn, as there is an out_scale"),
        (11, torch.ones(7, device="cuda"), r"sinks has shape \[7\] .* expected a contiguous \[8\]"),
        (12, -1, "chunk is -1, expected 0 or a positive number"),
    ]
    args = (*args, None, 0)
    for index, value, message in wrong:
        with pytest.raises(RuntimeError, match=message):
            kernel(*args[:index], value, *args[index + 1 :])
    many = made(0, [(2, 3)] * (MOST_SEQS_OF_256_FP8 + 1), heads=(2, 1, 256), fp8="kv")
    with pytest.raises(RuntimeError, match="has 65 sequences, expected 64 or fewer"):
        kernel(*many)
    for index, value in ((7, 5), (8, 3.0), (12, 64)):
        call = [*made(0, [(3, 40)], heads=(4, 2, 64)), None, 0]
        call[index] = value
        with pytest.raises(RuntimeError, match=r"expected 0 with q .*, whose head_dim is 64"):
            kernel(*call)
    with pytest.raises(RuntimeError, match="fewest is 0, expected 1 or more"):
        kernel(*args, fewest=0)
