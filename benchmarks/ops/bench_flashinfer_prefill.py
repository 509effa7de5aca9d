"""Our prefill attention against FlashInfer's for head sizes of 64 to 256, on one Hopper GPU.

FlashInfer is its FMHA v2 (``flashinfer/fmha.cu``: TMA over pages, no plan, windows, chunks, soft
caps, sinks), its planned FlashAttention-3 and, for FP8 KV, its FlashAttention-2
(``flashinfer/yardstick.cu``).  Times are those of ``bench_flashinfer``; results are compared with
our Triton kernels, and FMHA v2 also where what no query sees is no number.

    python -m fusewright.benchmarks.ops.bench_flashinfer_prefill [--libraries DIR] [--output FILE]
        [--works TEXT] [--build-only]
"""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ...ops.attention.paged_attention import OP, context_symbols
from ...ops.attention.paged_attention_cases import batch as conformance_batch
from ...ops.core.device_table import gpu_of
from ...ops.core.float8 import E4M3
from . import bench_flashinfer as base

# name -> (query heads, KV heads, head_dim)
_HEADS = {
    "Llama-3.2-1B": (32, 8, 64),
    "Gemma-3-4B": (8, 4, 256),
    "Llama-3-8B": (32, 8, 128),
    "gpt-oss-20b": (64, 8, 64),
    "Gemma-2-9B": (16, 8, 256),
    "Phi-3-mini": (32, 32, 96),
    "head_dim 80": (32, 32, 80),
}
_LENGTHS: dict[str, tuple[tuple[int, int], ...]] = {
    "1x8192": ((8192, 8192),),
    "8x1024": ((1024, 1024),) * 8,
    "512 at 8192": ((512, 8704),),
    "1x2048": ((2048, 2048),),
    "16x128": ((128, 128),) * 16,
    "32 decodes at 1024 + 2048": (*(((1, 1024),) * 32), (2048, 2048)),
}
_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpt-oss-20b", {"sinks": True}),
    ("gpt-oss-20b", {"sinks": True, "window": 128}),
    ("Gemma-2-9B", {"cap": 50.0}),
    ("Gemma-2-9B", {"cap": 50.0, "window": 4096}),
    ("Gemma-3-4B", {"window": 1024}),
    ("Llama-3-8B", {"chunk": 2048}),
    ("Llama-3-8B", {"window": 4096}),
    ("Llama-3.2-1B", {"fp8": True}),
    ("Llama-3-8B", {"fp8": True}),
    ("Phi-3-mini", {}),
    ("head_dim 80", {}),
)


@dataclass(frozen=True)
class PrefillWork(base.AttentionWork):
    """A batch, and what its model's attention has besides."""

    window: int = 0
    cap: float = 0.0
    sinks: bool = False
    chunk: int = 0
    fp8: bool = False

    @property
    def plain(self) -> bool:
        return not (self.window or self.cap or self.sinks or self.chunk)


def works() -> Iterator[PrefillWork]:
    for model in ("Llama-3.2-1B", "Gemma-3-4B", "Llama-3-8B"):
        for label, lengths in _LENGTHS.items():
            yield PrefillWork(f"{model}: {label}", lengths, *_HEADS[model])
    for label in tuple(_LENGTHS)[:3]:
        for model, more in _VARIANTS:
            name = ", ".join((model, *(f"{key} {value}" for key, value in more.items())))
            yield PrefillWork(f"{name}: {label}", _LENGTHS[label], *_HEADS[model], **more)


def batch(work: PrefillWork) -> base.AttentionBatch:
    data = base.batch(work)
    sinks = torch.randn(work.num_heads, device="cuda") if work.sinks else None
    last = (work.window, work.cap, None, None, sinks, work.chunk)
    data.calls[:] = [(*call[:7], *last) for call in data.calls]
    if work.fp8:
        cache = data.calls[0][1].to(E4M3)
        data.calls[:] = [(call[0], cache, *call[2:]) for call in data.calls]
    return data


class _Call(ctypes.Structure):
    """``FmhaCall`` of fmha.cu."""

    _fields_ = [
        (name, kind)
        for kind, names in (
            (ctypes.c_void_p, "q kv_cache out cu_q cu_kv block_table sinks counter"),
            (ctypes.c_int64, "q_stride"),
            (ctypes.c_int32, "num_tokens num_seqs num_heads kv_heads page max_blocks max_queries"),
            (ctypes.c_int32, "window chunk"),
            (ctypes.c_float, "scale soft_cap"),
        )
        for name in names.split()
    ]


class Fmha:
    """A library of fmha.cu for calls of the lengths of ``args``."""

    def __init__(self, path: Path, args: tuple[Any, ...]) -> None:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(path))
        q, cache, table, lens, starts, _out, scale, window, cap, _kv, _o, sinks, chunk = args
        counter = torch.zeros(1, dtype=torch.int32, device="cuda")
        context = torch.cat([counter, lens.cumsum(0).int()])
        self.kept = [counter, context, sinks]
        self.call = _Call(
            cu_q=starts.data_ptr(),
            cu_kv=context.data_ptr(),
            sinks=0 if sinks is None else sinks.data_ptr(),
            counter=counter.data_ptr(),
            q_stride=q.stride(0),
            num_tokens=len(q),
            num_seqs=len(lens),
            num_heads=q.shape[1],
            kv_heads=cache.shape[3],
            page=cache.shape[2],
            max_blocks=table.shape[1],
            max_queries=int(starts.diff().max()),
            window=window,
            chunk=chunk,
            scale=scale,
            soft_cap=cap,
        )

    def run(self, args: tuple[Any, ...]) -> None:
        names = {"q": 0, "kv_cache": 1, "block_table": 2, "out": 5}
        for name, index in names.items():
            setattr(self.call, name, args[index].data_ptr())
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if code := self.library.fmha_run(ctypes.byref(self.call), stream):
            raise RuntimeError(f"fmha_run failed: CUDA error {code}")


