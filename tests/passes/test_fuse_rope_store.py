"""Rotary embedding and KV store become one op, with QK-norms where there are; wherever that is the
same computation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fusewright import ops
from fusewright.compiler.lowering.lower import lower
from fusewright.config import LEVELS
from fusewright.ops import BY_NAME
from fusewright.passes import PassReport, VerificationError, build_passes, run_passes
from fusewright.passes.fuse_rope_store import FUSE_ROPE_STORE
from fusewright.passes.rule import Context, Tier
from fusewright.passes.sites import SitePass
from tests.compiler.test_unroll import SPEC, traced
from tests.passes.graphs import capture, targets

HEADS, KV_HEADS, DIM, BLOCK, TOKENS = 4, 2, 16, 8, 7
EPS = 1e-6


def inputs(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """In the order in which the models here first read them."""
    slots = torch.randperm(3 * BLOCK)[:TOKENS]
    slots[2] = -1
    return {
        "qkv": torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * DIM).to(dtype),
        "q_weight": torch.randn(DIM).to(dtype),
        "k_weight": torch.randn(DIM).to(dtype),
        "positions": torch.randint(0, 50, (TOKENS,)).int(),
        "table": torch.randn(50, DIM),
        "kv_cache": torch.randn(3, 2, BLOCK, KV_HEADS, DIM).to(dtype),
        "slots": slots.int(),
    }


def heads(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sizes = [n * DIM for n in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (part.view(-1, part.shape[1] // DIM, DIM) for part in qkv.split(sizes, dim=-1))
    return q, k, v


def normed(t: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    q, k, _ = heads(t["qkv"])
    return ops.rms_norm(q, t["q_weight"], EPS), ops.rms_norm(k, t["k_weight"], EPS)


def rotated(t: dict[str, Tensor], q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return ops.rotary_embedding(t["positions"], q, k, t["table"])


def store(t: dict[str, Tensor], k: Tensor, v: Tensor) -> None:
    ops.kv_store(k, v, t["kv_cache"], t["slots"], t.get("kv_scale"))


def rope(**t: Tensor) -> Tensor:
    q, k, v = heads(t["qkv"])
    q, k = rotated(t, q, k)
    store(t, k, v)
    return q


def norm_rope(**t: Tensor) -> Tensor:
    q, k = rotated(t, *normed(t))
    store(t, k, heads(t["qkv"])[2])
    return q


def pairs(**t: Tensor) -> Tensor:
    q, k, v = heads(t["qkv"])
    q, k = ops.rotary_embedding(t["positions"], q, k, t["table"], "pairs")
    store(t, k, v)
    return q


def copied(**t: Tensor) -> Tensor:
    """Of keys that are copied by head, as Phi's, which joins rotated columns with others."""
    q, k, v = heads(t["qkv"])
    q, k = rotated(t, q, k)
    store(t, k.transpose(0, 1).contiguous().transpose(0, 1), v)
    return q


def offset_norm_pairs(**t: Tensor) -> Tensor:
    """Of norms by 1 + weight, as Gemma's."""
    q, k, v = heads(t["qkv"])
    q, k = (ops.rms_norm(x, t[f"{n}_weight"], EPS, 1.0) for n, x in (("q", q), ("k", k)))
    q, k = ops.rotary_embedding(t["positions"], q, k, t["table"], "pairs_to_halves")
    store(t, k, v)
    return q


