"""Times other tiles of Triton's decode and prefill attention on the Llama-3-8B shape: a Launch is
data.

Each figure is a CUDA graph of calls that rotate over enough KV blocks to miss the L2 cache.  What
the chosen kernels take over the whole grid of shapes, and every library, is ``bench/kernels``'s.

    python -m fusewright.bench.ops.bench_paged_attention [--output FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ...ops import Launch
from ...ops.launches import paged_attention as kernels
from ...ops.paged_attention import OP
from ...ops.paged_attention_cases import batch as attention_batch

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
MAX_MODEL_LEN = 4096
COLD_BYTES = 256 << 20
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
    """Calls whose KV together passes the L2 cache, at most 256."""
    kv_bytes = context_tokens * 2 * KV_HEADS * HEAD_DIM * torch.bfloat16.itemsize
    return max(1, min(256, -(-COLD_BYTES // kv_bytes)))


def batches(query_lens: list[int], seq_lens: list[int]) -> Iterator[tuple[Any, ...]]:
    """The op's arguments, over disjoint random blocks of one cache."""
    num_seqs, count = len(seq_lens), rotations(sum(seq_lens))
    num_blocks = [-(-n // BLOCK_SIZE) for n in seq_lens]
    width = max(MAX_MODEL_LEN // BLOCK_SIZE, *num_blocks)
    total = count * sum(num_blocks)
    cache = torch.empty(
        total, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16
    )
    for part in cache.split(1 << 14):
        part.copy_(torch.randn(part.shape, device="cuda"))
    order = torch.randperm(total, device="cuda").int().split(num_blocks * count)
    lens = torch.tensor(seq_lens, device="cuda", dtype=torch.int32)
    starts = torch.tensor([0, *query_lens], device="cuda").cumsum(0).int()
    q = torch.randn(sum(query_lens), HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    for i in range(count):
        table = torch.zeros(num_seqs, width, device="cuda", dtype=torch.int32)
        for s, blocks in enumerate(order[i * num_seqs : (i + 1) * num_seqs]):
            table[s, : len(blocks)] = blocks
        out = torch.empty_like(q)
        yield q, cache, table, lens, starts, out, HEAD_DIM**-0.5, 0, 0.0, None, None


def ours_us(calls: list[tuple[Any, ...]], launches: Launches, budget_ms: float = 60.0) -> float:
    def call(args: tuple[Any, ...]) -> Callable[[], None]:
        def run() -> None:
            for launch in launches(args):
                launch.run()

        return run

    return graph_us([call(args) for args in calls], budget_ms)


@dataclass(frozen=True)
class DecodeTile:
    """One way to launch the decode kernel; ``programs`` a multiprocessor."""

    block_n: int
    warps: int
    stages: int
    programs: int
    chunk: int = 8

    def launches(self, args: tuple[Any, ...]) -> list[Launch]:
        (decode,) = kernels.decode(*args)
        items = len(args[3]) * KV_HEADS * decode.args["max_splits"]
        tile = {"BLOCK_N": self.block_n, "CHUNK": self.chunk}
        return [
            dataclasses.replace(
                decode,
                grid=(min(items, self.programs * kernels.programs_at_once(args[0].device)),),
                constexprs={**decode.constexprs, **tile},
                num_warps=self.warps,
                num_stages=self.stages,
            )
        ]


@dataclass(frozen=True)
class PrefillTile:
    """One way to launch the prefill kernel."""

    block_m: int
    block_n: int
    warps: int
    stages: int

    def launches(self, args: tuple[Any, ...]) -> list[Launch]:
        (prefill,) = kernels.prefill(*args)
        block_q = self.block_m // (HEADS // KV_HEADS)
        num_tokens, num_seqs = len(args[0]), len(args[3])
        tile = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n}
        return [
            dataclasses.replace(
                prefill,
                grid=(KV_HEADS, min(num_tokens // block_q + num_seqs, num_tokens)),
                constexprs={**prefill.constexprs, **tile},
                num_warps=self.warps,
                num_stages=self.stages,
            )
        ]


Tile = DecodeTile | PrefillTile
DECODE_TILES = (
    DecodeTile(32, 4, 4, 4),
    DecodeTile(64, 4, 3, 3),
    DecodeTile(32, 2, 4, 4),
)
PREFILL_TILES = (
    PrefillTile(128, 64, 8, 3),
    PrefillTile(128, 128, 8, 3),
    PrefillTile(64, 64, 4, 2),
    PrefillTile(64, 32, 4, 3),
)
DECODE_WORKS = ((1, 192), (1, 1024), (64, 192), (64, 1024), (64, 4096), (256, 1024))
PREFILL_WORKS = (128, 2048, 8192)


def check(tile: Tile, device_type: str = "cuda") -> str:
    """Compile the tile and compare it with the reference; why it cannot be used, or nothing."""
    device = torch.device(device_type)
    gen = torch.Generator(device=device).manual_seed(0)
    decodes = [(1, 1), (1, 0), (1, 33), (1, 700), (1, 1024), (1, 257)]
    lengths: list[list[tuple[int, int]]] = [[(1, 700)], decodes, decodes * 11]
    if isinstance(tile, PrefillTile):
        lengths = [[(200, 200)], [(2, 9), (70, 300), (150, 150)]]
    tolerance = OP.tolerances[torch.bfloat16]
    try:
        for batch in lengths:
            args = attention_batch(
                torch.bfloat16, device, gen, batch, (HEADS, KV_HEADS, HEAD_DIM), BLOCK_SIZE
            )
            want = args[5].clone()
            OP.overload("")(*args[:5], want, *args[6:])
            for launch in tile.launches(args):
                launch.run()
            torch.testing.assert_close(args[5], want, atol=tolerance.atol, rtol=tolerance.rtol)
    except (AssertionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def sweep() -> Iterator[dict[str, Any]]:
    """Every tile on every work; each is compiled and checked first, in a process of its own."""
    tiles: tuple[Tile, ...] = (*DECODE_TILES, *PREFILL_TILES)
    spawn = get_context("spawn")
    with ProcessPoolExecutor(len(tiles), spawn, max_tasks_per_child=1) as pool:
        wrong = dict(zip(tiles, pool.map(check, tiles), strict=True))
    for tile in filter(wrong.get, tiles):
        yield {"work": "check", "tile": str(tile), "us": wrong[tile]}
    lengths: list[tuple[str, list[int], list[int], Sequence[Tile]]] = [
        (f"decode b={batch} ctx={context}", [1] * batch, [context] * batch, DECODE_TILES)
        for batch, context in DECODE_WORKS
    ]
    lengths += [(f"prefill {n}", [n], [n], PREFILL_TILES) for n in PREFILL_WORKS]
    for work, query_lens, seq_lens, candidates in lengths:
        calls = list(batches(query_lens, seq_lens))
        for tile in candidates:
            if not wrong[tile]:
                us = round(ours_us(calls, tile.launches, budget_ms=20.0), 2)
                yield {"work": work, "tile": str(tile), "us": us}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--output", type=Path, help="write the figures there")
    options = parser.parse_args()
    torch.manual_seed(0)
    figures: list[dict[str, Any]] = []
    for line in sweep():
        figures.append(line)
        print(*line.values(), flush=True)
    if options.output:
        device = torch.cuda.get_device_name()
        versions = {"torch": torch.__version__, "triton": version("triton")}
        report = {"gpu": device, **versions, "figures": figures}
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
