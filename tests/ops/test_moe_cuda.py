"""csrc's mixture-of-experts kernels against float64: the choice of experts, gate_up, down.

Router logits are sums of small multiples of a power of two, exact in float32: ties are real ties,
and the choice is compared to the last id.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.ops import BY_NAME
from fusewright.ops.core.desc import Draw
from fusewright.ops.core.float8 import E4M3
from fusewright.ops.experts.csrc import STREAMED
from fusewright.ops.experts.fused_moe import moe_args
from tests.ops.csrc import csrc_kernels
from tests.ops.replays import check_replays

TOKENS = (1, 2, 3, 5, 8)
EPS = 1e-6


@pytest.fixture
def kernels() -> Any:
    return csrc_kernels()


def draw_exact(rows: int, columns: int) -> Tensor:
    """Few distinct values, so that sums of products are exact and often equal."""
    return (torch.randint(-2, 3, (rows, columns), device="cuda") / 8).bfloat16()


def by_falling_choice(choice: Tensor) -> Tensor:
    """Experts of each token, the best first, of equals the lowest first."""
    return torch.sort(choice, dim=-1, descending=True, stable=True).indices


def route_in_float64(
    logits: Tensor,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scaling: float,
    bias: Tensor | None,
    num_groups: int,
    topk_groups: int,
) -> tuple[Tensor, Tensor]:
    softmax = scoring == "softmax"
    scores = logits.softmax(-1) if softmax else logits.sigmoid()
    # The kernel's scores are float32, and what is equal there is a tie.
    choice = logits if softmax and bias is None else scores.float() + (0 if bias is None else bias)
    if num_groups > 1:
        grouped = choice.unflatten(-1, (num_groups, -1))
        best = grouped.topk(2 if bias is not None else 1, dim=-1).values.sum(-1)
        kept = by_falling_choice(best)[:, :topk_groups]
        mask = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)
        choice = grouped.masked_fill(~mask[..., None], -torch.inf).flatten(1)
    ids = by_falling_choice(choice)[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scaling, ids


ROUTERS: list[dict[str, Any]] = [
    {"experts": 128, "hidden": 2048, "top_k": 8},
    {"experts": 8, "hidden": 4096, "top_k": 2},
    {"experts": 60, "hidden": 2048, "top_k": 4, "renormalize": False},
    {"experts": 256, "hidden": 7168, "top_k": 8, "scoring": "sigmoid", "scaling": 2.5}
    | {"num_groups": 8, "topk_groups": 4, "bias": True},
    {"experts": 160, "hidden": 5120, "top_k": 6, "renormalize": False, "scaling": 16.0}
    | {"num_groups": 8, "topk_groups": 3},
    {"experts": 1, "hidden": 64, "top_k": 1},
    {"experts": 33, "hidden": 72, "top_k": 16, "scoring": "sigmoid"},
    {"experts": 96, "hidden": 1000, "top_k": 7, "bias": True},
]


@pytest.mark.gpu
@pytest.mark.parametrize("router", ROUTERS, ids=lambda r: f"{r['experts']}x{r['hidden']}")
def test_router_chooses_as_float64_does(router: dict[str, Any], kernels: Any, fw_seed: int) -> None:
    torch.manual_seed(fw_seed)
    experts, hidden, top_k = router["experts"], router["hidden"], router["top_k"]
    weight = draw_exact(experts, hidden)
    bias = torch.randint(-3, 4, (experts,), device="cuda") / 8.0 if router.get("bias") else None
    options = (
        router.get("scoring", "softmax"),
        router.get("renormalize", True),
        router.get("scaling", 1.0),
        bias,
        router.get("num_groups", 1),
        router.get("topk_groups", 1),
    )
    for tokens in (*TOKENS, 9, 70):
        x = draw_exact(tokens, hidden + 8)[:, :hidden]
        logits = x.double() @ weight.double().T
        want, want_ids = route_in_float64(logits, top_k, *options)
        got, ids = kernels.moe_route(x, weight, top_k, *options)
        where = f"{tokens} tokens, --fw-seed={fw_seed}"
        assert ids.dtype == torch.int32
        if options[0] == "softmax" and bias is None:
            assert torch.equal(ids.long(), want_ids), where
        else:  # the last bit of exp turns a tie of scores: the same score is right
            again = route_in_float64(logits, experts, *options[:1], False, 1.0, *options[3:])
            chosen = again[0].float() + (0 if bias is None else bias[again[1]])
            rank = again[1].argsort(1).gather(1, ids.long())
            assert torch.allclose(chosen.gather(1, rank), chosen[:, :top_k], rtol=1e-5), where
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6, msg=where)
        repeated = kernels.moe_route(x, weight, top_k, *options)
        assert torch.equal(ids, repeated[1]) and torch.equal(got, repeated[0]), where


@pytest.mark.gpu
def test_router_takes_the_scale_of_a_norm_and_survives_nan(kernels: Any, fw_seed: int) -> None:
    torch.manual_seed(fw_seed)
    weight = draw_exact(128, 2048)
    for tokens in TOKENS:
        x = torch.randn(tokens, 2048, device="cuda").bfloat16() * 3
        squares = x.float().square().unflatten(1, (-1, 16)).sum(-1)
        scale = torch.rsqrt(x.double().square().mean(1, keepdim=True) + EPS)
        want, _ = route_in_float64(x.double() @ weight.double().T * scale, 8, *SIMPLE)
        got, ids = kernels.moe_route(x, weight, 8, squares=squares, eps=EPS)
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-6)
        x[0, 5] = torch.nan
        _, ids = kernels.moe_route(x, weight, 8)
        assert ids[0].tolist() == list(range(8))


SIMPLE: tuple[Any, ...] = ("softmax", True, 1.0, None, 1, 1)


def draw_weight(experts: int, rows: int, columns: int, scheme: str) -> tuple[Tensor, Any, Tensor]:
    """Weights, their scales, and both in float64."""
    if scheme == "bf16":
        weight = torch.randn(experts, rows, columns, device="cuda").bfloat16() * columns**-0.5
        return weight, None, weight.double()
    values = (100 * torch.randn(experts, rows, columns, device="cuda")).clamp(-448, 448)
    values[..., 3] *= 2.0**-14  # subnormal FP8 too
    weight = values.to(E4M3)
    block = 1 if scheme == "rows" else 128
    grid = (experts, rows // block, 1 if scheme == "rows" else columns // block)
    scales = (0.5 + torch.rand(grid, device="cuda")) * 0.01 * columns**-0.5
    wide = scales.repeat_interleave(block, 1)
    wide = wide if scheme == "rows" else wide.repeat_interleave(block, 2)
    return weight, scales, weight.double() * wide.double()


def draw_ids(routing: str, tokens: int, experts: int, top_k: int) -> Tensor:
    if routing == "one":  # every token to the same experts, most experts with none
        row = torch.randperm(experts, device="cuda")[:top_k]
        return row.repeat(tokens, 1).int()
    scores = torch.rand(tokens, experts, device="cuda")
    if routing == "skewed":
        scores += 3.0 / torch.arange(1, experts + 1, device="cuda")
    return scores.topk(top_k).indices.int()


SHAPES = [(128, 768, 2048, 8), (8, 1792, 512, 2), (60, 1408, 256, 4), (256, 256, 7168, 8)]
SHAPES += [(5, 128, 128, 5), (20, 512, 1280, 16)]


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["bf16", "rows", "blocks"])
@pytest.mark.parametrize(("experts", "inner", "hidden", "top_k"), SHAPES)
def test_gate_up_and_down_are_near_float64(
    experts: int, inner: int, hidden: int, top_k: int, scheme: str, kernels: Any, fw_seed: int
) -> None:
    torch.manual_seed(fw_seed)
    gate_up, gate_up_scale, gate_up_64 = draw_weight(experts, 2 * inner, hidden, scheme)
    down, down_scale, down_64 = draw_weight(experts, hidden, inner, scheme)
    norm_weight = torch.randn(hidden, device="cuda").bfloat16()
    activations = itertools.cycle(["silu", "gelu_tanh"])
    for tokens, routing in itertools.product(TOKENS, ("even", "skewed", "one")):
        where = f"{tokens} tokens, {routing}, --fw-seed={fw_seed}"
        activation = next(activations)
        ids = draw_ids(routing, tokens, experts, top_k)
        x = torch.randn(tokens, hidden + 8, device="cuda").bfloat16()[:, :hidden]
        squares = x.float().square().unflatten(1, (-1, 16)).sum(-1) if tokens % 2 else None
        scale = torch.rsqrt(x.double().square().mean(1, keepdim=True) + EPS)
        h = kernels.moe_gate_up(x, gate_up, ids, gate_up_scale, activation, squares, EPS)
        summands = x.double() if squares is None else x.double() * scale
        want = gate_up_in_float64(summands, gate_up_64, ids, activation)
        assert relative_error(h, want) <= 2.0**-7, where
        again = kernels.moe_gate_up(x, gate_up, ids, gate_up_scale, activation, squares, EPS)
        assert torch.equal(h, again), where

        weights = torch.rand(tokens, top_k, device="cuda")
        residual = torch.randn(tokens, hidden, device="cuda").bfloat16()
        shared = torch.randn(tokens, hidden, device="cuda").bfloat16() if tokens % 3 else None
        args = (h, down, ids, weights, down_scale, residual, shared)
        y = kernels.moe_down(*args)
        outputs = torch.einsum(
            "tkhi,tki->tkh", down_64[ids.long()], h.double().unflatten(0, (tokens, top_k))
        )
        want = (outputs * weights.double()[..., None]).sum(1)
        want = want + residual.double() + (0 if shared is None else shared.double())
        assert relative_error(y, want) <= 2.0**-7, where
        assert torch.equal(y, kernels.moe_down(*args, True)), where
        normed = kernels.moe_down_norm(*args[:4], norm_weight, *args[4:])
        assert torch.equal(normed[0], y), where
        assert torch.equal(normed[1], y * norm_weight), where
        squares = y.float().square().unflatten(1, (-1, 8)).sum(-1)
        torch.testing.assert_close(normed[2], squares, rtol=1e-5, atol=1e-6)
        bare = kernels.moe_down(*args[:5])
        assert relative_error(bare, (outputs * weights.double()[..., None]).sum(1)) <= 2.0**-7


def gate_up_in_float64(x: Tensor, weight: Tensor, ids: Tensor, activation: str) -> Tensor:
    sums = torch.stack([weight[row] @ token for row, token in zip(ids.long(), x, strict=True)])
    gate, up = sums.flatten(0, 1).chunk(2, dim=-1)
    acted = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return acted * up


def relative_error(got: Tensor, want: Tensor) -> float:
    error = (got.double() - want).norm() / want.norm()
    return float(error.nan_to_num(9.0))


@pytest.mark.gpu
def test_a_token_has_one_result_in_every_batch_of_its_class(kernels: Any, fw_seed: int) -> None:
    torch.manual_seed(fw_seed)
    gate_up, down = draw_weight(32, 512, 1024, "bf16")[0], draw_weight(32, 1024, 256, "bf16")[0]
    x = torch.randn(8, 1024, device="cuda").bfloat16()
    router = torch.randn(32, 1024, device="cuda").bfloat16()

    def run(x: Tensor) -> list[Tensor]:
        weights, ids = kernels.moe_route(x, router, 6)
        h = kernels.moe_gate_up(x, gate_up, ids)
        return [weights, ids, h.unflatten(0, ids.shape), kernels.moe_down(h, down, ids, weights)]

    for few, many in ((1, 2), (3, 8), (5, 8)):
        got, want = run(x[:few]), run(x[:many])
        assert all(torch.equal(a, b[:few]) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
def test_pairs_without_an_expert_add_nothing(kernels: Any) -> None:
    """Ids outside the experts: of padding, or of another rank's experts."""
    gate_up, down = draw_weight(16, 256, 256, "bf16")[0], draw_weight(16, 256, 128, "bf16")[0]
    x = torch.randn(4, 256, device="cuda").bfloat16()
    ids = draw_ids("even", 4, 16, 4)
    weights = torch.rand(4, 4, device="cuda")
    partial, ids[1, 2], ids[3] = ids.clone(), -1, 16
    h, partial_h = (kernels.moe_gate_up(x, gate_up, i) for i in (partial, ids))
    real = (ids >= 0) & (ids < 16)
    assert torch.equal(h.unflatten(0, (4, 4))[real], partial_h.unflatten(0, (4, 4))[real])
    y = kernels.moe_down(partial_h, down, ids, weights)
    want = kernels.moe_down(h, down, partial, weights * real)
    assert torch.equal(y, want) and not y[3].any()
    assert not kernels.moe_down(partial_h, down, torch.full_like(ids, -1), weights).any()


