"""The emulator's programs, their cases and the mistakes that they must see: shapes, as data.

A case is words that its driver reads (decode.cpp, experts.cpp, cluster_linear.cpp).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from .build import Program
from .derive import Edit

# When copies land, and in which order blocks run that meet in memory.
SCHEDULES = (
    "timing=late order=together",
    "timing=early order=backward",
    "timing=random order=together",
    "timing=random order=forward",
)
# Beside each other, and one block after another.
ALONE = ("timing=late", "timing=early", "timing=random")


def scheduled(cases: Iterable[str], schedules: Iterable[str]) -> list[str]:
    """Every case in every schedule, each with a seed of its own."""
    pairs = itertools.product(cases, schedules)
    return [f"{case} {schedule} seed={seed}" for seed, (case, schedule) in enumerate(pairs)]


def runs(firsts: Iterable[int], rows: int) -> str:
    """Sequences that are rows of one: the first has that length, each other one more."""
    lengths = [first + row for first in firsts for row in range(rows)]
    drafts = [int(row > 0) for _ in firsts for row in range(rows)]
    return f"lengths={','.join(map(str, lengths))} drafts={','.join(map(str, drafts))}"


# `grid` is blocks, cluster, parts, where plan_grid does not choose it.
SOME = "lengths=40,1,17,0,300 kv_heads=2 group=4"
MORE = "lengths=40,1,17,0,150,3,64,65 kv_heads=2 group=8"
CLUSTERS = (
    f"{SOME} grid=80,8,1 sinks=all_kinds",
    f"{SOME} grid=80,8,1 queries=1,0,1,1,2",
    "lengths=333 grid=8,8,1 group=8 sinks=far_above",
    "lengths=333 grid=8,8,1 group=8 sinks=absent wide_sinks=1 window=100",
    f"{SOME} grid=40,4,1 sinks=all_kinds window=33",
    f"{SOME} grid=20,2,1 sinks=far_below soft_cap=5 sharp=1",
    f"{SOME} grid=10,1,1 sinks=all_kinds wide_sinks=1",
    "lengths=0,0 grid=16,8,1 sinks=all_kinds",
)
# Several clusters an item; those of one that is not long leave.
PARTS = (
    "lengths=2400,2200 kv_heads=2 group=8 grid=8,2,5 sinks=all_kinds",
    "lengths=2400,90 grid=4,2,9 window=2300 sinks=all_kinds",
    "lengths=8500 group=4 grid=8,8,4 sinks=all_kinds",
)
# Teams of two warps and of one; neither, but all sequences whole.
TEAMS = (
    f"{MORE} grid=8,0,1 sinks=all_kinds",
    f"{MORE} grid=4,0,1 sinks=all_kinds window=31",
    f"{MORE} grid=3,0,1 sinks=all_kinds wide_sinks=1",
)
# Shares that cut a sequence, the second one's into more than are merged at once.
SHARES = (
    "lengths=1500,1,17,0,150,3,64,65 group=8 grid=8,0,1 sinks=all_kinds",
    "lengths=1,17,0,2100,3,64,65 kv_heads=2 group=4 grid=24,0,1 sinks=all_kinds",
    "lengths=1,17,0,4200,3 kv_heads=2 group=4 grid=20,2,1",
)
# Planned grids, of one cluster an item and of several; blocks of other sizes; sequences beyond a
# warp's lanes.
OTHERS = (
    "lengths=100,33,64,1 kv_heads=4 group=8 block_size=8 multiprocessors=16 sinks=all_kinds",
    "lengths=500,33,640,1 group=8 block_size=256 multiprocessors=8 one_slot=0",
    "lengths=300,20 group=8 multiprocessors=40 table=40000 sinks=all_kinds",
    "lengths=100,33 kv_heads=2 group=8 multiprocessors=16 table=40000 sinks=all_kinds",
    f"lengths={','.join(str(i * 7 % 61) for i in range(40))} group=8 grid=8,0,1 sinks=all_kinds",
)
DECODE = CLUSTERS + PARTS + TEAMS + SHARES + OTHERS
JOINED = (
    f"{runs([300], 4)} group=8 grid=32,8,1 sinks=all_kinds",
    f"{runs([300], 16)} group=1 kv_heads=2 grid=32,1,1 window=50",
    f"{runs([2000], 8)} group=4 grid=16,2,1 sinks=all_kinds",
    f"{runs([100, 200, 150, 40, 80, 120], 4)} group=8 grid=4,0,1 sinks=all_kinds wide_sinks=1",
    f"{runs(range(30, 200, 15), 4)} group=8 grid=4,0,1 sinks=all_kinds window=77",
    f"{runs(range(30, 200, 14), 4)} group=8 grid=3,0,1 sinks=all_kinds",
    f"{runs([1500, *range(30, 150, 10)], 4)} group=8 grid=3,0,1 sinks=all_kinds",
    f"{runs([3000, 20, 40], 5)} group=4 kv_heads=2 grid=8,0,1 sinks=all_kinds",
    f"{runs([100, 200, 150], 4)} group=8 kv_heads=2 grid=96,4,1 queries=1,1,1,1,0,2 one_slot=0",
)
SIXTEEN = tuple(case.replace("group=8", "group=16") for case in DECODE if "group=8" in case)

EXPERTS = (
    "tokens=1 experts=4 top_k=3 columns=704 rows=64 gated=1 pairs=1 norm=1",
    "tokens=7 experts=6 top_k=3 columns=768 rows=128 gated=1 floats=0",
    "tokens=1 experts=6 top_k=4 columns=1472 rows=192 row_a_slot=1",
    "tokens=2 experts=5 top_k=2 columns=1600 rows=80 row_a_slot=1 floats=0 group_columns=64",
    "tokens=40 experts=12 top_k=4 columns=2880 rows=32 gated=1 pairs=1 sorted=1",
)
LINEAR = (
    "tokens=9 features=264 columns=512",
    "tokens=33 features=264 columns=512 fp8=1",
    "tokens=64 features=48 columns=1280 bias=0",
    # More lines a block than its ring has stages.
    "tokens=9 features=48 columns=8192",
    "tokens=3 features=24 columns=16384 fp8=1 bias=0",
)
# One block a tile, which goes round its ring, and two of them.
STREAMED = (
    "tokens=8 features=96 columns=4096",
    "tokens=5 features=40 columns=8192 bias=0",
)
# Whole blocks of the cache: both warpgroups clear what a sequence leaves of its last block, each
# before it reads it, and no order is between them. That is a race, of equal values.
PREFILL = (
    "lengths=256,128 queries=200,128 kv_heads=2 group=2 multiprocessors=3",
    "lengths=384 queries=70 group=1 multiprocessors=3 block_size=64",
)
MANY_PACKED = ("tokens=16 features=128 columns=6144", "tokens=9 features=520 columns=512 bias=0")
GROUPED = (
    "experts=3 slots=150,0,40 columns=640 outputs=384",
    "experts=2 slots=3,70 columns=128 outputs=128",
)


def decode(query: str, cache: str, head_dim: int, head_tiles: int = 1, *edits: Edit) -> Program:
    """Decode attention of one tile."""
    macros = {
        "FW_QUERY": query,
        "FW_CACHE": cache,
        "FW_HEAD_DIM": str(head_dim),
        "FW_HEAD_TILES": str(head_tiles),
    }
    return Program("decode.cpp", "attention/decode.cuh", macros, edits)


def experts(*edits: Edit) -> Program:
    """Packed experts, for few rows each."""
    return Program("experts.cpp", "moe/packed.cu", edits=(FEW, *edits))


# A warpgroup multiplies 64 rows of the weight where its tile has fewer, too. What lies behind them
# may be written meanwhile: no sum of those rows is sent.
USED_ROWS = [
    Edit(
        "gemm/cluster_linear.cuh",
        f"    pin({sums});\n    wgmma_fence();",
        f"    emulator::machine.thread->used_rows = share.rows - group * 64;\n"
        f"    pin({sums});\n    wgmma_fence();",
    )
    for sums in ("sums", "part")
]


def cluster_linear(*edits: Edit) -> Program:
    """The linear layer of clusters."""
    return Program("cluster_linear.cpp", "gemm/cluster_linear.cu", edits=(*USED_ROWS, *edits))


def streamed_linear(*edits: Edit) -> Program:
    """The linear layer that streams a weight, for up to 8 tokens."""
    macros = {"FW_STREAMED": "Bf16"}
    return Program("cluster_linear.cpp", "gemm/cluster_linear.cu", macros, (FEW, *edits))


def prefill(*edits: Edit) -> Program:
    """Prefill attention of bfloat16 with a head_dim of 64 and two warpgroups."""
    return Program("prefill.cpp", "attention/prefill.cuh", edits=edits)


# One of the tiles for many tokens: its blocks go round their rings.
ONE_TILE = (
    Edit("gemm/packed_linear.cu", "kBlocksInRound = 100", "kBlocksInRound = 2"),
    Edit(
        "gemm/packed_linear.cu",
        "return launch_format<decltype(format)>(args, programmatic, stream);",
        "if constexpr (std::is_same_v<decltype(format), MxFp4>)"
        " return multiply_rows<MxFp4, false, 16, 4, 8>(args, programmatic, stream);"
        " return cudaErrorInvalidValue;",
    ),
)


def packed_linear(*edits: Edit) -> Program:
    """The linear layer by E2M1 for many tokens, whose blocks read each other's sums."""
    root = "gemm/packed_linear.cu"
    return Program("cluster_linear.cpp", root, {"FW_PACKED": "1"}, (*ONE_TILE, *edits))


