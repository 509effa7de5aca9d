"""Time of the sampling ops by CUDA graph replay, against PyTorch and FlashInfer's samplers.

``python -m fusewright.bench.ops.bench_sampling --output FILE [--flashinfer LIBRARY]``.  The logits
are one buffer, read again and again: at small batches they come from L2, as they do right after
lm_head wrote them.  GB/s is the op's own cost formula over the time, the least bytes the call must
move.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import ops

VOCAB = 128256
CALLS_PER_GRAPH = 10


def time_us(call: Callable[[], Any]) -> float:
    """Median time of one call in microseconds, from replays of a graph of several calls."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_PER_GRAPH):
            call()
    times: list[float] = []
    while len(times) < 5 or (len(times) < 25 and sum(times) < 5e3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) * 1e3 / CALLS_PER_GRAPH)
    return statistics.median(times)


def calls(num_seqs: int, vocab: int) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """(label, op, arguments) of each measured call."""
    gen = torch.Generator("cuda").manual_seed(0)
    logits = 3 * torch.randn((num_seqs, vocab), generator=gen, device="cuda")
    logits = logits.to(torch.bfloat16)

    def rows(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((num_seqs,), value, dtype=dtype, device="cuda")

    warm, state = rows(0.8), (rows(1, torch.int64), rows(7, torch.int32))
    top_k, top_p, min_p = rows(50, torch.int32), rows(0.9), rows(0.05)
    yield "argmax", "argmax", (logits,)
    yield "sample T=0.8", "sample", (logits, warm, None, None, None, *state)
    yield "sample min_p=0.05", "sample", (logits, warm, None, None, min_p, *state)
    yield "sample top_k=50", "sample", (logits, warm, top_k, None, None, *state)
    yield "sample top_p=0.9", "sample", (logits, warm, None, top_p, None, *state)
    yield "sample top_k=50 top_p=0.9", "sample", (logits, warm, top_k, top_p, None, *state)
    yield "logprobs 0", "token_logprobs", (logits, rows(3, torch.int32), 0)
    yield "logprobs 5", "token_logprobs", (logits, rows(3, torch.int32), 5)
    counts = torch.zeros((num_seqs, vocab), dtype=torch.int32, device="cuda")
    slots = torch.arange(num_seqs, dtype=torch.int32, device="cuda")
    penalties = (counts, counts > 0, slots, rows(1.1), rows(0.1), rows(0.1))
    yield "penalties", "apply_penalties", (logits.float(), *penalties)


class FlashInfer:
    """``sample`` by FlashInfer: softmax, then draws that it rejects until one passes the filters.

    Args:
        library: of ``flashinfer/sampling.cu``; compiled there if missing: nvcc, flashinfer-python.
    """

    def __init__(self, library: Path) -> None:
        if not library.exists():
            from .flashinfer_modules import compile_source

            source = Path(__file__).with_name("flashinfer") / "sampling.cu"
            library.write_bytes(compile_source(source, {}))
        self._library = ctypes.CDLL(str(library))
        self._workspace = torch.empty(1 << 24, dtype=torch.uint8, device="cuda")

    def __call__(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None
    ) -> Tensor:
        values, probabilities = logits.float(), torch.empty_like(logits, dtype=torch.float32)
        if top_k is not None and top_p is None:
            top_k = top_k.float()
        tokens = torch.empty(len(logits), dtype=torch.int32, device="cuda")
        valid, workspace = torch.empty_like(tokens, dtype=torch.bool), self._workspace
        sizes = logits.shape
        memory = [*map(_address, (values, probabilities, temperature, workspace))]
        self._run("fi_softmax", *memory, ctypes.c_size_t(len(workspace)), *sizes)
        memory = [*map(_address, (probabilities, top_k, top_p, tokens, valid))]
        self._run("fi_draw", *memory, *sizes, ctypes.c_uint64(7))
        return tokens

    def _run(self, name: str, *args: Any) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if error := getattr(self._library, name)(*args, stream):
            raise RuntimeError(f"{name}: CUDA error {error}")


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def contenders(
    name: str, args: tuple[Any, ...], rival: FlashInfer | None
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What can run a call, by name."""
    op, sm = ops.BY_NAME[name], torch.cuda.get_device_capability()
    desc = op.describe(args, sm=10 * sm[0] + sm[1])
    for implementation in op.implementations:
        if not implementation.supports(desc):
            yield implementation.name, partial(op.overload(implementation.name), *args)
    if rival is not None and name == "sample" and args[4] is None:
        yield "flashinfer", partial(rival, *args[:4])


def measure(num_seqs: int, vocab: int, rival: FlashInfer | None) -> Iterator[dict[str, Any]]:
    for label, name, args in calls(num_seqs, vocab):
        op = ops.BY_NAME[name]
        moved = int(op.cost(op.describe(args)).bytes)
        for implementation, fn in contenders(name, args, rival):
            us = time_us(fn)
            yield {
                "label": label,
                "implementation": implementation,
                "num_seqs": num_seqs,
                "vocab": vocab,
                "us": round(us, 2),
                "gb_per_s": round(moved / us / 1e3, 1),
            }
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--output", type=Path, help="write the figures here")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--flashinfer", type=Path, help="its library; built there if missing")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_sampling: no CUDA GPU; run it on a machine with one", file=sys.stderr)
        return 2
    rival = options.flashinfer and FlashInfer(options.flashinfer)
    results = []
    for num_seqs in options.num_seqs:
        for result in measure(num_seqs, options.vocab, rival):
            results.append(result)
            print(
                f"b={num_seqs:<4} {result['label']:<26} {result['implementation']:<11}"
                f"{result['us']:>10.2f} us {result['gb_per_s']:>8.1f} GB/s",
                flush=True,
            )
    if options.output:
        report = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "results": results,
        }
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
