"""``paged_attention`` is causal attention over a paged KV cache, decodes and prefills mixed.

Shape suffixes: S sequences, Q queries of a sequence, K keys that they see, G KV heads, H query
heads of a KV head, N all query heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import rowwise as _rowwise
from ..core.desc import TOLERANCES, Cost, OpDesc, Tolerance
from ..core.float8 import E4M3, to_e4m3, why_no_e4m3
from ..core.launch import Launch, Launches
from ..core.op import Implementation, SemanticOp, definition, dispatched, on_cpu, triton
from ..launches import paged_attention as kernels
from ..launches.paged_attention import AttentionArgs, first_seen
from ..launches.paged_attention_plan import MAX_HEAD_DIM, most_heads_of_a_group
from .kv_store import check_kv_scale
from .paged_attention_cases import cases
from .paged_attention_cuda import by_cuda
from .seen import SeenGroup, seen_groups

# The reference holds at most this many float32 logits at once.
_MAX_LOGITS = 1 << 24


@dispatched
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
    kv_scale: Tensor | None = None,
    out_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    chunk: int = 0,
) -> None:
    """Softmax attention of each query over its sequence's cached positions up to its own.

    Paging as in PagedAttention (Kwon et al., 2023, section 4.1); soft cap as in Gemma 2 (2024,
    section 2); sinks as in StreamingLLM's zero sink (Xiao et al., 2023, section 3.3), but learned,
    and chunks as in Llama 4.  Query i of sequence s stands at position seq_lens[s] - query_len[s] +
    i.  A NaN in a query, or in a key or value that it sees, is in its result.

    Neighbours of one query each whose lengths grow by one, and who share the block of the former's
    position, are one sequence, as drafts are: the last table may be read for all, and NaN in a
    later value may be in an earlier result.  On a GPU the kernel right before may still be writing
    q and the slots of this step's queries, but nothing else of what this op reads.

    Args:
        q: [num_tokens, num_heads, head_dim]; may be strided on tokens.
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_dim], q's dtype or float8_e4m3fn;
            index 1: 0 = K, 1 = V.  Already holds this step's K and V.  Slots that no query may see
            are not used.
        block_table: [num_seqs, max_blocks] int32, the blocks of each sequence in order.
        seq_lens: [num_seqs] int32, context lengths including this step; 0 skips the sequence.
        query_start_loc: [num_seqs + 1] int32, prefix sums of query lengths.  num_tokens ==
            num_seqs promises at most one query a sequence.
        out: [num_tokens, num_heads, head_dim], contiguous; q's dtype, with ``out_scale``
            float8_e4m3fn; written.  Rows from query_start_loc[-1] on and rows of skipped sequences
            stay as they are.
        scale: multiplies q k, positive.
        sliding_window: a query sees this many positions, itself included; 0 = all.
        soft_cap: logits become cap * tanh(logits / cap); 0 = off.
        kv_scale: [2, num_kv_heads] float32: what a float8_e4m3fn cache holds times this are K and
            V; None: 1.
        out_scale: [1, 1] float32: ``out`` is result / out_scale, rounded once, at most +-448.
        sinks: [num_heads] in float32 or q's dtype: a logit of each head, neither scaled nor capped,
            that takes its share of the softmax and has no value; None: no such logit.
        chunk: a query at p sees none before floor(p / chunk) * chunk, and what a window shows.

    Raises:
        ValueError: dtypes and scales disagree, or a window or a chunk is negative.
    """
    call = AttentionArgs(
        q, kv_cache, block_table, seq_lens, query_start_loc, out, scale, sliding_window, soft_cap,
        kv_scale, out_scale, sinks, chunk
    )  # fmt: skip
    _check(call)
    kv_heads = kv_cache.shape[3]
    for group in seen_groups(call):
        k_SKGD, v_SKGD = _values(group, kv_scale)
        num_seqs, num_keys = k_SKGD.shape[:2]
        step = max(1, _MAX_LOGITS // (q.shape[1] * num_seqs * num_keys))
        for begin in range(0, group.num_queries, step):
            some = slice(begin, begin + step)
            q_SQGHD = group.take(q, some).float().unflatten(2, (kv_heads, -1))
            logits_SGHQK = torch.einsum("SQGHD,SKGD->SGHQK", q_SQGHD, k_SKGD) * scale
            if soft_cap > 0:
                logits_SGHQK = soft_cap * torch.tanh(logits_SGHQK / soft_cap)
            if group.hides:
                hidden_SQK = ~group.visible(some)
                logits_SGHQK = logits_SGHQK.masked_fill(hidden_SQK[:, None, None], float("-inf"))
            if sinks is not None:
                sinks_GHQ1 = sinks.float().view(kv_heads, -1, 1, 1)
                sinks_SGHQ1 = sinks_GHQ1.expand(*logits_SGHQK.shape[:-1], 1)
                logits_SGHQK = torch.cat((logits_SGHQK, sinks_SGHQ1), -1)
            weights_SGHQK = torch.softmax(logits_SGHQK, -1)[..., :num_keys]
            result_SQGHD = torch.einsum("SGHQK,SKGD->SQGHD", weights_SGHQK, v_SKGD)
            result = result_SQGHD.flatten(2, 3)
            result = result if out_scale is None else to_e4m3(result, out_scale)
            group.store(out, result, some)


_reference = definition(paged_attention)


def _check(call: AttentionArgs) -> None:
    """Refuse arguments that disagree: a kernel would read other numbers."""
    q, kv_cache, out, out_scale, sinks = call.q, call.kv_cache, call.out, call.out_scale, call.sinks
    if kv_cache.dtype not in (q.dtype, E4M3):
        raise ValueError(f"q is {q.dtype}, kv_cache {kv_cache.dtype}: expected the same or {E4M3}")
    check_kv_scale(kv_cache, call.kv_scale)
    expected = q.dtype if out_scale is None else E4M3
    if out.dtype != expected:
        given = "without" if out_scale is None else "with"
        raise ValueError(f"out is {out.dtype}, expected {expected} {given} an out_scale")
    if out_scale is not None and (out_scale.shape != (1, 1) or out_scale.dtype != torch.float32):
        raise ValueError(
            f"out_scale is {out_scale.dtype} {list(out_scale.shape)}, expected float32 [1, 1]"
        )
    if sinks is not None:
        dtypes = dict.fromkeys((torch.float32, q.dtype))
        if sinks.shape != q.shape[1:2] or sinks.dtype not in dtypes or not sinks.is_contiguous():
            raise ValueError(
                f"sinks is {sinks.dtype} {list(sinks.shape)}, expected "
                f"{' or '.join(map(str, dtypes))} [{q.shape[1]}]: a logit for each head"
            )
    for name, value in (("sliding_window", call.sliding_window), ("chunk", call.chunk)):
        if value < 0:
            raise ValueError(f"{name} is {value}, expected a number of positions, or 0 for all")


def _values(group: SeenGroup, kv_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """The values of the cached K and V, in float32."""
    k_SKGD, v_SKGD = group.k.float(), group.v.float()
    if kv_scale is None:
        return k_SKGD, v_SKGD
    k_scale, v_scale = kv_scale[:, :, None].unbind()
    return k_SKGD * k_scale, v_SKGD * v_scale


def _native(*args: Any) -> None:
    """PyTorch's own attention, for one group of sequences at a time; it knows neither a soft cap
    nor sinks."""
    _fake(*args)
    call = AttentionArgs(*args)
    if call.soft_cap > 0 or call.sinks is not None:
        _reference(*args)
        return
    q, kv_cache, out = call.q, call.kv_cache, call.out
    gqa = q.shape[1] != kv_cache.shape[3]
    for group in seen_groups(call):
        k_SKGD, v_SKGD, q_SNQD = group.k, group.v, group.take(q).transpose(1, 2)
        if kv_cache.dtype != q.dtype:
            # float32: K and V times their scales would be rounded once more in q's dtype.
            q_SNQD = q_SNQD.float()
            k_SKGD, v_SKGD = _values(group, call.kv_scale)
        masked = group.hides and not group.is_causal
        result_SNQD = F.scaled_dot_product_attention(
            q_SNQD,
            k_SKGD.transpose(1, 2),
            v_SKGD.transpose(1, 2),
            attn_mask=group.visible()[:, None] if masked else None,
            is_causal=group.is_causal,
            scale=call.scale,
            enable_gqa=gqa,
        )
        if result_SNQD.device.type == "cpu" and (result_SNQD[..., 0] == 0).any():
            # PyTorch's kernel gives zeros, not NaN, where all logits of a query are NaN.
            _reference(*args)
            return
        result = result_SNQD.transpose(1, 2)
        group.store(out, result if call.out_scale is None else to_e4m3(result, call.out_scale))


def _fake(*args: Any) -> None:
    _check(AttentionArgs(*args))


def _launches(*args: Any, invariant: bool = False) -> Launches[None]:
    _fake(*args)
    return kernels.paged_attention(*args, invariant=invariant)


def _prefill(*args: Any) -> list[Launch]:
    _fake(*args)
    return kernels.prefill(*args)


def _decode(*args: Any) -> list[Launch]:
    _fake(*args)
    return kernels.decode(*args)


_invariant = partial(_launches, invariant=True)


def _triton_supports(desc: OpDesc) -> str:
    _, num_heads, head_dim = desc["q"].shape
    _, _, block_size, kv_heads, _ = desc["kv_cache"].shape
    if head_dim > MAX_HEAD_DIM or head_dim % 8:
        return f"head_dim {head_dim}: the kernels take multiples of 8 up to {MAX_HEAD_DIM}"
    if block_size > 256 or block_size & (block_size - 1):
        return f"block size {block_size}: the kernels take powers of two up to 256"
    if num_heads // kv_heads > (most := most_heads_of_a_group(head_dim)):
        return (
            f"{num_heads} heads share {kv_heads} KV heads: with head_dim {head_dim} a group has at"
            f" most {most}"
        )
    if desc["kv_cache"].dtype not in (desc["q"].dtype, E4M3):
        return f"KV cache is {desc['kv_cache'].dtype}, q is {desc['q'].dtype}"
    if reason := why_no_e4m3(desc, "kv_cache", "out"):
        return reason
    if desc["scale"] <= 0:
        return f"scale {desc['scale']} is not positive"
    return ""


def _cost(desc: OpDesc) -> Cost:
    """The cost, in two symbols: ``context_tokens``, KV positions read (without a window: sum of
    seq_lens), and ``query_context_pairs``, (query, position) pairs that are not masked."""
    import sympy

    context = sympy.Symbol("context_tokens")
    pairs = sympy.Symbol("query_context_pairs")
    q, cache = desc["q"], desc["kv_cache"]
    _, num_heads, head_dim = q.shape
    kv_bytes = 2 * cache.shape[3] * head_dim * cache.dtype.itemsize
    sinks = 0 if desc["sinks"] is None else desc["sinks"].nbytes
    return Cost(
        bytes=q.nbytes + desc["out"].nbytes + context * kv_bytes + sinks,
        flops=4 * num_heads * head_dim * pairs,
    )


def context_symbols(
    query_lens: Sequence[int], seq_lens: Sequence[int], sliding_window: int = 0, chunk: int = 0
) -> dict[str, int]:
    """Values of the symbols in this op's cost for one batch: pass to ``expr.subs``."""
    tokens = pairs = 0
    for queries, context in zip(query_lens, seq_lens, strict=True):
        positions = range(context - queries, context) if context else ()
        sees = [p + 1 - first_seen(p, sliding_window, chunk) for p in positions]
        # Queries are neighbours: beyond what the first sees, each adds its own position.
        tokens += sees[0] + queries - 1 if sees else 0
        pairs += sum(sees)
    return {"context_tokens": tokens, "query_context_pairs": pairs}


OP = SemanticOp(
    reference=_reference,
    fake=_fake,
    cases=cases,
    cost=_cost,
    implementations=(
        by_cuda(_prefill, _decode, _triton_supports),
        triton(_launches, _triton_supports),
        Implementation("native", _native, on_host=True),
        triton(_invariant, _triton_supports, name="invariant", opt_in=True),
        on_cpu("rowwise", _rowwise.each_query(_reference), opt_in=True),
    ),
    mutates=("out",),
    # Sums run in another order than the reference's, over logits of a few units.  In FP8, of which
    # neighbours are 2^-3 apart, a value may round to the other one; 0.05 is bfloat16's atol over
    # the least out_scale of the cases.
    tolerances={
        **TOLERANCES,
        torch.float32: Tolerance(2e-5, 2e-5),
        E4M3: Tolerance(0.05, 0.15),
    },
)
