"""``fuse_rope_store`` joins [QK-norm +] rotary embedding and the KV store in one kernel.

Before: ``[q = rms_norm(q, wq, eps); k = rms_norm(k, wk, eps);] q, k = rotary_embedding(p, q, k, t);
kv_store(k, v, cache, slots)``, in any layout and with any offset of the norms' weights.  After:
``q = rope_kv_store(p, q, k, v, t, cache, slots, ...)``.  This saves a write and a read of k, with
norms also of q and k, and one launch or three.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .raising.fold_views import reordered
from .rule import EXACT, is_call, writes
from .sites import Match, Miss, SitePass, call
from .subgraph import fake_value


def _read(rotary: fx.Node) -> Match | None:
    """Expected sites: every ``rotary_embedding``.  If one of its inputs is normed, the other must
    be too, and the norms are part of the site.

    Exact: rotated and normed heads are rounded to the tensors' dtype as without fusion.  A kernel
    may sum the squares of a norm in another order than the kernel it replaces.
    """
    if not is_call(rotary, torch.ops.fw.rotary_embedding.default):
        return None
    norms = [x for x in rotary.args[1:3] if is_call(x, torch.ops.fw.rms_norm.default)]
    store, reason = _store(rotary)
    if reason := reason or _why_no_norms(norms) or _why_not_at(store, rotary, norms):
        raise Miss(reason)
    rotated = list(rotary.users)
    (q,) = (item for item in rotated if item.args[1] == 0)
    fused = call(torch.ops.fw.rope_kv_store.default, _arguments(rotary, store, norms))
    (k,) = (item for item in rotated if item is not q)
    return Match(store, [*norms, rotary, *rotated, *_moves(k), store], [q], fused)


def _why_no_norms(norms: list[fx.Node]) -> str:
    if len(norms) == 1:
        return f"of q and k, only one is normed, by {norms[0].name}"
    for norm in norms:
        if len(norm.users) > 1:
            return f"{norm.name} has {len(norm.users)} users, not the rotary embedding alone"
    for what, index in (("eps", 2), ("an offset of the weight of", 3)):
        of_q, of_k = ([*norm.args, None][index] for norm in norms) if norms else (None, None)
        if of_q != of_k:
            return f"q is normed with {what} {of_q}, k with {of_k}"
    return ""


def _store(rotary: fx.Node) -> tuple[Any, str]:
    """(the store of the rotated keys, "") if nothing else reads them, else (None, the reason)."""
    items: dict[Any, fx.Node] = {}
    for user in rotary.users:
        if not is_call(user, operator.getitem):
            return None, f"the rotated pair is read whole, by {user.name}"
        items[user.args[1]] = user
    if len(rotary.users) != 2 or set(items) != {0, 1}:
        return None, f"the rotated q and k are taken {len(rotary.users)} times, not once each"
    k = [items[1], *_moves(items[1])][-1]
    stores = [u for u in k.users if is_call(u, torch.ops.fw.kv_store.default)]
    others = [u for u in k.users if u not in stores[:1]]
    if not stores:
        read = f", but read by {others[0].name}" if others else ""
        return None, f"the rotated k is not stored{read}"
    if others:
        return None, f"the rotated k is also read by {others[0].name}"
    store = stores[0]
    if store.args[0] is not k or store.args[1] is k:
        return None, "the rotated k is stored as values"
    early = [u for u in items[0].users if not store < u]
    if early:
        return None, f"the rotated q is read before the store is done, by {early[0].name}"
    return store, ""


def _moves(k: fx.Node) -> list[fx.Node]:
    """The transpositions and copies that lead from the rotated keys to themselves, which nothing
    else reads; a model makes some where it joins rotated columns with others."""
    path: list[fx.Node] = []
    kept, node = 0, k
    while len(node.users) == 1:
        (node,) = node.users
        path.append(node)
        order: list[int] | None = list(range(fake_value(k).dim()))
        for moved in reversed(path):
            order = order and reordered(moved, order)
        if order is None:
            break
        kept = len(path) if order == sorted(order) else kept
    return path[:kept]


def _why_not_at(store: fx.Node, rotary: fx.Node, norms: list[fx.Node]) -> str:
    """Why not to fuse at the store, where the fused op runs: its inputs may change before that."""
    node = min([rotary, *norms]).next
    while node is not store:
        if writes(node):
            return f"{node.name} writes to memory between the rotary embedding and the store"
        node = node.next
    return ""


def _arguments(rotary: fx.Node, store: fx.Node, norms: list[fx.Node]) -> tuple[Any, ...]:
    positions, q, k, table, layout = (*rotary.args, "halves")[:5]
    _, v, kv_cache, slots, kv_scale = (*store.args, None)[:5]
    weights: list[Any] = [None, None, 0.0]
    offset: Any = None
    if norms:
        (q, q_weight, eps, offset), (k, k_weight, *_) = ((*norm.args, None)[:4] for norm in norms)
        weights = [q_weight, k_weight, eps]
    return (positions, q, k, v, table, kv_cache, slots, *weights, kv_scale, layout, offset)


FUSE_ROPE_STORE = SitePass("fuse_rope_store", EXACT, _read)
