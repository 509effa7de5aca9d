"""csrc's experts with weights of four bits against float32: rows of one and of many entries, of
none, gates that are pairs or halves, columns that end within a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.config.weight_format import STORED_FORMATS
from fusewright.ops import BY_NAME
from fusewright.ops.core.desc import Draw
from fusewright.ops.core.gate import Gate, spelled
from fusewright.ops.experts.fused_moe import moe_args
from fusewright.ops.experts.packed import GROUPED, LINEAR, SUM
from fusewright.ops.linear.formats import dequantize, quantize
from tests.ops.csrc import csrc_kernels

CLAMPED = (1.702, 0.7, 1.0, True)
PLAIN = (1.0, None, 0.0, False)
EXPERTS, TOP_K = 6, 3


@dataclass(frozen=True)
class Held:
    weight: Tensor
    scale: Tensor
    bias: Tensor
    numbers: Tensor

    @classmethod
    def draw(cls, form: str, rows: int, columns: int) -> Held:
        stored = STORED_FORMATS[form]
        randn = torch.randn(EXPERTS, rows, columns, device="cuda") * columns**-0.5
        randn *= torch.exp2(torch.randint(-2, 3, (EXPERTS, rows, 1), device="cuda"))
        parts = [quantize(stored, one) for one in randn]
        # The kernels multiply in bfloat16: scales are such numbers here, products are rounded.
        for part in parts if form != "mxfp4" else ():
            part["weight_scale"] = part["weight_scale"].bfloat16().to(part["weight_scale"].dtype)
        held = [dequantize(stored, p["weight"], p["weight_scale"]).bfloat16() for p in parts]
        weight, scale = (torch.stack([p[n] for p in parts]) for n in ("weight", "weight_scale"))
        bias = torch.randn(EXPERTS, rows, device="cuda").bfloat16()
        return cls(weight, scale, bias, torch.stack(held).float())

    def __call__(self, x: Tensor, ids: Tensor) -> Tensor:
        """Rounded sums of each choice, of its row of x."""
        sums = torch.einsum("rk,rnk->rn", x.float(), self.numbers[ids]) + self.bias[ids].float()
        return sums.bfloat16().float()

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.weight, self.scale, self.bias


def activated(sums: Tensor, how: tuple[Any, ...]) -> Tensor:
    alpha, limit, offset, pairs = how
    gate, up = (sums[:, ::2], sums[:, 1::2]) if pairs else sums.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + offset)


def close(got: Tensor, want: Tensor) -> None:
    """Within some roundings of rows, whose sizes differ by up to 16."""
    size = want.square().mean().sqrt().item()
    torch.testing.assert_close(got.float(), want, atol=2e-2 * size, rtol=3e-2)


def sort(ids: Tensor) -> tuple[Tensor, Tensor]:
    order = ids.flatten().sort(stable=True).indices.int()
    counts = torch.bincount(ids.flatten().long(), minlength=EXPERTS)
    return order, torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


def choose(tokens: int, most: int = EXPERTS) -> Tensor:
    """Distinct experts of each token, of the first ``most``."""
    return torch.rand(tokens, most, device="cuda").argsort(-1)[:, :TOP_K].int().contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["mxfp4", "int4_g32", "int4_g64", "int4_g128"])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 40, 200])
@pytest.mark.parametrize("how", [CLAMPED, PLAIN], ids=["pairs", "halves"])
def test_both_layers_by_either_kernel(form: str, tokens: int, how: tuple[Any, ...]) -> None:
    torch.manual_seed(tokens)
    kernels, columns, inner = csrc_kernels(), 832 if form != "int4_g128" else 896, 768
    gate_up, down = Held.draw(form, 2 * inner, columns), Held.draw(form, 192, inner)
    ids = choose(tokens, EXPERTS - 1)  # the last has no rows
    of_slot, order, offsets = ids.flatten().long(), *sort(ids)
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    want_h = activated(gate_up(x.repeat_interleave(TOP_K, 0), of_slot), how)
    given = (TOP_K, form == "mxfp4")
    chosen = [(ids, None)] if tokens <= 8 else []
    for index in [*chosen, (order, offsets)]:
        h = kernels.moe_packed_linear(x, *gate_up.operands, *index, *given, "silu", *how)
        close(h, want_h)
        close(kernels.moe_packed_linear(h, *down.operands, *index, *given), down(h, of_slot))
    h = kernels.moe_packed_grouped(x, *gate_up.operands, order, offsets, *given, "silu", *how)
    close(h, want_h[order.long()])
    y = kernels.moe_packed_grouped(h, *down.operands, order, offsets, *given)
    close(y[order.long()], down(h, of_slot[order.long()]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("form", "tokens", "columns", "rows"),
    [
        ("mxfp4", 1, 1472, 192),  # two warps share a tile
        ("int4_g32", 1, 2880, 2880),
        ("mxfp4", 8, 704, 20480),  # tiles follow each other in a ring that is as long as one
        ("mxfp4", 1340, 2880, 16),  # rows of x that a block does not hold at once
    ],
)
def test_a_layer_of_many_tiles_of_few_or_long_rows(
    form: str, tokens: int, columns: int, rows: int
) -> None:
    torch.manual_seed(rows)
    kernels, held, ids = csrc_kernels(), Held.draw(form, rows, columns), choose(tokens)
    x = torch.randn(tokens * TOP_K, columns, device="cuda").bfloat16()
    index = (ids, None) if tokens <= 8 else sort(ids)
    call = (x, *held.operands, *index, TOP_K, form == "mxfp4")
    got = kernels.moe_packed_linear(*call)
    close(got, held(x, ids.flatten().long()))
    assert torch.equal(got, kernels.moe_packed_linear(*call))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_the_norms_scale_is_applied_to_sums_and_the_sum_leaves_the_next(tokens: int) -> None:
    torch.manual_seed(tokens)
    kernels, hidden = csrc_kernels(), 704
    gate_up, ids = Held.draw("mxfp4", 256, hidden), choose(tokens)
    x = (3 * torch.randn(tokens, hidden, device="cuda")).bfloat16()
    squares = x.float().square().unflatten(1, (-1, 16)).sum(2)
    h = kernels.moe_packed_linear(
        *(x, *gate_up.operands, ids, None, TOP_K, True, "silu", *CLAMPED), squares, 1e-5
    )
    normed = x.float() * torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-5)
    of_slot = ids.flatten().long()
    close(h, activated(gate_up(normed.repeat_interleave(TOP_K, 0), of_slot), CLAMPED))
    y = torch.randn(tokens * TOP_K, hidden, device="cuda").bfloat16()
    weights = torch.rand(tokens, TOP_K, device="cuda")
    residual, shared = (torch.randn(tokens, hidden, device="cuda").bfloat16() for _ in "ab")
    norm = torch.rand(hidden, device="cuda").bfloat16()
    total, weighted, sums = kernels.moe_sum_norm(y, weights, norm, residual, shared)
    want = (y.float().unflatten(0, (-1, TOP_K)) * weights[..., None]).sum(1).bfloat16()
    want = want + shared + residual
    close(total, want.float())
    assert torch.equal(weighted, total * norm)
    torch.testing.assert_close(sums, total.float().square().unflatten(1, (-1, 8)).sum(2))


@pytest.mark.gpu
def test_replays_follow_the_choice() -> None:
    """A graph serves any routing, however many rows an expert has."""
    torch.manual_seed(0)
    kernels, down = csrc_kernels(), Held.draw("mxfp4", 64, 768)
    x, ids = torch.randn(40 * TOP_K, 768, device="cuda").bfloat16(), choose(40)
    order, offsets = sort(ids)

    def run() -> list[Tensor]:
        given = (x, *down.operands, order, offsets, TOP_K, True)
        return [kernels.moe_packed_linear(*given), kernels.moe_packed_grouped(*given)]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    ids.zero_()
    ids += torch.arange(TOP_K, dtype=torch.int32, device="cuda")
    for held, now in zip((order, offsets), sort(ids), strict=True):
        held.copy_(now)
    graph.replay()
    for got, want in zip(captured, run(), strict=True):
        assert torch.equal(got, want)
    close(captured[0], down(x, ids.flatten().long()))


@pytest.mark.gpu
def test_what_the_kernels_cannot_read_is_refused() -> None:
    kernels, held, ids = csrc_kernels(), Held.draw("mxfp4", 128, 768), choose(2)
    x = torch.randn(2, 768, device="cuda").bfloat16()
    with pytest.raises(RuntimeError, match=r"weight_scale has shape .*groups\] of float16"):
        kernels.moe_packed_linear(x, *held.operands, ids, None, TOP_K, False)
    with pytest.raises(RuntimeError, match=r"columns a multiple of 64"):
        kernels.moe_packed_linear(x[:, :128], *held.operands, ids, None, TOP_K, True)
    small = Held.draw("mxfp4", 128, 640)
    with pytest.raises(RuntimeError, match=r"704 columns or more"):
        kernels.moe_packed_linear(x[:, :640], *small.operands, ids, None, TOP_K, True)
    with pytest.raises(RuntimeError, match=r"8 or fewer tokens"):
        many = choose(9)
        kernels.moe_packed_linear(x[:1].repeat(9, 1), *held.operands, many, None, TOP_K, True)


@pytest.mark.parametrize(
    ("tokens", "inner", "given", "ops"),
    [
        (8, 768, {}, ("moe_route", LINEAR, LINEAR, "_combine_experts_kernel")),
        (40, 768, {}, ("moe_route", "_sort_by_expert_kernel", LINEAR, LINEAR)),
        (300, 768, {}, ("_route_kernel", "_sort_by_expert_kernel", GROUPED, GROUPED)),
        (300, 128, {}, ("_route_kernel", "_sort_by_expert_kernel", GROUPED, GROUPED)),
        (8, 640, {}, ("moe_route", "_expert_linear_kernel", "_expert_linear_kernel")),
        (8, 768, {"weight_format": "int4_zero_g32"}, ("moe_route", "_expert_linear_kernel")),
        (300, 16448, {}, ("_route_kernel", "_sort_by_expert_kernel", "_expert_linear_kernel")),
    ],
)
def test_the_kernels_follow_format_and_rows(
    tokens: int, inner: int, given: dict[str, Any], ops: tuple[str, ...]
) -> None:
    draw = Draw(torch.bfloat16, torch.device("cpu"), torch.Generator())
    how = {"biases": True, "activation": spelled("silu", Gate(*CLAMPED)), **given}
    args = moe_args(draw, tokens, 4, 2, 704, inner, **{"weight_format": "mxfp4", **how})
    args = tuple(t.to("meta") if isinstance(t, Tensor) else t for t in args)
    runs = BY_NAME["fused_moe"].implementation("cuda").runs
    assert runs is not None
    names = [name for name in runs(*args) if name != "cuBLAS"]
    assert tuple(names[: len(ops)]) == ops
    assert SUM not in names  # which belongs to a norm
