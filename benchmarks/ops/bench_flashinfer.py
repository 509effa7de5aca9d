"""Our paged attention against FlashInfer's kernels and PyTorch's SDPA, on one GPU.

FlashInfer is called through ``flashinfer/yardstick.cu``: its plan on the host, its kernels on the
same paged cache, without its Python wrappers and its JIT.  Kernel times are CUDA graphs of calls
that rotate over enough KV blocks to miss the L2 cache; ``plan_us`` is what each step costs the host
besides.  Every candidate is checked against the op's reference first.

    python -m fusewright.benchmarks.ops.bench_flashinfer [--libraries DIR] [--output FILE]
        [--works TEXT]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from ...ops.attention.paged_attention import OP, context_symbols
from ...ops.core.device_table import gpu_of

PAGE = 16
COLD_BYTES = 256 << 20
BUDGET_MS = 15.0
_SDPA = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)


@dataclass(frozen=True)
class AttentionWork:
    """One batch: (query length, context) a sequence, and the model's heads."""

    label: str
    lengths: tuple[tuple[int, int], ...]
    num_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def decode(self) -> bool:
        return all(queries == 1 for queries, _ in self.lengths)


def works() -> Iterator[AttentionWork]:
    for batch in (1, 8, 64, 256):
        for context in (128, 1024, 4096):
            yield AttentionWork(f"decode b={batch} ctx={context}", ((1, context),) * batch)
    for tokens in (128, 512, 2048, 8192):
        yield AttentionWork(f"prefill {tokens}", ((tokens, tokens),))
    yield AttentionWork("prefill 128, 12 heads of 64", ((128, 128),), 12, 12, 64)
    yield AttentionWork("prefill 2048, 32 heads of 64, 8 KV", ((2048, 2048),), 32, 8, 64)
    yield AttentionWork("chunk of 2048 at 6144", ((2048, 8192),))
    yield AttentionWork("16 prefills of 128", ((128, 128),) * 16)
    yield AttentionWork(
        "mixed: 63 decodes ctx=192 + prefill 512", (*(((1, 192),) * 63), (512, 512))
    )


@dataclass(frozen=True)
class AttentionBatch:
    """The op's arguments over several disjoint sets of blocks, and what FlashInfer wants of it."""

    work: AttentionWork
    calls: list[tuple[Any, ...]]
    indices: list[Tensor]  # blocks of all sequences, one after the other