def grouped(*edits: Edit, scales: str = "kNone") -> Program:
    """Experts for many rows, which are gathered; of bfloat16 unless they have scales."""
    return Program("grouped.cpp", "moe/grouped_launch.cuh", {"FW_SCALES": scales}, edits)


# As few blocks as let a warp have several tiles.
FEW = Edit("gemm/skinny.h", "kMultiprocessors = 132", "kMultiprocessors = 3")
BF16, HALF, FP8 = "__nv_bfloat16", "__half", "__nv_fp8_e4m3"
# Rows are joined where they save far less than on a GPU.
JOIN = Edit("attention/decode.h", "kLeastSavedBytes = 300e6f", "kLeastSavedBytes = 3e4f")

QUICK = (decode(BF16, BF16, 64), scheduled(CLUSTERS[:1], SCHEDULES[2:3]))
PROGRAMS = {
    "decode": (decode(BF16, BF16, 64), scheduled(DECODE, SCHEDULES)),
    "decode_joined_128": (decode(BF16, BF16, 128, 1, JOIN), scheduled(JOINED, SCHEDULES)),
    "decode_joined_fp8": (
        decode(BF16, FP8, 64, 1, JOIN),
        scheduled(JOINED + DECODE, SCHEDULES[2:]),
    ),
    "decode_fp16_group_16": (decode(HALF, HALF, 64, 2), scheduled(SIXTEEN, SCHEDULES[2:])),
    "experts": (experts(), scheduled(EXPERTS, ALONE)),
    "cluster_linear": (cluster_linear(), scheduled(LINEAR, ALONE)),
    "streamed_linear": (streamed_linear(), scheduled(STREAMED, ALONE)),
    "prefill": (prefill(), scheduled(PREFILL, ALONE)),
    "packed_linear": (packed_linear(), scheduled(MANY_PACKED, ALONE)),
    "grouped": (grouped(), scheduled(GROUPED, ALONE)),
    "grouped_fp8": (grouped(scales="kBlocks"), scheduled(GROUPED, ALONE)),
}