def run(gm: fx.GraphModule, given: dict[str, Tensor]) -> Any:
    """Call a captured graph on inputs of the sizes that it was captured with."""
    values = iter(given.values())
    fakes = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    return gm(*(f.node.hint if isinstance(f, torch.SymInt) else next(values) for f in fakes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", [rope, norm_rope, pairs, copied, offset_norm_pairs])
def test_it_becomes_one_op_and_no_bit_changes(
    fn: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    given = inputs(dtype)
    if fn in (rope, pairs, copied):
        del given["q_weight"], given["k_weight"]
    gm = capture(fn, **given)
    (report,) = run_passes(gm, build_passes(["fuse_rope_store"]), verify=True)
    assert report.matched == 1 and not report.missed
    ours = [t for t in targets(gm) if t.split(".")[0] in BY_NAME]
    assert ours == ["rope_kv_store.default"]
    left, right = ({k: v.clone() for k, v in given.items()} for _ in range(2))
    (got,) = run(gm, left)
    assert torch.equal(got, fn(**right))
    assert torch.equal(left["kv_cache"], right["kv_cache"])
    assert not torch.equal(left["kv_cache"], given["kv_cache"])


def _rope_fp8(**t: Tensor) -> Tensor:
    scale = t["table"][0, : 2 * KV_HEADS].view(2, KV_HEADS).abs() + 0.01
    return rope(**t | {"kv_scale": scale})


def test_scales_of_an_fp8_cache_pass_through() -> None:
    given = inputs(torch.bfloat16)
    del given["q_weight"], given["k_weight"]
    given = {"table": given.pop("table"), **given}
    given["kv_cache"] = given["kv_cache"].to(torch.float8_e4m3fn)
    gm = capture(_rope_fp8, **given)
    (report,) = run_passes(gm, build_passes(["fuse_rope_store"]), verify=True)
    assert report.matched == 1
    left, right, plain = ({k: v.clone() for k, v in given.items()} for _ in range(3))
    (got,) = run(gm, left)
    assert torch.equal(got, _rope_fp8(**right))
    rope(**plain)
    assert torch.equal(left["kv_cache"].float(), right["kv_cache"].float())
    assert not torch.equal(left["kv_cache"].float(), plain["kv_cache"].float())


def test_layers_in_a_row_all_fuse() -> None:
    def model(qkv: Tensor, **t: Tensor) -> Tensor:
        for _ in range(3):
            qkv = qkv + rope(qkv=qkv, **t).flatten(1).repeat(1, 2)
        return qkv

    gm = capture(model, **inputs())
    (report,) = run_passes(gm, build_passes(["fuse_rope_store"]), verify=True)
    assert report.matched == 3 and not report.missed
    assert targets(gm).count("rope_kv_store.default") == 3


def _not_stored(**t: Tensor) -> Tensor:
    q, k, _ = heads(t["qkv"])
    q, k = rotated(t, q, k)
    return q + k.repeat(1, 2, 1)


Heads = Callable[[Tensor, Tensor, Tensor], Any]


def _with(
    rotates: Heads = lambda q, k, v: (q, k),
    stores: Heads = lambda q, k, v: (k, v),
    returns: Heads = lambda q, k, v: q,
) -> Callable[..., Tensor]:
    """``rope``, but for the heads that it rotates, stores or returns."""

    def changed(**t: Tensor) -> Any:
        q, k, v = heads(t["qkv"])
        q, k = rotated(t, *rotates(q, k, v))
        store(t, *stores(q, k, v))
        return returns(q, k, v)

    return changed


_read_too = _with(returns=lambda q, k, v: q + k.repeat(1, 2, 1))
_as_values = _with(stores=lambda q, k, v: (v, k))
_as_both = _with(stores=lambda q, k, v: (k, k))
_q_unused = _with(returns=lambda q, k, v: v)
_q_in_the_values = _with(stores=lambda q, k, v: (k, q[:, :KV_HEADS]))
_q_as_values = _with(rotates=lambda q, k, v: (v, k), stores=lambda q, k, v: (k, q))


def _stored_twice(**t: Tensor) -> Tensor:
    q, k, v = heads(t["qkv"])
    q, k = rotated(t, q, k)
    store(t, k, v)
    store(t, k, v)
    return q


def _written_between(**t: Tensor) -> Tensor:
    q, k, v = heads(t["qkv"])
    q, k = rotated(t, q, k)
    ops.kv_store(v, v, t["kv_cache"], t["positions"])
    store(t, k, v)
    return q


def _one_norm(**t: Tensor) -> Tensor:
    _, k, v = heads(t["qkv"])
    q, k = rotated(t, normed(t)[0], k)
    store(t, k, v)
    return q


def _two_eps(**t: Tensor) -> Tensor:
    _, k, v = heads(t["qkv"])
    q, k = rotated(t, normed(t)[0], ops.rms_norm(k, t["k_weight"], 1e-5))
    store(t, k, v)
    return q


def _two_offsets(**t: Tensor) -> Tensor:
    _, k, v = heads(t["qkv"])
    q, k = rotated(t, normed(t)[0], ops.rms_norm(k, t["k_weight"], EPS, 1.0))
    store(t, k, v)
    return q


def _norm_read_too(**t: Tensor) -> Tensor:
    q, k = normed(t)
    rotated_q, k = rotated(t, q, k)
    store(t, k, heads(t["qkv"])[2])
    return rotated_q + q


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (_not_stored, "the rotated k is not stored, but read by repeat"),
        (_read_too, "the rotated k is also read by repeat"),
        (_stored_twice, "the rotated k is also read by kv_store"),
        (_as_both, "the rotated k is stored as values"),
        (_as_values, "the rotated k is stored as values"),
        (_q_unused, "the rotated q and k are taken 1 times, not once each"),
        (_q_in_the_values, "the rotated q is read before the store is done, by rotary_embedding"),
        (_q_as_values, "the rotated q is read before the store is done, by kv_store"),
        (
            _written_between,
            "kv_store writes to memory between the rotary embedding and the store",
        ),
        (_one_norm, "of q and k, only one is normed, by rms_norm"),
        (_two_eps, "q is normed with eps 1e-06, k with 1e-05"),
        (_two_offsets, "q is normed with an offset of the weight of None, k with 1.0"),
        (_norm_read_too, "rms_norm has 2 users, not the rotary embedding alone"),
    ],
)
def test_what_cannot_be_fused_is_left_and_explained(fn: Callable[..., Tensor], reason: str) -> None:
    gm = capture(fn, **inputs())
    run_passes(gm, build_passes(["cleanup"]))
    before = targets(gm)
    (report,) = run_passes(gm, build_passes(["fuse_rope_store"]), verify=True)
    assert report.matched == 0
    (site,) = report.missed
    assert site.reason.startswith(reason)
    assert targets(gm) == before


class Wrong(SitePass):
    """The rule, but for one change of the fused op's arguments."""

    def __init__(self, change: Callable[[fx.Graph, list[Any]], None]) -> None:
        super().__init__(FUSE_ROPE_STORE.name, Tier(1e-3, 1e-2), FUSE_ROPE_STORE.read)
        self.change = change

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        return super().__call__(gm, _Changes(self.change, keep_rewrites=True, into=context))


class _Changes(Context):
    def __init__(self, change: Any, *, keep_rewrites: bool, into: Context) -> None:
        super().__init__(keep_rewrites, into.rewrites)
        self.change = change

    def replace(
        self, rule: Any, site: Any, old: Any, outputs: Any, build: Any, tier: Any = None
    ) -> None:
        def wrong(graph: fx.Graph) -> list[fx.Node]:
            (fused,) = build(graph)
            with graph.inserting_before(fused):
                args = list(fused.args)
                self.change(graph, args)
                fused.args = tuple(args)
            return [fused]

        super().replace(rule, site, old, outputs, wrong, tier)


Q, K, V, CACHE, SLOTS, Q_WEIGHT, K_WEIGHT, EPSILON = 1, 2, 3, 5, 6, 7, 8, 9


def _swap(i: int, j: int) -> Callable[[fx.Graph, list[Any]], None]:
    def change(graph: fx.Graph, args: list[Any]) -> None:
        args[i], args[j] = args[j], args[i]

    return change


def _put(i: int, value: Any) -> Callable[[fx.Graph, list[Any]], None]:
    def change(graph: fx.Graph, args: list[Any]) -> None:
        args[i] = value

    return change


def _apply(i: int, method: str, *rest: Any) -> Callable[[fx.Graph, list[Any]], None]:
    def change(graph: fx.Graph, args: list[Any]) -> None:
        args[i] = graph.call_method(method, (args[i], *rest))

    return change


def _no_norm(graph: fx.Graph, args: list[Any]) -> None:
    args[Q_WEIGHT:] = [None, None, 0.0]


WRONG: dict[str, Callable[[fx.Graph, list[Any]], None]] = {
    "keys and values swapped": _swap(K, V),
    "slots as positions": _swap(0, SLOTS),
    "weights swapped": _swap(Q_WEIGHT, K_WEIGHT),
    "norms dropped": _no_norm,
    "another eps": _put(EPSILON, 1e-1),
    "stored into a copy": _apply(CACHE, "clone"),
    "padding stored": _apply(SLOTS, "clamp", 0),
    "slots off by one": _apply(SLOTS, "add", 1),
    "nothing stored": _apply(SLOTS, "clamp", -1, -1),
    "positions off by one": _apply(0, "add", 1),
    "q negated": _apply(Q, "neg"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_rewrites_are_caught(wrong: str, dtype: torch.dtype) -> None:
    gm = capture(norm_rope, **inputs(dtype))
    with pytest.raises(VerificationError, match=r"rewrite fuse_rope_store at .* inputs from seed"):
        run_passes(gm, [Wrong(WRONG[wrong])], verify=True)


def test_the_right_rewrite_passes_the_same_check() -> None:
    gm = capture(norm_rope, **inputs())
    (report,) = run_passes(gm, [Wrong(lambda graph, args: None)], verify=True)
    assert report.matched == 1


def test_every_rotary_embedding_is_a_site() -> None:
    gm = capture(lambda **t: rope(**t) + _not_stored(**t), **inputs())
    target = torch.ops.fw.rotary_embedding.default
    names = [n.name for n in gm.graph.find_nodes(op="call_function", target=target)]
    (report,) = run_passes(gm, build_passes(["fuse_rope_store"]), verify=True)
    assert [site.name for site in report.sites] == names and len(names) == 2
    assert [site.matched for site in report.sites] == [True, False]


@pytest.mark.parametrize("qk_norm", [False, True], ids=["llama", "qwen3"])
def test_a_layer_is_three_calls_on_a_gpu(qk_norm: bool) -> None:
    """Six launches with few rows: the first has four.  Counted in the graph that is lowered
    for a GPU; it need not be here."""
    spec = replace(SPEC, num_layers=2, sliding_windows=(0, 0), qk_norm=qk_norm)
    gm = traced(spec, "cuda").gm
    run_passes(gm, build_passes(LEVELS[2].passes))
    lower(gm, hand_kernels=True, kernels={}, sm=90)
    calls = [name.removesuffix(".default") for name in targets(gm) if name in LOWERED]
    first, second = (i for i, name in enumerate(calls) if name == "paged_attention")
    assert calls[first + 1 : second + 1] == [
        "chain",
        "rope_kv_store",
        "paged_attention",
    ]


LOWERED = {f"{op.name}.default" for op in ops.ALL_OPS}
