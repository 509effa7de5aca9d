"""Paged attention on a GPU: decode and prefill of the Llama-3-8B shape against PyTorch's SDPA.

Each figure is a CUDA graph of calls that rotate over enough KV blocks to miss the L2 cache.
``--sweep`` also times other tiles of the same launches: a Launch is data.

    python -m fusewright.bench.ops.bench_paged_attention [--json FILE] [--sweep]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from ...ops import Launch
from ...ops.paged_attention import OP, context_symbols
from ...ops.triton_kernels import paged_attention as kernels

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
MAX_MODEL_LEN = 4096
COLD_BYTES = 256 << 20
KV_BYTES_A_TOKEN = 2 * KV_HEADS * HEAD_DIM * 2
Launches = Callable[[tuple[Any, ...]], list[Launch]]


def graph_us(calls: list[Callable[[], Any]], budget_ms: float = 60.0) -> float:
    """Microseconds a call: the best of three timings of a graph that holds all the calls."""
    for call in (calls[0], calls[-1]):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay_ms(times: int) -> float:
        start.record()
        for _ in range(times):
            graph.replay()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / times

    replay_ms(2)
    times = max(2, min(100, int(budget_ms / max(replay_ms(2), 1e-3))))
    return 1e3 * min(replay_ms(times) for _ in range(3)) / len(calls)


def rotations(context_tokens: int) -> int:
    """Calls whose KV together passes the L2 cache; at least two, at most 256."""
    return max(2, min(256, -(-COLD_BYTES // (context_tokens * KV_BYTES_A_TOKEN))))


def batches(query_lens: list[int], seq_lens: list[int]) -> Iterator[tuple[Any, ...]]:
    """The op's arguments, over disjoint random blocks of one cache."""
    num_seqs, count = len(seq_lens), rotations(sum(seq_lens))
    pages = [-(-n // PAGE) for n in seq_lens]
    width = max(MAX_MODEL_LEN // PAGE, *pages)
    total = count * sum(pages)
    cache = torch.randn(total, 2, PAGE, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    order = torch.randperm(total, device="cuda").int().split(pages * count)
    lens = torch.tensor(seq_lens, device="cuda", dtype=torch.int32)
    starts = torch.tensor([0, *query_lens], device="cuda").cumsum(0).int()
    q = torch.randn(sum(query_lens), HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    for i in range(count):
        table = torch.zeros(num_seqs, width, device="cuda", dtype=torch.int32)
        for s, blocks in enumerate(order[i * num_seqs : (i + 1) * num_seqs]):
            table[s, : len(blocks)] = blocks
        yield q, cache, table, lens, starts, torch.empty_like(q), HEAD_DIM**-0.5, 0, 0.0


def default_launches(args: tuple[Any, ...]) -> list[Launch]:
    return kernels.paged_attention(*args)[0]


def ours_us(calls: list[tuple[Any, ...]], launches: Launches = default_launches) -> float:
    def call(args: tuple[Any, ...]) -> Callable[[], None]:
        def run() -> None:
            for launch in launches(args):
                launch.run()

        return run

    return graph_us([call(args) for args in calls])


def sdpa_us(query_lens: list[int], seq_lens: list[int]) -> float:
    """SDPA on contiguous K and V of equal sequences: no paging, no ragged lengths."""
    num_seqs, queries, context = len(seq_lens), query_lens[0], seq_lens[0]
    count = rotations(sum(seq_lens))

    def tensor(heads: int, tokens: int, copies: int) -> Tensor:
        shape = (copies, num_seqs, heads, tokens, HEAD_DIM)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    q, k, v = (
        tensor(HEADS, queries, 1)[0],
        tensor(KV_HEADS, context, count),
        tensor(KV_HEADS, context, count),
    )

    def call(i: int) -> Callable[[], Any]:
        return lambda: F.scaled_dot_product_attention(
            q, k[i], v[i], is_causal=queries > 1, enable_gqa=True
        )

    return graph_us([call(i) for i in range(count)])


def measure(label: str, query_lens: list[int], seq_lens: list[int]) -> dict[str, Any]:
    calls = list(batches(query_lens, seq_lens))
    us = ours_us(calls)
    cost = OP.cost(OP.describe(calls[0]))
    values = context_symbols(query_lens, seq_lens)
    equal = len({*zip(query_lens, seq_lens, strict=True)}) == 1
    return {
        "work": label,
        "us": round(us, 2),
        "GB/s": round(float(cost.bytes.subs(values)) / us / 1e3, 1),
        "TFLOP/s": round(float(cost.flops.subs(values)) / us / 1e6, 1),
        "sdpa_us": round(sdpa_us(query_lens, seq_lens), 2) if equal else None,
    }


def works() -> Iterator[tuple[str, list[int], list[int]]]:
    for batch in (1, 8, 64, 256):
        for context in (192, 1024, 4096):
            yield f"decode b={batch} ctx={context}", [1] * batch, [context] * batch
    ragged = [128 + (i * 37) % 129 for i in range(64)]
    yield "decode b=64 ctx=128..256", [1] * 64, ragged
    for tokens in (128, 2048, 8192):
        yield f"prefill {tokens}", [tokens], [tokens]
    yield "chunk of 2048 at 6144", [2048], [8192]
    yield "mixed: 63 decodes ctx=192 + prefill 512", [1] * 63 + [512], [192] * 63 + [512]


def prefill_sweep() -> Iterator[dict[str, Any]]:
    tiles = [
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (128, 64, 8, 4),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
        (128, 32, 8, 4),
        (64, 64, 4, 3),
        (64, 64, 4, 2),
        (64, 128, 4, 2),
        (128, 64, 4, 3),
    ]
    for tokens in (128, 2048, 8192):
        calls = list(batches([tokens], [tokens]))
        for block_m, block_n, warps, stages in tiles:

            def launches(
                args: tuple[Any, ...],
                block_m: int = block_m,
                block_n: int = block_n,
                warps: int = warps,
                stages: int = stages,
                rows: int = tokens,
            ) -> list[Launch]:
                prefill, _ = default_launches(args)
                constexprs = {**prefill.constexprs, "BLOCK_M": block_m, "BLOCK_N": block_n}
                block_q = block_m // (HEADS // KV_HEADS)
                return [
                    dataclasses.replace(
                        prefill,
                        grid=(KV_HEADS, rows // block_q + 1),
                        constexprs=constexprs,
                        num_warps=warps,
                        num_stages=stages,
                    )
                ]

            tile = f"M={block_m} N={block_n} warps={warps} stages={stages}"
            yield {"work": f"prefill {tokens}", "tile": tile, "us": timed(calls, launches)}


def decode_sweep() -> Iterator[dict[str, Any]]:
    for batch, context in ((1, 192), (1, 1024), (64, 192), (64, 4096), (256, 1024)):
        calls = list(batches([1] * batch, [context] * batch))
        for block_n, stages, min_split, programs in (
            (64, 4, 256, 264),
            (64, 3, 256, 264),
            (64, 3, 256, 396),
            (64, 5, 256, 132),
            (32, 4, 256, 396),
            (128, 3, 256, 132),
            (64, 4, 128, 264),
            (64, 4, 512, 264),
        ):

            def launches(
                args: tuple[Any, ...],
                block_n: int = block_n,
                stages: int = stages,
                min_split: int = min_split,
                programs: int = programs,
            ) -> list[Launch]:
                (decode,) = default_launches(args)
                constexprs = {**decode.constexprs, "BLOCK_N": block_n, "MIN_SPLIT": min_split}
                num_seqs, splits = decode.args["num_seqs"], -(-MAX_MODEL_LEN // min_split)
                partial_rows = num_seqs * HEADS * splits
                scratch = torch.empty(partial_rows * (HEAD_DIM + 1), device="cuda")
                return [
                    dataclasses.replace(
                        decode,
                        grid=(min(num_seqs * KV_HEADS * splits, programs),),
                        args={
                            **decode.args,
                            "max_splits": splits,
                            "partial_rows": partial_rows,
                            "scratch_ptr": scratch,
                        },
                        constexprs=constexprs,
                        num_stages=stages,
                    )
                ]

            tile = f"N={block_n} stages={stages} min_split={min_split} programs={programs}"
            work = f"decode b={batch} ctx={context}"
            yield {"work": work, "tile": tile, "us": timed(calls, launches)}


def timed(calls: list[tuple[Any, ...]], launches: Launches) -> float | str:
    """Microseconds, or why the tile does not fit this GPU."""
    try:
        return round(ours_us(calls, launches), 2)
    except triton.runtime.errors.OutOfResources as error:
        return str(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--sweep", action="store_true", help="also time other tiles")
    options = parser.parse_args()
    torch.manual_seed(0)
    figures = []
    for label, query_lens, seq_lens in works():
        figures.append(measure(label, query_lens, seq_lens))
        print(figures[-1], flush=True)
    sweep = []
    for sweeper in (prefill_sweep, decode_sweep) if options.sweep else ():
        for line in sweeper():
            sweep.append(line)
            print(line, flush=True)
    if options.json:
        device = torch.cuda.get_device_name()
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        report = {"gpu": device, **versions, "figures": figures, "sweep": sweep}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
