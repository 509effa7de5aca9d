"""``paged_attention`` by csrc's decode kernel: what it takes, and what it computes beyond cases."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.ops import (
    PAGED_ATTENTION,
    Case,
    OpDesc,
    choose,
    representative_sizes,
    variants_of,
)
from fusewright.ops.attention.paged_attention_cases import batch
from fusewright.ops.attention.paged_attention_cuda import decode
from fusewright.ops.conformance import check_case
from fusewright.ops.core.float8 import E4M3
from fusewright.ops.launches import paged_attention as kernels
from tests.ops.csrc import csrc_kernels
from tests.ops.replays import AttentionReplays

IMPL = PAGED_ATTENTION.implementation("cuda")
HEADS = (8, 2, 128)
CPU = torch.device("cpu")
OUT = 5


def description(dtype: torch.dtype = torch.bfloat16, sm: int = 90, **options: Any) -> OpDesc:
    heads, block_size = options.pop("heads", HEADS), options.pop("block_size", 16)
    args = batch(dtype, CPU, torch.Generator(), [(1, 3), (4, 9)], heads, block_size, **options)
    return replace(PAGED_ATTENTION.describe(args, sm=sm, csrc=True), device="cuda")


@pytest.mark.parametrize(
    ("desc", "reason"),
    [
        (description(), ""),
        (description(torch.float16, heads=(16, 1, 64), block_size=256), ""),
        (description(fp8="scaled kv, out", window=5, cap=3.0, block_size=8), ""),
        (description(sm=80), "built for SM 9.0, not 8.0"),
        (description(sm=0), "not an unknown one"),
        (replace(description(), device="cpu"), "on cpu, not CUDA"),
        (description(torch.float32), "q is torch.float32"),
        (description(heads=(4, 2, 80)), "head_dim 80: the kernels take 64, 128, 256"),
        (description(heads=(4, 2, 256), fp8="kv"), ""),
        (description(block_size=4), "block size 4"),
        (description(block_size=24), "block size 24"),
        (description(sinks=torch.float32), ""),
        (description(chunk=64, window=5), ""),
        (description(heads=(17, 1, 64)), ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_it_says_what_it_does_not_take(desc: OpDesc, reason: str) -> None:
    answer = IMPL.supports(desc)
    assert reason in answer and bool(reason) == bool(answer)


def test_without_its_library_it_says_so() -> None:
    desc = replace(description(), csrc=False)
    assert IMPL.supports(desc) == "csrc is not built into this installation"


def test_it_is_the_first_choice_where_it_runs() -> None:
    desc = description()
    assert choose(PAGED_ATTENTION, desc, inline_first=False).name == "cuda"
    chosen = choose(PAGED_ATTENTION, desc, inline_first=False, override="triton")
    assert chosen.name == "triton"


def sized(
    num_tokens: int,
    num_seqs: int,
    *,
    kv: torch.dtype = torch.bfloat16,
    dim: int = 128,
    num_heads: int = 32,
    sinks: bool = False,
    window: int = 0,
    cap: float = 0.0,
    chunk: int = 0,
) -> tuple[Any, ...]:
    """A call of Llama-3-8B's shape, without data."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def heads(*shape: int) -> Tensor:
        return empty(*shape, dim, dtype=torch.bfloat16)

    table, starts = empty(num_seqs, 512), empty(num_seqs + 1)
    q, out = heads(num_tokens, num_heads), heads(num_tokens, num_heads)
    cache = heads(3, 2, 16, 8).to(kv)
    sink = empty(num_heads, dtype=torch.float32) if sinks else None
    return q, cache, table, empty(num_seqs), starts, out, 0.1, window, cap, None, None, sink, chunk


@pytest.mark.parametrize(
    ("sizes", "prefill", "decode"),
    [
        ((8, 8), False, True),
        ((1, 1), False, True),
        ((9, 8), True, True),  # a sequence with two queries, or a padded row
        ((2000, 1), True, False),
    ],
)
def test_shapes_decide_what_is_launched(
    sizes: tuple[int, int], prefill: bool, decode: bool
) -> None:
    assert IMPL.runs is not None
    own, triton = "csrc paged_attention", "_decode_kernel"
    calls: list[tuple[dict[str, Any], str]] = [
        ({}, own),
        ({"kv": E4M3}, own),
        ({"dim": 64}, own),
        ({"dim": 256}, triton),
        ({"sinks": True}, own),
        ({"chunk": 64}, triton),
        ({"num_heads": 17 * 8}, triton),
    ]
    for options, name in calls:
        expected = ["csrc prefill_attention"] * prefill + [name] * decode
        assert [*IMPL.runs(*sized(*sizes, **options))] == expected


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"dim": 64, "sinks": True}, "csrc prefill_attention"),
        ({"dim": 64, "window": 128, "sinks": True}, "_prefill_kernel"),
        ({"dim": 64, "chunk": 4096}, "_prefill_kernel"),
        ({"dim": 64, "cap": 30.0}, "_prefill_kernel"),
        ({"dim": 128, "window": 128, "cap": 30.0, "kv": E4M3}, "csrc prefill_attention"),
        ({"dim": 256, "window": 1024}, "csrc prefill_attention"),
        ({"dim": 256, "cap": 30.0}, "_prefill_kernel"),
    ],
)
def test_a_feature_is_served_where_it_was_measured_ahead(
    options: dict[str, Any], name: str
) -> None:
    assert IMPL.runs is not None
    assert [*IMPL.runs(*sized(2000, 1, **options))] == [name]


