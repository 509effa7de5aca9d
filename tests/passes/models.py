"""Small models, one or more for every pass, captured once and run on inputs of their own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fusewright import ops
from fusewright.passes import build_passes, run_passes
from fusewright.passes.ranks import RankInterpreter, group_names, run_ranks
from tests.passes import experts
from tests.passes.graphs import capture, hidden

SIZE, HEADS, KV_HEADS, DIM, BLOCK, TOKENS = 128, 4, 2, 16, 8, 5
GROUP, OTHER_GROUP = "tp", "dp"


def two_norms(x: Tensor, r: Tensor, w: Tensor, w2: Tensor) -> Any:
    r1 = r + x
    y1 = ops.rms_norm(r1, w, 1e-5)
    r2 = r1 + y1
    return ops.rms_norm(r2, w2, 1e-6), r2


def norm_static(x: Tensor, r: Tensor, w: Tensor, w2: Tensor, s: Tensor) -> Any:
    first, second = s[:1].view(1, 1), s[1:2].view(1, 1)
    r1 = r + x
    q1 = ops.quant_fp8_static(ops.rms_norm(r1, w, 1e-5), first)
    r2 = r1 * 2 + x
    q2 = ops.quant_fp8_static(ops.rms_norm(r2, w2, 1e-6), second)
    return q1, q2, r2


def norm_group(x: Tensor, r: Tensor, w: Tensor) -> Any:
    total = r + x
    return *ops.quant_fp8_dynamic(ops.rms_norm(total, w, 1e-5), 128), total * 2


def silu_gate(x: Tensor) -> Any:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def gated(x: Tensor, w: Tensor) -> Any:
    return ops.silu_mul(ops.linear(x, w.view(SIZE, SIZE), None))


def gated_fp8(x: Tensor, w: Tensor, s: Tensor) -> Any:
    x_scale, w_scale, scale = (s[i : i + 1].view(1, 1) for i in range(3))
    q, weight = ops.quant_fp8_static(x, x_scale), (w * 8).to(torch.float8_e4m3fn).view(SIZE, SIZE)
    y = ops.silu_mul(ops.linear(q, weight, None, x_scale, w_scale, torch.bfloat16))
    return ops.quant_fp8_static(y, scale)


def between_linears(x: Tensor, r: Tensor, w: Tensor, wn: Tensor, w2: Tensor) -> Any:
    w = w.view(SIZE, SIZE)
    total = r + ops.linear(x, w, None)
    y = ops.silu_mul(ops.linear(ops.rms_norm(total, wn, 1e-5), w, None))
    total = total + ops.linear(torch.cat((y, y), -1), w, None)
    return ops.linear(ops.rms_norm(total, w2, 1e-6), w, w2), total


def fp8_layers(x: Tensor, r: Tensor, w: Tensor, wn: Tensor, w2: Tensor) -> Any:
    """Two decoder layers without attention; each weight of the second is another."""
    w = w.view(SIZE, SIZE)
    for _ in range(2):
        layers = [(w.roll(n, 0) * 8).to(torch.float8_e4m3fn) for n in range(4)]
        scales = [(w[:, n : n + 1].abs().float() + 0.5) / 8 for n in range(4)]
        half = layers[2][:, : SIZE // 2].contiguous()

        def layer(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
            q, x_scale = ops.quant_fp8_dynamic(x, 0)
            return ops.linear(q, weight, bias, x_scale, scale, torch.bfloat16)

        r = r + layer(x, layers[0], scales[0])
        y = ops.silu_mul(layer(ops.rms_norm(r, wn, 1e-5), layers[1], scales[1]))
        r = r + layer(y, half, scales[2])
        x = layer(ops.rms_norm(r, w2, 1e-6), layers[3], scales[3], w2)
        w = w.flip(0)
    return x, r


def act_static(x: Tensor, s: Tensor) -> Any:
    scale = s[:1].view(1, 1)
    return ops.quant_fp8_static(ops.silu_mul(x), scale)


def act_group(x: Tensor) -> Any:
    return ops.quant_fp8_dynamic(ops.silu_mul(torch.cat((x, x, x, x), -1)), 128)


def attention(
    q: Tensor, kv: Tensor, table: Tensor, lens: Tensor, starts: Tensor, s: Tensor, sinks: Tensor
) -> Any:
    out = torch.empty_like(q)
    kv_scale, scale = s.view(2, KV_HEADS), s[1:2].view(1, 1)
    options = DIM**-0.5, 6, 5.0, kv_scale, None, sinks, 10
    ops.paged_attention(q, kv, table, lens, starts, out, *options)
    return ops.quant_fp8_static(out.view(-1, HEADS * DIM), scale)


def rope_store(
    q: Tensor, k: Tensor, v: Tensor, wq: Tensor, wk: Tensor, positions: Tensor, table: Tensor,
    kv: Tensor, slots: Tensor, s: Tensor,
) -> Any:  # fmt: skip
    q, k = ops.rms_norm(q, wq, 1e-6), ops.rms_norm(k, wk, 1e-6)
    q, k = ops.rotary_embedding(positions, q, k, table)
    ops.kv_store(k, v, kv, slots, s.view(2, KV_HEADS))
    return q, kv.float() + 1


def reduced_add_norm(x: Tensor, r: Tensor, w: Tensor) -> Any:
    total = r + ops.all_reduce(x, GROUP)
    return ops.rms_norm(total, w, 1e-5), total


def reduced_norm(x: Tensor, w: Tensor) -> Any:
    total = ops.all_reduce(x, GROUP)
    return ops.rms_norm(total, w, 1e-5), total * 2


def reduced_between_linears(x: Tensor, r: Tensor, w: Tensor, wn: Tensor, w2: Tensor) -> Any:
    w = w.view(SIZE, SIZE)
    total = r + ops.all_reduce(ops.linear(x, w, None), GROUP)
    return ops.linear(ops.rms_norm(total, wn, 1e-5), w, w2), total


def reduced_static(x: Tensor, r: Tensor, w: Tensor, s: Tensor) -> Any:
    scale = s[:1].view(1, 1)
    total = r + ops.all_reduce(x, GROUP)
    return ops.quant_fp8_static(ops.rms_norm(total, w, 1e-5), scale), total


def stores(k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> Any:
    unchanged = k.view(k.shape)
    ops.kv_store(unchanged, v, kv, slots)
    ops.kv_store(v, unchanged, kv, slots)
    copied = v.to(torch.bfloat16, copy=True)
    copied.add_(1)
    return v + copied, k.float() / 3, v.transpose(1, 2).contiguous().view(-1, KV_HEADS * DIM)


def _inputs() -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(7)

    def randn(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=gen)
        if len(shape) > 1:
            made[1] *= 2.0**-10  # so small that a norm's eps decides
        return made.bfloat16()

    heads = {"q": randn(TOKENS, HEADS, DIM), "k": randn(TOKENS, KV_HEADS, DIM)}
    return heads | {
        "x": randn(TOKENS, SIZE),
        "r": randn(TOKENS, SIZE),
        "w": randn(SIZE),
        "w2": randn(SIZE),
        "s": torch.tensor([0.5, 0.02, 0.25, 2.0]),
        "v": randn(TOKENS, KV_HEADS, DIM),
        "wq": randn(DIM),
        "wk": randn(DIM),
        "positions": torch.randperm(TOKENS, generator=gen).int() + 1,
        "table": torch.randn(50, DIM, generator=gen),
        "kv": torch.randn(3, 2, BLOCK, KV_HEADS, DIM, generator=gen).to(torch.float8_e4m3fn),
        "slots": torch.tensor([3, -1, 20, 9, 5]).int(),
        "lens": torch.tensor([9, 1, 24, 17, 8]).int(),
        "wn": randn(SIZE),
        "starts": torch.arange(TOKENS + 1).int(),
        "sinks": randn(HEADS),
    }


def _given(model: Callable[..., Any]) -> dict[str, Tensor]:
    if model in (experts.shared, experts.between_linears):
        return dict(zip(("x", "flat"), experts.inputs(), strict=True))
    names = list(model.__annotations__)[:-1]
    given = {name: value for name, value in _inputs().items() if name in names}
    if model is attention:
        given["table"] = torch.randint(0, 3, (TOKENS, 3)).int()
    if model in (gated, gated_fp8, between_linears, reduced_between_linears, fp8_layers):
        given["w"] = hidden(dtype=torch.bfloat16, size=SIZE, tokens=SIZE).flatten()
    if model is stores:
        given["kv"] = given["kv"].to(torch.bfloat16)
    return {name: given[name] for name in names}


@cache
def _captured(model: Callable[..., Any]) -> tuple[fx.GraphModule, dict[str, Tensor]]:
    torch.manual_seed(0)
    given = _given(model)
    return capture(model, **given), given


def graph_of(model: Callable[..., Any], passes: tuple[str, ...] = ()) -> fx.GraphModule:
    """A graph that may be changed, behind these passes."""
    source = _rewritten(model, passes) if passes else _captured(model)[0]
    graph = fx.Graph()
    graph.output(graph.graph_copy(source.graph, {}))
    return fx.GraphModule(torch.nn.Module(), graph)


@cache
def _rewritten(model: Callable[..., Any], passes: tuple[str, ...]) -> fx.GraphModule:
    gm = graph_of(model)
    run_passes(gm, build_passes(passes))
    return gm


def run(gm: fx.GraphModule, model: Callable[..., Any]) -> list[Tensor]:
    """Results, then the inputs, which may have been written to; of every rank, if several."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is not written
    try:
        names = sorted({GROUP, OTHER_GROUP}) if group_names([gm.graph]) else []
        ranks = run_ranks(names, lambda rank, groups: _run(gm, model, rank, groups))
    finally:
        torch.use_deterministic_algorithms(False)
    return [value for of_rank in ranks for value in of_rank]


def _run(
    gm: fx.GraphModule, model: Callable[..., Any], rank: int, groups: Mapping[str, str]
) -> list[Tensor]:
    given = [value.clone() for value in _captured(model)[1].values()]
    for value in given:
        if rank and value.dtype == torch.bfloat16:
            value *= 1 + rank
    values: list[Any] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        found = re.fullmatch(r"l_args_(\d+)_", node.name.lower())
        fake = node.meta["example_value"]
        values.append(given[int(found[1])] if found else fake.node.hint)
    with torch.no_grad():
        return [*RankInterpreter(gm.graph, groups).run(*values), *given]


def outcome(gm: fx.GraphModule, model: Callable[..., Any]) -> Any:
    """Results as bytes, or that it does not run."""
    try:
        return [
            (t.dtype, t.shape, t.contiguous().view(torch.uint8).tolist()) for t in run(gm, model)
        ]
    except (RuntimeError, ValueError, TypeError):
        return "does not run"
