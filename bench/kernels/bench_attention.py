"""``paged_attention``: decode over contexts of 128 to 128k, equal and mixed, and prefill, in bf16
and FP8 KV, and layers with other head sizes, windows, chunks and sinks.

SDPA reads contiguous K and V of equal lengths, which no server has: it is a bound, not a choice.
FlashInfer and FlashAttention 3 read our pages, where they are installed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

from ...ops.attention.paged_attention import context_symbols
from ..workloads import mix as draw_mix
from .attention_rivals import Shape, rivals
from .harness import MODELS, KernelWork, Model, benchmark_of, randn

BLOCK_SIZE = 16
BATCHES = (1, 8, 64, 256)
CONTEXTS = (128, 256, 1024, 4096, 16384, 131072)
PREFILLS = ((1, 128), (1, 512), (1, 2048), (1, 8192), (4, 512), (16, 128))
MOST_KV_BYTES = 6 << 30
SMALL = Model("12 heads of 64", 768, 3072, 12, 12, 64, 50257)
KV_DTYPES = {"bf16 KV": torch.bfloat16, "FP8 KV": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Layer:
    """A model's attention layer; its options are those of the op."""

    model: Model
    window: int = 0
    chunk: int = 0
    sinks: bool = False

    @property
    def name(self) -> str:
        options = {"window": self.window, "chunk": self.chunk}
        named = [f"{name} {value}" for name, value in options.items() if value]
        return ", ".join([self.model.name, *named, *["sinks"] * self.sinks])


def _shaped(name: str, heads: int, kv_heads: int, head_dim: int) -> Model:
    """A model of which only the attention is measured."""
    return Model(
        f"{name} ({heads}/{kv_heads} heads of {head_dim})", 0, 0, heads, kv_heads, head_dim, 0
    )


_GPT_OSS = _shaped("gpt-oss-20b", 64, 8, 64)
OTHER_LAYERS = (
    Layer(_GPT_OSS, sinks=True),
    Layer(_GPT_OSS, window=128, sinks=True),
    Layer(_shaped("Llama-4-Scout", 40, 8, 128), chunk=8192),
    Layer(_shaped("Gemma-3-4B", 8, 4, 256)),
    Layer(_shaped("Gemma-3-4B", 8, 4, 256), window=1024),
    Layer(_shaped("Phi-3-mini", 32, 32, 96)),
    Layer(_shaped("DeepSeek-V2-Lite", 16, 16, 192)),
    Layer(_shaped("wide heads", 8, 2, 512)),
)


def _of_mix(mix: str, count: int) -> tuple[int, ...]:
    """Contexts of requests of a mix, each somewhere within its output."""
    rng = random.Random(1)
    return tuple(
        len(work.prompt_token_ids) + int(rng.random() * work.output_len)
        for work in draw_mix(mix, count, 2)
    )


MIXED = {
    "32 of chat": _of_mix("chat", 32),
    "64 of chat": _of_mix("chat", 64),
    "256 of chat": _of_mix("chat", 256),
    "256 of decode-heavy": _of_mix("decode-heavy", 256),
    "8,000 beside 63 x 200": (8000, *[200] * 63),
    "3,000 beside 255 x 200": (3000, *[200] * 255),
}
OTHER_SHAPES = (("decode", 1, 1, 4096), ("decode", 64, 1, 4096), ("prefill", 1, 2048, 2048))


