"""``paged_attention``: causal attention over a paged KV cache, decodes and prefills mixed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ._launch import Launch, run_launches
from ._op import TOLERANCES, Case, Cost, Implementation, OpDesc, SemanticOp, Tolerance
from .launches import paged_attention as kernels

# The reference holds at most this many float32 logits at once.
_MAX_LOGITS = 1 << 24


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    out: Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
) -> None:
    """Softmax attention of each query over its sequence's cached positions up to its own.

    Paging as in PagedAttention (Kwon et al., 2023, section 4.1); soft cap as in Gemma 2 (2024,
    section 2).  Query i of sequence s stands at position seq_lens[s] - query_len[s] + i.

    Args:
        q: [num_tokens, num_heads, head_dim]; may be strided on tokens.
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_dim], q's dtype; index 1: 0 = K,
            1 = V.  Already holds this step's K and V.  Slots that no query may see are not used.
        block_table: [num_seqs, max_blocks] int32, the blocks of each sequence in order.
        seq_lens: [num_seqs] int32, context lengths including this step; 0 skips the sequence.
        query_start_loc: [num_seqs + 1] int32, prefix sums of query lengths.  num_tokens ==
            num_seqs promises at most one query a sequence.
        out: [num_tokens, num_heads, head_dim], q's dtype, contiguous; written.  Rows from
            query_start_loc[-1] on and rows of skipped sequences stay as they are.
        scale: multiplies q k, positive.
        sliding_window: a query sees this many positions, itself included; 0 = all.
        soft_cap: logits become cap * tanh(logits / cap); 0 = off.
    """
    torch.ops.fw.paged_attention.default(
        q,
        kv_cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        scale,
        sliding_window,
        soft_cap,
    )


def _sequences(
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    sliding_window: int,
) -> Iterator[tuple[slice, int, Tensor, Tensor]]:
    """(rows of q, position of the first key relative to the first query, K, V) a sequence.

    K and V are [num_kv_heads, keys, head_dim], exactly the keys that some query sees.
    """
    page = kv_cache.shape[2]
    starts, contexts = query_start_loc.tolist(), seq_lens.tolist()
    for s, context in enumerate(contexts):
        start, stop = starts[s], starts[s + 1]
        if context == 0 or start == stop:
            continue
        first_query = context - (stop - start)
        first_key = max(0, first_query - sliding_window + 1) if sliding_window > 0 else 0
        first_page = first_key // page
        blocks = kv_cache[block_table[s, first_page : -(-context // page)].long()]
        keys = slice(first_key - first_page * page, context - first_page * page)
        k, v = (t.flatten(0, 1)[keys].transpose(0, 1) for t in blocks.unbind(1))
        yield slice(start, stop), first_key - first_query, k, v


def _visible(
    rows: range, first_key: int, num_keys: int, sliding_window: int, device: torch.device
) -> Tensor:
    """[rows, keys] bool; positions are relative to the sequence's first query."""
    query = torch.arange(rows.start, rows.stop, device=device)[:, None]
    key = torch.arange(first_key, first_key + num_keys, device=device)[None, :]
    visible = key <= query
    if sliding_window > 0:
        visible &= key > query - sliding_window
    return visible