# Mistakes in the sources, each in a program that must not pass all of its cases.
ITEMS, CUTS, STREAM = "attention/items.cuh", "attention/cuts.cuh", "attention/stream.cuh"
MISTAKES = {
    "every_warp_adds_the_sinks": (
        decode(BF16, BF16, 64, 1, Edit(ITEMS, "args.sinks && p.ahead == 0", "args.sinks")),
        scheduled(CLUSTERS[:1], SCHEDULES[:1]),
    ),
    "every_share_adds_the_sinks": (
        decode(
            BF16, BF16, 64, 1, Edit(CUTS, "args.sinks && begin == row.starts[seq]", "args.sinks")
        ),
        scheduled(SHARES[:1], SCHEDULES[:1]),
    ),
    "every_part_of_rows_adds_the_sinks": (
        decode(
            BF16,
            BF16,
            64,
            1,
            JOIN,
            Edit("attention/rows.cuh", "args.sinks && ahead == 0", "args.sinks"),
        ),
        scheduled(JOINED[2:3], SCHEDULES[:1]),
    ),
    "no_fence_before_an_arrival": (
        decode(BF16, BF16, 64, 1, Edit(ITEMS, "- 1;\n  __threadfence();", "- 1;")),
        scheduled(PARTS[:2] * 4, SCHEDULES[2:3]),
    ),
    "fresh_slots_are_read_before_the_wait": (
        decode(
            BF16,
            BF16,
            64,
            1,
            Edit(STREAM, "(lanes >> (i * B::kGroups) & ((1u << B::kGroups) - 1))", "(false)"),
        ),
        scheduled(CLUSTERS[:1], SCHEDULES[1:2]),
    ),
    "a_row_shorter_than_the_ring_is_taken": (
        experts(
            Edit(
                "moe/packed.cu",
                "if (empty.steps < splits * T::kStages) return cudaErrorInvalidConfiguration;",
                "",
            ),
        ),
        scheduled(
            ["tokens=8 experts=6 top_k=3 columns=384 rows=1024 gated=1 pairs=1 norm=1"], ALONE
        ),
    ),
}