def test_many_sequences_of_the_widest_heads_in_fp8_are_tritons() -> None:
    assert IMPL.runs is not None
    for num_seqs, name in [(64, "csrc prefill_attention"), (65, "_prefill_kernel")]:
        call = sized(1000, num_seqs, kv=E4M3, dim=256)
        assert [*IMPL.runs(*call)] == [name, "_decode_kernel"]


def test_what_it_leaves_is_launched_as_by_triton() -> None:
    assert IMPL.launches is not None
    for sizes in [(9, 8), (300, 64), (2000, 1), (16, 16), (256, 256)]:
        assert IMPL.launches(*sized(*sizes))[0] == []
    left: list[tuple[dict[str, Any], tuple[int, int], tuple[bool, bool]]] = [
        ({"dim": 256}, (9, 8), (False, True)),
        ({"dim": 256}, (2000, 1), (False, False)),
        ({"chunk": 64, "sinks": True}, (64, 64), (False, True)),
        ({"dim": 64, "window": 128, "sinks": True}, (300, 64), (True, False)),
        ({"dim": 256, "kv": E4M3}, (300, 200), (True, True)),
    ]
    for options, sizes, (prefills, decodes) in left:
        call = sized(*sizes, **options)
        expected = kernels.prefill(*call) * prefills + kernels.decode(*call) * decodes
        launches = IMPL.launches(*call)[0]
        assert [x.variant() for x in launches] == [x.variant() for x in expected]


def test_representative_sizes_need_every_variant_it_launches(fw_seed: int) -> None:
    assert IMPL.launches is not None
    options: dict[str, Any] = {"dim": 256, "kv": E4M3, "sinks": True}
    ahead = set()
    for sizes in representative_sizes():
        ahead |= variants_of(IMPL.launches(*sized(*sizes, **options))[0])
    rng = random.Random(fw_seed)
    for _ in range(200):
        num_seqs = rng.choice([rng.randint(1, 70), rng.randint(1, 2000)])
        num_tokens = num_seqs + rng.choice([0, 0, 1, rng.randint(1, 3000)])
        needed = variants_of(IMPL.launches(*sized(num_tokens, num_seqs, **options))[0])
        assert needed <= ahead, f"{num_tokens} tokens of {num_seqs} sequences"


@pytest.fixture
def kernel() -> Callable[..., None]:
    csrc_kernels()
    return decode


def check(kernel: Callable[..., None], label: str, args: tuple[Any, ...]) -> None:
    check_case(
        PAGED_ATTENTION, kernel, Case(label, args), PAGED_ATTENTION.tolerances[args[OUT].dtype]
    )


BATCHES = {
    "one token": [1],
    "one": [1500],
    "chunk edges": [15, 16, 17, 31, 32, 33],
    "few": [4000, 37, 0, 2600],
    "one long among short": [60] * 7 + [20000] + [60] * 8,
    "more pairs than clusters": [3 * n % 700 for n in range(150)],
    "cut by shares": [900] * 150,
    "all skipped": [0, 0, 0],
}