def make(
    layer: Layer,
    dtype: torch.dtype,
    contexts: Sequence[int],
    queries: int,
    device: torch.device,
) -> tuple[Any, ...]:
    """Arguments of a call: a sequence for each of ``contexts``, of which each has ``queries``."""
    model, num_seqs = layer.model, len(contexts)
    counts = [-(-context // BLOCK_SIZE) for context in contexts]
    cache = randn(
        sum(counts),
        2,
        BLOCK_SIZE,
        model.kv_heads,
        model.head_dim,
        device=device,
        dtype=dtype,
    )
    blocks = torch.randperm(sum(counts), device=device).int().split(counts)
    table = pad_sequence(blocks, batch_first=True)
    lengths = torch.tensor(contexts, device=device, dtype=torch.int32)
    starts = queries * torch.arange(num_seqs + 1, device=device, dtype=torch.int32)
    q = randn(num_seqs * queries, model.heads, model.head_dim, device=device)
    scale = model.head_dim**-0.5
    kv_scale = None if dtype == q.dtype else torch.ones(2, model.kv_heads, device=device)
    out = torch.empty_like(q)
    sinks = randn(model.heads, device=device) if layer.sinks else None
    batch = (q, cache, table, lengths, starts, out, scale, layer.window, 0.0)
    return (*batch, kv_scale, None, sinks, layer.chunk)


def sdpa(backend: SDPBackend, q: Any, cache: Any, table: Any, *_: Any) -> Any:
    """The same work on the cache's memory, read as if it were contiguous and not paged."""
    num_seqs, (_, _, _, kv_heads, dim) = table.shape[0], cache.shape
    k, v = cache.view(2, num_seqs, -1, kv_heads, dim).transpose(2, 3).unbind(0)
    queries = q.view(num_seqs, -1, *q.shape[1:]).transpose(1, 2)
    causal = queries.shape[2] > 1
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(queries, k, v, is_causal=causal, enable_gqa=True)


LIBRARIES = {
    "sdpa-cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "sdpa-flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),
}


def _libraries(layer: Layer, dtype: torch.dtype, is_equal: bool) -> dict[str, Any]:
    """Those that compute the same layer; ``is_equal``: all contexts have one length."""
    head_dim = layer.model.head_dim
    others = rivals(Shape(dtype, head_dim, layer.window, layer.chunk, layer.sinks))
    differs = layer.window or layer.chunk or layer.sinks or not is_equal
    if differs or dtype != torch.bfloat16 or head_dim > 256:
        return {**others}
    bounds = LIBRARIES if head_dim <= 128 else {"sdpa-flash": LIBRARIES["sdpa-flash"]}
    return {**bounds, **others}


def works() -> Iterator[KernelWork]:
    for model in (MODELS[0], MODELS[2]):
        for kv, dtype in KV_DTYPES.items():
            shapes = [("decode", b, 1, c) for b in BATCHES for c in CONTEXTS]
            shapes += [("prefill", b, n, n) for b, n in PREFILLS]
            for kind, b, queries, context in shapes:
                token_bytes = 2 * model.kv_heads * model.head_dim * dtype.itemsize
                if b * context * token_bytes <= MOST_KV_BYTES:
                    yield equal_work(Layer(model), kind, kv, b, queries, context)
            for name, contexts in MIXED.items():
                yield work(Layer(model), f"decode, {kv}, {name}", kv, contexts, 1)
    yield equal_work(Layer(SMALL), "prefill", "bf16 KV", 1, 128, 128)
    for layer in OTHER_LAYERS:
        for kind, b, queries, context in OTHER_SHAPES:
            yield equal_work(layer, kind, "bf16 KV", b, queries, context)


def equal_work(
    layer: Layer, kind: str, kv: str, num_seqs: int, queries: int, context: int
) -> KernelWork:
    what = f"{kind}, {kv}, b={num_seqs}, context {context}"
    return work(layer, what, kv, (context,) * num_seqs, queries)


def work(layer: Layer, what: str, kv: str, contexts: Sequence[int], queries: int) -> KernelWork:
    dtype = KV_DTYPES[kv]
    return KernelWork(
        "paged_attention",
        f"{layer.name} {what}",
        partial(make, layer, dtype, contexts, queries),
        context_symbols([queries] * len(contexts), contexts, layer.window, layer.chunk),
        _libraries(layer, dtype, len(set(contexts)) == 1),
    )


test_attention = benchmark_of(works())