def _reference(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    out: Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
) -> None:
    _, num_heads, head_dim = q.shape
    kv_heads = kv_cache.shape[3]
    found = _sequences(kv_cache, block_table, seq_lens, query_start_loc, sliding_window)
    for span, first_key, k, v in found:
        k, v = k.float(), v.float()
        num_queries, num_keys = span.stop - span.start, k.shape[1]
        step = max(1, _MAX_LOGITS // (num_heads * num_keys))
        for begin in range(0, num_queries, step):
            rows = range(begin, min(begin + step, num_queries))
            here = slice(span.start + rows.start, span.start + rows.stop)
            # [kv_heads, rows, group, head_dim]: the heads of a group share their K and V.
            grouped = q[here].float().view(len(rows), kv_heads, -1, head_dim).transpose(0, 1)
            logits = torch.einsum("hqgd,hkd->hqgk", grouped, k) * scale
            if soft_cap > 0:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            visible = _visible(rows, first_key, num_keys, sliding_window, q.device)
            logits = logits.masked_fill(~visible[None, :, None, :], float("-inf"))
            result = torch.einsum("hqgk,hkd->qhgd", torch.softmax(logits, -1), v)
            out[here] = result.reshape(len(rows), num_heads, head_dim).to(out.dtype)


def _native(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    out: Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
) -> None:
    """PyTorch's own attention, one sequence at a time; it knows no soft cap."""
    if soft_cap > 0:
        _reference(
            q,
            kv_cache,
            block_table,
            seq_lens,
            query_start_loc,
            out,
            scale,
            sliding_window,
            soft_cap,
        )
        return
    gqa = q.shape[1] != kv_cache.shape[3]
    found = _sequences(kv_cache, block_table, seq_lens, query_start_loc, sliding_window)
    for span, first_key, k, v in found:
        num_queries, num_keys = span.stop - span.start, k.shape[1]
        whole = first_key == 0 and (sliding_window == 0 or sliding_window >= num_keys)
        mask = None
        if num_queries > 1 and not whole:
            mask = _visible(range(num_queries), first_key, num_keys, sliding_window, q.device)
        result = F.scaled_dot_product_attention(
            q[span].transpose(0, 1)[None],
            k[None],
            v[None],
            attn_mask=mask,
            is_causal=whole and num_queries > 1,
            scale=scale,
            enable_gqa=gqa,
        )
        out[span] = result[0].transpose(0, 1)


def _fake(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    out: Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
) -> None:
    return None


def _launches(*args: Any) -> tuple[list[Launch], None]:
    return kernels.paged_attention(*args)


def _triton_supports(desc: OpDesc) -> str:
    head_dim = desc["q"].shape[2]
    _, _, page, kv_heads, _ = desc["kv_cache"].shape
    if head_dim > 256 or head_dim % 8:
        return f"head_dim {head_dim}: the kernels take multiples of 8 up to 256"
    if page > 256 or page & (page - 1):
        return f"block size {page}: the kernels take powers of two up to 256"
    if desc["q"].shape[1] // kv_heads > 128:
        return f"{desc['q'].shape[1]} heads share {kv_heads} KV heads: a group has at most 128"
    if desc["kv_cache"].dtype != desc["q"].dtype:
        return f"KV cache is {desc['kv_cache'].dtype}, q is {desc['q'].dtype}"
    if desc["scale"] <= 0:
        return f"scale {desc['scale']} is not positive"
    return ""


def _batch(
    dtype: torch.dtype,
    device: torch.device,
    gen: torch.Generator,
    lengths: Sequence[tuple[int, int]],
    heads: tuple[int, int, int],
    page: int,
    *,
    window: int = 0,
    cap: float = 0.0,
    padding: int = 0,
) -> tuple[Any, ...]:
    """Arguments of one call; ``lengths``: (query, context) a sequence, ``heads``: q, KV, dim.

    Every slot that no query may see is NaN or infinite, and unused table entries point nowhere.
    """
    num_heads, kv_heads, dim = heads
    num_seqs, num_tokens = len(lengths), sum(n for n, _ in lengths) + padding
    pages = [-(-context // page) for _, context in lengths]
    order = torch.randperm(sum(pages) + 2, generator=gen, device=device).int()

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, device=device).to(dtype)

    cache = torch.full((len(order), 2, page, kv_heads, dim), float("nan"), dtype=dtype)
    cache[::2] = float("inf")
    cache = cache.to(device)
    table = torch.full((num_seqs, max(pages) + 3), 1 << 30, dtype=torch.int32, device=device)
    taken = 0
    for s, (queries, context) in enumerate(lengths):
        table[s, : pages[s]] = order[taken : taken + pages[s]]
        taken += pages[s]
        first = max(0, context - queries - window + 1) if window > 0 else 0
        slots = torch.arange(first, context, device=device)
        cache[table[s, slots // page].long(), :, slots % page] = randn(len(slots), 2, kv_heads, dim)
        table[s, : first // page] = 1 << 30
    # One row of a fused QKV projection: q is strided on tokens.
    q = randn(num_tokens, num_heads + 2 * kv_heads, dim)[:, :num_heads]
    starts = [sum(n for n, _ in lengths[:s]) for s in range(num_seqs + 1)]
    return (
        q,
        cache,
        table,
        torch.tensor([c for _, c in lengths], dtype=torch.int32, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.full((num_tokens, num_heads, dim), 7.0, dtype=dtype, device=device),
        dim**-0.5,
        window,
        cap,
    )


def _cases(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Iterator[Case]:
    mixed = [(1, 40), (23, 23), (1, 1), (5, 150), (1, 0), (2, 64)]
    decode = [(1, 33), (1, 300), (1, 0), (1, 17)]
    both = {"window": 20, "cap": 5.0}
    # Few distinct shapes and options: each is a compilation for the sm_90 tests.
    shapes: list[tuple[str, Any, Any, int, dict[str, Any]]] = [
        ("mixed gqa", mixed, (8, 2, 64), 16, {"padding": 3}),
        ("mixed mha", mixed, (2, 2, 16), 8, {}),
        ("mixed mqa, group of 6", mixed, (6, 1, 32), 32, {"padding": 1}),
        ("mixed, head 80", mixed, (4, 2, 80), 16, {}),
        ("mixed, head 256", [(3, 40), (1, 70)], (2, 1, 256), 32, {}),
        ("mixed, window, cap", mixed, (8, 2, 64), 16, both),
        ("prefill", [(140, 140)], (8, 2, 128), 16, {}),
        ("prefill chunk, window", [(70, 170)], (8, 2, 64), 16, {"window": 33}),
        ("prefill chunk, window, cap", [(29, 150)], (8, 2, 64), 16, both),
        ("decode", decode, (8, 2, 128), 16, {}),
        ("decode, head 16", decode, (2, 2, 16), 8, {}),
        ("decode, head 256", [(1, 129), (1, 31)], (2, 1, 256), 32, {}),
        ("decode, window", decode, (8, 2, 64), 16, {"window": 150}),
        ("decode, window, cap", decode, (8, 2, 64), 16, both),
        ("one long decode", [(1, 700)], (8, 2, 64), 16, {}),
    ]
    for label, lengths, heads, page, options in shapes:
        yield Case(label, _batch(dtype, device, gen, lengths, heads, page, **options))


def _cost(desc: OpDesc) -> Cost:
    """In the symbols ``context_tokens``, KV positions read (without a window: sum of seq_lens),
    and ``query_context_pairs``, (query, position) pairs that are not masked."""
    import sympy

    context = sympy.Symbol("context_tokens")
    pairs = sympy.Symbol("query_context_pairs")
    q, cache = desc["q"], desc["kv_cache"]
    _, num_heads, head_dim = q.shape
    kv_bytes = 2 * cache.shape[3] * head_dim * cache.dtype.itemsize
    return Cost(
        bytes=2 * q.nbytes + context * kv_bytes,
        flops=4 * num_heads * head_dim * pairs,
    )


def context_symbols(
    query_lens: Sequence[int], seq_lens: Sequence[int], sliding_window: int = 0
) -> dict[str, int]:
    """Values of the symbols in this op's cost for one batch: pass to ``expr.subs``."""
    tokens = pairs = 0
    for queries, context in zip(query_lens, seq_lens, strict=True):
        if context == 0:
            continue
        reach = sliding_window if sliding_window > 0 else context
        tokens += min(context, reach + queries - 1)
        # Positions context - queries + 1 .. context see themselves and what is before, to reach.
        short = min(max(reach - (context - queries), 0), queries)
        pairs += sum(range(context - queries + 1, context - queries + short + 1))
        pairs += (queries - short) * reach
    return {"context_tokens": tokens, "query_context_pairs": pairs}


OP = SemanticOp(
    name="paged_attention",
    reference=_reference,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        Implementation(
            "triton",
            run_launches(_launches),
            _triton_supports,
            devices=("cuda",),
            launches=_launches,
        ),
        Implementation("native", _native),
    ),
    mutates=("out",),
    # Sums run in another order than the reference's, over logits of a few units.
    tolerances={**TOLERANCES, torch.float32: Tolerance(2e-5, 2e-5)},
)