def check_repeats(kernel: Callable[..., None], args: tuple[Any, ...], times: int) -> None:
    """Each call gives the bits of the first."""
    kernel(*args)
    first = args[OUT].clone()
    for _ in range(times):
        args[OUT].fill_(7.0)
        kernel(*args)
        assert torch.equal(args[OUT].view(torch.uint8), first.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", ["", "kv", "scaled kv", "scaled kv, out", "out"])
@pytest.mark.parametrize("contexts", BATCHES.values(), ids=BATCHES)
def test_it_matches_the_reference(
    kernel: Callable[..., None], contexts: list[int], fp8: str, fw_seed: int
) -> None:
    gen = torch.Generator("cuda").manual_seed(fw_seed)
    shapes = [((8, 2, 128), 16), ((3, 3, 64), 8), ((7, 1, 128), 64), ((32, 2, 64), 256)]
    for i, (heads, block_size) in enumerate(shapes):
        dtype = torch.float16 if i % 2 else torch.bfloat16
        lengths = [(1, context) for context in contexts]
        args = batch(dtype, torch.device("cuda"), gen, lengths, heads, block_size, fp8=fp8)
        check(kernel, f"{heads}, block size {block_size}, --fw-seed={fw_seed}", args)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 9, 16])
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (300, 0.0), (1, 0.0), (77, 5.0)])
def test_it_takes_any_group_window_and_cap(
    kernel: Callable[..., None], group: int, window: int, cap: float, fw_seed: int
) -> None:
    gen = torch.Generator("cuda").manual_seed(fw_seed)
    for fp8 in ("", "scaled kv"):
        lengths = [(1, 1000), (1, 2), (1, 0), (1, 333)]
        heads, device = (3 * group, 3, 128), torch.device("cuda")
        args = batch(
            torch.bfloat16, device, gen, lengths, heads, 32, window=window, cap=cap, fp8=fp8
        )
        check(kernel, f"fp8 {fp8!r}, --fw-seed={fw_seed}", args)


@pytest.mark.gpu
def test_it_matches_the_reference_at_128k(kernel: Callable[..., None], fw_seed: int) -> None:
    gen = torch.Generator("cuda").manual_seed(fw_seed)
    for lengths in ([(1, 1 << 17)], [(1, 5), (1, (1 << 17) - 1), (1, 700)]):
        args = batch(torch.bfloat16, torch.device("cuda"), gen, lengths, HEADS, 16)
        check(kernel, f"--fw-seed={fw_seed}", args)