def plain_decode(*edits: Edit) -> Program:
    """Decode attention of one tile as it is, but for these edits."""
    return decode(BF16, BF16, 64, 1, *edits)


# Orders that are taken out of a program: what they order is to be named as a race in every schedule
# of a case. Each is a file, what stands there and what is put in its place.
LINEAR_SOURCE, PACKED_SOURCE = "gemm/cluster_linear.cuh", "moe/packed.cuh"
EXPECTED_RACES = {
    "lanes_read_what_others_copy": (
        (plain_decode, CLUSTERS[0]),
        Edit(STREAM, "<T::kStages - 1>();\n    __syncwarp();", "<T::kStages - 1>();"),
    ),
    "lanes_copy_over_what_others_read": (
        (plain_decode, CLUSTERS[0]),
        Edit(STREAM, "sums);\n    __syncwarp();", "sums);"),
    ),
    "a_chunk_is_read_before_it_is_there": (
        (plain_decode, CLUSTERS[0]),
        Edit(STREAM, "wait<T::kStages - 1>", "wait<T::kStages>"),
    ),
    "a_team_merges_without_a_barrier": (
        (plain_decode, CLUSTERS[0]),
        Edit(ITEMS, "sums);\n  __syncthreads();", "sums);"),
    ),
    "sums_are_sent_to_blocks_that_have_not_begun": (
        (plain_decode, CLUSTERS[0]),
        Edit(ITEMS, "    cluster_wait();  // every block has started\n", ""),
    ),
    "rows_of_x_are_read_without_a_barrier": (
        (experts, EXPERTS[4]),
        Edit(
            PACKED_SOURCE,
            "entries.begin[behind]);\n    __syncthreads();",
            "entries.begin[behind]);",
        ),
    ),
    "parts_are_added_without_a_barrier": (
        (experts, EXPERTS[2]),
        Edit(PACKED_SOURCE, "    sync();\n    for (int other", "    for (int other"),
    ),
    "a_stage_is_given_back_before_it_is_multiplied": (
        (cluster_linear, LINEAR[3]),
        Edit(LINEAR_SOURCE, "wait_group<1>();\n    if (line", "wait_group<2>();\n    if (line"),
    ),
    "sums_are_read_before_they_have_come": (
        (cluster_linear, LINEAR[0]),
        Edit(LINEAR_SOURCE, "shared.inbox.wait(0);", ""),
    ),
    "scales_are_read_without_a_barrier": (
        (cluster_linear, LINEAR[1]),
        Edit(LINEAR_SOURCE, "bar.sync %0, %1;", ""),
    ),
    "a_lane_arrives_before_its_warp_has_read": (
        (streamed_linear, STREAMED[0]),
        Edit("common/device.cuh", "__syncwarp();\n  if (lane ==", "if (lane =="),
    ),
    "sums_are_read_from_blocks_that_add_up": (
        (packed_linear, MANY_PACKED[0]),
        Edit(
            "gemm/packed_linear.cuh",
            "cluster_wait();\n  } else {\n    sync_threads",
            "} else {\n    sync_threads",
        ),
    ),
    "values_are_given_back_before_they_are_multiplied": (
        (prefill, PREFILL[1]),
        Edit(
            "attention/prefill_compute.cuh",
            "softmax(alpha);\n    wgmma_wait_group<0>();",
            "softmax(alpha);",
        ),
    ),
    "gathered_rows_are_multiplied_without_a_fence": (
        (grouped, GROUPED[0]),
        Edit("moe/grouped_compute.cuh", "fence.proxy.async.shared::cta;", ""),
    ),
}
RACES = {
    name: (program(edit), scheduled([case], ALONE))
    for name, ((program, case), edit) in EXPECTED_RACES.items()
}