@pytest.mark.gpu
def test_layers_overlapping_in_a_graph_give_the_bits_of_single_launches(
    kernels: Any, fw_seed: int
) -> None:
    torch.manual_seed(fw_seed)
    schemes = ("bf16", "rows", "blocks")
    layers = [
        (
            torch.randn(64, 2048, device="cuda").bfloat16(),
            draw_weight(64, 1536, 2048, scheme)[:2],
            draw_weight(64, 2048, 768, scheme)[:2],
        )
        for scheme in (*schemes, *schemes)
    ]
    norm_weight = torch.randn(2048, device="cuda").bfloat16()

    def run(x: Tensor) -> list[Tensor]:
        results: list[Tensor] = []
        y, squares = x, x.float().square().unflatten(1, (-1, 16)).sum(-1)
        for router, gate_up, down in layers:
            weights, ids = kernels.moe_route(x, router, 8, squares=squares, eps=EPS)
            h = kernels.moe_gate_up(x, gate_up[0], ids, gate_up[1], squares=squares, eps=EPS)
            y, x, squares = kernels.moe_down_norm(
                h, down[0], ids, weights, norm_weight, down[1], residual=y, ids_ready=True
            )
            results += [weights, ids, h, y, x, squares]
        return results

    for tokens in TOKENS:
        x = torch.randn(tokens, 2048, device="cuda").bfloat16()
        check_replays(run, x, f"{tokens} tokens, --fw-seed={fw_seed}")