# Up to 4 pairs of a sequence and a KV head are split beyond 8 chunks a warp of one cluster, 4096 or
# 8192 tokens, up to 14 beyond 32. From 15 on clusters of two share a pair where the table has room
# for more than 32768 tokens, from 31 on 8192.
FEW = {
    "short": [[n] for n in (1, 15, 16, 17, 100, 300, 511, 513)],
    "split": [[4095], [4096], [4097], [4129], [8192], [8193], [8225], [16385], [40000]],
    "pairs": [[4097, 4097], [8193, 8200], [9000, 0], [300, 16384], [33000, 17000]],
    "threes": [[4097, 5000, 4100], [17000, 16385, 16384], [20000, 60, 60]],
    "eights": [[9000] * 8, [8000 + 100 * n for n in range(8)], [8193, 1] * 4],
}


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("contexts", FEW.values(), ids=FEW)
def test_few_sequences_match_the_reference_and_repeat(
    kernel: Callable[..., None], contexts: list[list[int]], kv_heads: int, fw_seed: int
) -> None:
    gen = torch.Generator("cuda").manual_seed(fw_seed)
    options: list[tuple[int, int, dict[str, Any]]] = [
        (4, 128, {}),
        (8, 64, {"window": 9000}),
        (9, 128, {"window": 6000}),
        (2, 128, {"fp8": "scaled kv"}),
        (16, 64, {"fp8": "kv, out"}),
    ]
    for i, (group, dim, option) in enumerate(options):
        for lengths in contexts[i % 2 :: 2] if i > 1 else contexts:
            heads = (group * kv_heads, kv_heads, dim)
            pairs = [(1, context) for context in lengths]
            args = batch(torch.bfloat16, torch.device("cuda"), gen, pairs, heads, 16, **option)
            check(kernel, f"{heads}, {lengths}, {option}, --fw-seed={fw_seed}", args)
            check_repeats(kernel, args, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", ["", "scaled kv"])
@pytest.mark.parametrize(
    ("heads", "contexts"),
    [
        ((32, 4, 128), [100] * 4 + [1 << 17] + [60] * 3),
        ((8, 1, 128), [512] * 15 + [1 << 17] + [700] * 20),
        ((16, 1, 64), [512] * 50 + [70000] + [700] * 20 + [50000]),
        ((8, 8, 64), [1000] * 30 + [1 << 17] + [1000] * 33),
    ],
    ids=str,
)
def test_one_long_among_short_is_merged_in_groups_of_shares(
    kernel: Callable[..., None],
    heads: tuple[int, int, int],
    contexts: list[int],
    fp8: str,
    fw_seed: int,
) -> None:
    gen = torch.Generator("cuda").manual_seed(fw_seed)
    pairs = [(1, context) for context in contexts]
    args = batch(torch.bfloat16, torch.device("cuda"), gen, pairs, heads, 16, fp8=fp8)
    check(kernel, f"{heads}, --fw-seed={fw_seed}", args)
    check_repeats(kernel, args, 5)


@pytest.mark.gpu
def test_sequences_of_other_than_one_query_are_left_out(
    kernel: Callable[..., None], fw_seed: int
) -> None:
    gen = torch.Generator("cuda").manual_seed(fw_seed)
    lengths = [(1, 40), (3, 700), (1, 900), (0, 0), (2, 2)]
    args = batch(torch.bfloat16, torch.device("cuda"), gen, lengths, HEADS, 16)
    want = args[OUT].clone()
    PAGED_ATTENTION.overload()(*args[:OUT], want, *args[OUT + 1 :])
    kernel(*args)
    one = torch.tensor([0, 4], device="cuda")
    torch.testing.assert_close(args[OUT][one], want[one], atol=1e-2, rtol=1.6e-2)
    others = torch.tensor([1, 2, 3, 5, 6], device="cuda")
    assert (args[OUT][others] == 7.0).all()


@pytest.mark.gpu
def test_rows_of_padding_are_untouched(kernel: Callable[..., None], fw_seed: int) -> None:
    gen = torch.Generator("cuda").manual_seed(fw_seed)
    lengths = [(1, 40), (1, 700), (0, 0), (0, 0)]
    args = batch(torch.bfloat16, torch.device("cuda"), gen, lengths, HEADS, 16, padding=2)
    check(kernel, "padding", args)
    kernel(*args)
    assert (args[OUT][2:] == 7.0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("num_seqs", [1, 5, 16, 40])
def test_a_captured_graph_follows_lengths_written_after_capture(
    kernel: Callable[..., None], num_seqs: int, fw_seed: int
) -> None:
    torch.manual_seed(fw_seed)
    rng = random.Random(fw_seed)
    most = 3000 if num_seqs > 16 else 12000
    lengths = [(1, most)] * num_seqs
    gen = torch.Generator("cuda").manual_seed(fw_seed)
    args = batch(torch.bfloat16, torch.device("cuda"), gen, lengths, HEADS, 16)
    args = (args[0].clone(), torch.randn_like(args[1]), *args[2:])
    replays = AttentionReplays(kernel, args, OUT)
    some = [
        [rng.choice([0, 1, rng.randint(1, 300), most]) for _ in range(num_seqs)] for _ in range(6)
    ]
    for contexts in [*some, [most] * num_seqs, [rng.randint(1, 300)] * num_seqs]:
        args[0].normal_()
        args[2].random_(0, len(args[1]))
        args[3].copy_(torch.tensor(contexts))
        replays.check(f"{contexts}, --fw-seed={fw_seed}")


@pytest.mark.gpu
def test_it_refuses_what_it_cannot_read(kernel: Callable[..., None]) -> None:
    gen = torch.Generator("cuda").manual_seed(0)
    args = batch(torch.bfloat16, torch.device("cuda"), gen, [(1, 9), (1, 40)], HEADS, 16)
    scale = torch.ones(1, 1, device="cuda")
    wrong: list[tuple[int, Any, str]] = [
        (0, args[0].cpu(), "q is not on a CUDA device"),
        (0, args[0].float(), r"q has shape \[2, 8, 128\] and elements of 4 bytes"),
        (0, args[0][:, ::2], "expected heads without gaps"),
        (1, args[1].half(), "kv_cache has shape .* of q's dtype or float8_e4m3fn"),
        (1, args[1][:, :, :12].contiguous(), "block_size of kv_cache .* is 12"),
        (2, args[2][:1], r"block_table has shape \[1, 6\], expected \[2, 1 or more\]"),
        (2, args[2].long(), "block_table has shape .* of int32"),
        (3, args[3].cpu(), "seq_lens is not on q's device"),
        (3, args[3].long(), r"seq_lens has shape \[2\], expected a contiguous \[2\] of int32"),
        (3, args[3][None], r"seq_lens has shape \[1, 2\], expected \[num_seqs\]"),
        (4, args[4][1:], r"query_start_loc has shape \[2\], expected a contiguous \[3\]"),
        (OUT, args[OUT].float(), "out has shape .* of q's dtype"),
        (6, 0.0, "scale 0, sliding_window 0"),
        (9, torch.ones(2, 2, device="cuda"), "kv_scale is given, but kv_cache"),
        (10, scale, "float8_e4m3fn, as there is an out_scale"),
    ]
    for index, value, message in wrong:
        with pytest.raises(RuntimeError, match=message):
            kernel(*args[:index], value, *args[index + 1 :])