def candidates(data: base.AttentionBatch, libraries: Path) -> Iterator[base.Candidate]:
    """(name, run, the yardstick it belongs to) of everything that can do this batch."""
    work, first = data.work, data.calls[0]
    assert isinstance(work, PrefillWork)
    desc = OP.describe(first, sm=gpu_of(torch.device("cuda"))[1])
    for impl in OP.implementations:
        if impl.name in ("cuda", "triton") and not impl.supports(desc):
            yield impl.name, base.ours(data, impl.name), None
    fmha = libraries / f"fmha_{work.head_dim}{'_cap' * bool(work.cap)}.so"
    if not work.fp8 and fmha.exists():
        library = Fmha(fmha, first)
        yield "fi fmha v2", lambda i: library.run(data.calls[i]), None
    kind = "fa2_fp8" if work.fp8 else "fa3"
    path = libraries / f"y_{kind}_{work.head_dim}.so"
    if work.plain and path.exists():
        stick = base.Yardstick(path, data, False)
        yield f"fi {kind}", stick.run, stick


def measure(work: PrefillWork, libraries: Path) -> dict[str, Any]:
    data = batch(work)
    first = data.calls[0]
    want = torch.empty_like(first[5])
    OP.overload("triton")(*first[:5], want, *first[6:])
    made = base.figures(data, want, candidates(data, libraries))
    queries, contexts = ([pair[i] for pair in work.lengths] for i in range(2))
    values = context_symbols(queries, contexts, work.window, work.chunk)
    flops = int(OP.cost(OP.describe(first)).flops.subs(values))
    return {"work": work.label, "flops": flops, **asdict(made)}


def unseen(head_dim: int, libraries: Path) -> dict[str, Any]:
    """Rows of FMHA v2's result that are no number where slots that no query sees hold none."""
    lengths = [(23, 23), (5, 150), (140, 300)]
    gen = torch.Generator("cuda").manual_seed(0)
    heads = (8, 2, head_dim)
    args = conformance_batch(torch.bfloat16, torch.device("cuda"), gen, lengths, heads, base.PAGE)
    args = (*args, None, 0)
    Fmha(libraries / f"fmha_{head_dim}.so", args).run(args)
    rows = int(args[5].isnan().flatten(1).any(1).sum())
    return {"unseen slots are NaN, head_dim": head_dim, "rows": len(args[5]), "nan": rows}


def build(folder: Path) -> None:
    """Compile the libraries that ``folder`` lacks: half a minute to two of one core each."""
    from .flashinfer_modules import compile_source, fmha_source

    sources = Path(__file__).with_name("flashinfer")
    folder.mkdir(parents=True, exist_ok=True)

    def make(name: str, source: str, defines: dict[str, Any], generated: str = "") -> None:
        if not (path := folder / f"{name}.so").exists():
            path.write_bytes(compile_source(sources / source, defines, generated))

    with ThreadPoolExecutor() as pool:
        jobs = []
        for dim in (64, 128, 256):
            defines: dict[str, Any] = {"KIND_FA3": 1, "FW_HEAD_DIM": dim}
            jobs.append(pool.submit(make, f"y_fa3_{dim}", "yardstick.cu", defines))
        for dim in (64, 128):
            defines = {"KIND_FA2": 1, "FW_HEAD_DIM": dim, "FW_KV": "__nv_fp8_e4m3"}
            jobs.append(pool.submit(make, f"y_fa2_fp8_{dim}", "yardstick.cu", defines))
        for dim, cap in (
            (64, False),
            (80, False),
            (96, False),
            (128, False),
            (256, False),
            (256, True),
        ):
            launcher, generated = fmha_source(dim, cap)
            defines = {"FW_HEAD_DIM": dim, "FW_RUN": launcher}
            name = f"fmha_{dim}{'_cap' * cap}"
            jobs.append(pool.submit(make, name, "fmha.cu", defines, generated))
        for job in jobs:
            job.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--libraries", type=Path, help="folder of the libraries; built if missing")
    parser.add_argument("--output", type=Path, help="write the figures there, one a line")
    parser.add_argument("--works", default="", help="only works whose label contains this")
    parser.add_argument("--build-only", action="store_true", help="needs no GPU")
    options = parser.parse_args()
    torch.manual_seed(0)
    with TemporaryDirectory(prefix="fusewright-") as folder:
        libraries = options.libraries or Path(folder)
        build(libraries)
        if options.build_only:
            return
        gpu = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        figures: list[dict[str, Any]] = [gpu, *(unseen(dim, libraries) for dim in (64, 128, 256))]
        for work in works():
            if options.works in work.label:
                figures.append(measure(work, libraries))
                print(json.dumps(figures[-1]), flush=True)
                torch.cuda.empty_cache()
    if options.output:
        options.output.write_text("".join(json.dumps(row) + "\n" for row in figures))


if __name__ == "__main__":
    main()