@pytest.mark.gpu
def test_kernels_refuse_what_they_cannot_run(kernels: Any) -> None:
    x = torch.randn(2, 256, device="cuda").bfloat16()
    router = torch.randn(16, 256, device="cuda").bfloat16()
    with pytest.raises(RuntimeError, match="top_k is 17, expected 1 to 16"):
        kernels.moe_route(x, router, 17)
    with pytest.raises(RuntimeError, match="'relu', expected 'softmax' or 'sigmoid'"):
        kernels.moe_route(x, router, 2, "relu")
    with pytest.raises(RuntimeError, match="2 of 3 groups of 16 experts"):
        kernels.moe_route(x, router, 2, num_groups=3, topk_groups=2)
    with pytest.raises(RuntimeError, match="top_k is 5, expected 1 to 4"):
        kernels.moe_route(x, router, 5, num_groups=4, topk_groups=1)
    with pytest.raises(RuntimeError, match="has 300 experts, expected 1 to 256"):
        kernels.moe_route(x, router.repeat(20, 1)[:300], 2)
    with pytest.raises(RuntimeError, match=r"squares \[2, 8\], expected .* for every 8 or 16"):
        kernels.moe_route(x, router, 2, squares=torch.ones(2, 8, device="cuda"))
    weight = torch.randn(4, 64, 256, device="cuda").bfloat16()
    ids = torch.zeros(2, 1, dtype=torch.int32, device="cuda")
    with pytest.raises(RuntimeError, match=r"ids \[9, 1\], expected 8 or fewer tokens"):
        kernels.moe_gate_up(x.repeat(5, 1)[:9], weight, ids.repeat(5, 1)[:9])
    with pytest.raises(RuntimeError, match="of int32"):
        kernels.moe_gate_up(x, weight, ids.long())
    with pytest.raises(RuntimeError, match=r"expected .* of float8_e4m3fn"):
        kernels.moe_gate_up(x, weight, ids, torch.ones(4, 64, 1, device="cuda"))
    with pytest.raises(RuntimeError, match="'relu', expected 'silu' or 'gelu_tanh'"):
        kernels.moe_gate_up(x, weight, ids, activation="relu")
    weights = torch.ones(2, 1, device="cuda")
    with pytest.raises(RuntimeError, match=r"h has shape \[1, 256\], expected .*\[2, 256\]"):
        kernels.moe_down(x[:1], weight, ids, weights)
    with pytest.raises(RuntimeError, match=r"residual has shape .*\[2, 64\]"):
        kernels.moe_down(x, weight, ids, weights, residual=x)


@pytest.mark.parametrize(
    ("tokens", "inner", "fp8", "streamed"),
    [
        (8, 128, "block", True),
        (8, 128, "token", True),
        (9, 128, "block", False),
        (8, 128, "tensor", False),  # its activations have a static scale
        (8, 64, "token", False),  # down's rows are no whole lines
    ],
)
def test_fp8_weights_are_streamed_for_few_tokens(
    tokens: int, inner: int, fp8: str, streamed: bool
) -> None:
    draw = Draw(torch.bfloat16, torch.device("cpu"), torch.Generator())
    args = [
        t.to("meta") if isinstance(t, Tensor) else t
        for t in moe_args(draw, tokens, 8, 2, 128, inner, fp8=fp8)
    ]
    runs = BY_NAME["fused_moe"].implementation("cuda").runs
    assert runs is not None
    assert (runs(*args) == STREAMED) is streamed