def batch(work: AttentionWork) -> AttentionBatch:
    heads, kv_heads, dim = work.num_heads, work.kv_heads, work.head_dim
    contexts = [c for _, c in work.lengths]
    kv_bytes = sum(contexts) * 2 * kv_heads * dim * 2
    count = max(2, min(512, -(-COLD_BYTES // kv_bytes)))
    pages = [-(-c // PAGE) for c in contexts]
    total = count * sum(pages)
    cache = torch.randn(total, 2, PAGE, kv_heads, dim, device="cuda", dtype=torch.bfloat16)
    order = torch.randperm(total, device="cuda").int()
    lens = torch.tensor(contexts, device="cuda", dtype=torch.int32)
    starts = torch.tensor([0, *(q for q, _ in work.lengths)], device="cuda").cumsum(0).int()
    q = torch.randn(int(starts[-1]), heads, dim, device="cuda", dtype=torch.bfloat16)
    calls, indices = [], []
    for i in range(count):
        mine = order[i * sum(pages) : (i + 1) * sum(pages)]
        table = torch.zeros(len(pages), max(pages), device="cuda", dtype=torch.int32)
        for s, blocks in enumerate(mine.split(pages)):
            table[s, : len(blocks)] = blocks
        out = torch.full_like(q, float("nan"))
        calls.append((q, cache, table, lens, starts, out, dim**-0.5, 0, 0.0))
        indices.append(mine.contiguous())
    return AttentionBatch(work, calls, indices)


Run = Callable[[int], None]  # of the i-th set of blocks


def _fields(kind: type[Any], names: str) -> list[tuple[str, type[Any]]]:
    return [(name, kind) for name in names.split()]


class _Call(ctypes.Structure):
    """``FiCall`` of yardstick.cu."""

    _fields_ = [
        *_fields(ctypes.c_void_p, "q kv_cache out qo_indptr kv_indptr indices last_page"),
        *_fields(ctypes.c_void_p, "qo_host kv_host kv_len_host float_ws int_ws pinned_ws"),
        *_fields(ctypes.c_int64, "float_bytes int_bytes q_stride"),
        *_fields(ctypes.c_int32, "num_tokens num_seqs num_heads kv_heads page pdl graph causal"),
        ("scale", ctypes.c_float),
        ("info", ctypes.c_int64 * 16),
    ]


class Yardstick:
    """One library of yardstick.cu on one batch: planned once, run on any of its block sets."""

    def __init__(self, path: Path, batch: AttentionBatch, pdl: bool) -> None:
        self.library = ctypes.CDLL(str(path))
        self.batch = batch
        lengths = batch.work.lengths
        pages = [-(-c // PAGE) for _, c in lengths]
        zero = torch.zeros(1, dtype=torch.int32)

        def prefix(values: Sequence[int]) -> Tensor:
            return torch.cat([zero, torch.tensor(values).cumsum(0).int()])

        host = [
            prefix([q for q, _ in lengths]),
            prefix(pages),
            torch.tensor([c for _, c in lengths], dtype=torch.int32),
        ]
        last = torch.tensor([(c - 1) % PAGE + 1 for _, c in lengths], dtype=torch.int32).cuda()
        device = [host[0].cuda(), host[1].cuda(), last]
        spaces = [
            torch.empty(512 << 20, dtype=torch.uint8, device="cuda"),
            torch.empty(8 << 20, dtype=torch.uint8, device="cuda"),
            torch.empty(8 << 20, dtype=torch.uint8, pin_memory=True),
        ]
        self.kept = [host, device, spaces]
        q = batch.calls[0][0]
        self.call = _Call(
            qo_indptr=device[0].data_ptr(),
            kv_indptr=device[1].data_ptr(),
            last_page=last.data_ptr(),
            qo_host=host[0].data_ptr(),
            kv_host=host[1].data_ptr(),
            kv_len_host=host[2].data_ptr(),
            float_ws=spaces[0].data_ptr(),
            int_ws=spaces[1].data_ptr(),
            pinned_ws=spaces[2].data_ptr(),
            float_bytes=spaces[0].numel(),
            int_bytes=spaces[1].numel(),
            q_stride=q.stride(0),
            num_tokens=len(q),
            num_seqs=len(lengths),
            num_heads=q.shape[1],
            kv_heads=batch.work.kv_heads,
            page=PAGE,
            pdl=pdl,
            causal=1,
            scale=q.shape[2] ** -0.5,
        )

    def plan(self) -> None:
        self._do("fi_plan")

    def run(self, i: int) -> None:
        q, cache, _table, _lens, _starts, out, *_ = self.batch.calls[i]
        self.call.q, self.call.kv_cache, self.call.out = (t.data_ptr() for t in (q, cache, out))
        self.call.indices = self.batch.indices[i].data_ptr()
        self._do("fi_run")

    def _do(self, function: str) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if getattr(self.library, function)(ctypes.byref(self.call), stream):
            raise RuntimeError(f"{function} failed on {self.batch.work.label}")

    def plan_us(self) -> float:
        times = []
        for _ in range(30):
            torch.cuda.synchronize()
            start = time.perf_counter()
            self.plan()
            times.append(time.perf_counter() - start)
        return round(1e6 * sorted(times)[len(times) // 2], 1)


def ours(batch: AttentionBatch, implementation: str) -> Run:
    op = OP.overload(implementation)
    return lambda i: op(*batch.calls[i])


def sdpa(batch: AttentionBatch, backend: SDPBackend) -> Run | None:
    """SDPA on contiguous K and V of equal sequences: no paging, no ragged lengths.  Its results lie
    in memory of their own, as those of the others: none stays in L2."""
    if len({*batch.work.lengths}) > 1:
        return None
    work, (queries, context) = batch.work, batch.work.lengths[0]
    count, num_seqs = len(batch.calls), len(work.lengths)

    def tensor(copies: int, heads: int, tokens: int) -> Tensor:
        shape = (copies, num_seqs, tokens, heads, work.head_dim)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(2, 3)

    q = tensor(1, work.num_heads, queries)[0]
    k, v = tensor(count, work.kv_heads, context), tensor(count, work.kv_heads, context)
    causal: dict[str, Any] = {"is_causal": queries > 1}
    if 1 < queries < context:
        causal = {"attn_mask": causal_lower_right(queries, context)}
    gqa = work.num_heads != work.kv_heads
    results: dict[int, Tensor] = {}

    def run(i: int) -> None:
        with sdpa_kernel(backend):
            results[i] = F.scaled_dot_product_attention(q, k[i], v[i], enable_gqa=gqa, **causal)

    return run


def candidates(batch: AttentionBatch, libraries: Path) -> Iterator[Candidate]:
    """(name, run, the yardstick it belongs to) of everything that can do this batch."""
    work = batch.work
    desc = OP.describe(batch.calls[0], sm=gpu_of(torch.device("cuda"))[1])
    for impl in OP.implementations:
        if impl.name != "native" and not impl.supports(desc):
            yield impl.name, ours(batch, impl.name), None
    if work.decode:
        for pdl in (False, True):
            stick = Yardstick(libraries / f"y_decode_{work.head_dim}.so", batch, pdl)
            yield f"fi decode{' pdl' * pdl}", stick.run, stick
    for pdl in (False, True):
        stick = Yardstick(libraries / f"y_fa2_{work.head_dim}.so", batch, pdl)
        yield f"fi fa2{' pdl' * pdl}", stick.run, stick
    if not work.decode:
        stick = Yardstick(libraries / f"y_fa3_{work.head_dim}.so", batch, False)
        yield "fi fa3", stick.run, stick
    for backend in _SDPA:
        if run := sdpa(batch, backend):
            yield f"sdpa {backend.name.lower()}", run, None


def graph_us(calls: list[Callable[[], Any]]) -> float:
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
    times = max(2, min(100, int(BUDGET_MS / max(replay_ms(2), 1e-3))))
    return 1e3 * min(replay_ms(times) for _ in range(3)) / len(calls)


def error_of(batch: AttentionBatch, run: Run, want: Tensor) -> float:
    """Relative error of the first call; NaN where a row stayed unwritten."""
    out = batch.calls[0][5]
    out.fill_(float("nan"))
    run(0)
    difference = (out.float() - want.float()).norm() / want.float().norm()
    return float(difference)


Candidate = tuple[str, Run, "Yardstick | None"]
"""(name, run, the yardstick that it belongs to)"""


@dataclass(frozen=True)
class Figures:
    """Times of a batch by candidate: us a call, us of planning a step, and why one failed."""

    us: dict[str, float]
    plan_us: dict[str, float]
    failed: dict[str, str]


def figures(data: AttentionBatch, want: Tensor, found: Iterable[Candidate]) -> Figures:
    """Check the first call of each candidate against ``want``, but for torch's, and time all."""
    us: dict[str, float] = {}
    plan_us: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, run, stick in found:
        try:
            if stick:
                stick.plan()
            if not name.startswith("sdpa"):
                error = error_of(data, run, want)
                if not error < 1e-2:
                    raise ValueError(f"relative error {error:.3g}")
            calls: list[Callable[[], Any]] = [partial(run, i) for i in range(len(data.calls))]
            us[name] = round(graph_us(calls), 2)
            if stick and "pdl" not in name:
                plan_us[name] = stick.plan_us()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    return Figures(us, plan_us, failed)


def measure(work: AttentionWork, libraries: Path) -> dict[str, Any]:
    data = batch(work)
    first = data.calls[0]
    want = torch.empty_like(first[5])
    OP.overload("")(*first[:5], want, *first[6:])
    made = figures(data, want, candidates(data, libraries))
    us = made.us
    cost = OP.cost(OP.describe(first))
    values = context_symbols([q for q, _ in work.lengths], [c for _, c in work.lengths])
    best = min(us, key=lambda n: us[n])
    mine = [name for name in us if name in {impl.name for impl in OP.implementations}]
    return {
        "work": work.label,
        "bytes": int(cost.bytes.subs(values)),
        "flops": int(cost.flops.subs(values)),
        "us": us,
        "best": best,
        "ours / best": {name: round(us[name] / us[best], 3) for name in mine},
        "plan_us": made.plan_us,
        "failed": made.failed,
    }


def build(folder: Path) -> None:
    """Load the modules; compile what is missing: some minutes, nvcc and flashinfer-python."""
    from .flashinfer_modules import compile_source

    source = Path(__file__).with_name("flashinfer") / "yardstick.cu"
    folder.mkdir(parents=True, exist_ok=True)
    for dim in (64, 128):
        for kind in ("decode", "fa2", "fa3"):
            if not (path := folder / f"y_{kind}_{dim}.so").exists():
                defines = {f"KIND_{kind.upper()}": 1, "FW_HEAD_DIM": dim}
                path.write_bytes(compile_source(source, defines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--libraries", type=Path, help="folder of the libraries; built if missing")
    parser.add_argument("--output", type=Path, help="write the figures there")
    parser.add_argument("--works", default="", help="only works whose label contains this")
    options = parser.parse_args()
    torch.manual_seed(0)
    figures = []
    with TemporaryDirectory(prefix="fusewright-") as folder:
        libraries = options.libraries or Path(folder)
        build(libraries)
        for work in works():
            if options.works in work.label:
                figures.append(measure(work, libraries))
                print(json.dumps(figures[-1]), flush=True)
                torch.cuda.empty_cache()
    if options.output:
        report = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "figures": figures,
        }
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
