"""The choice of experts is that of the routers of transformers, and always one that exists; slots
are sorted by it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from fusewright import ops
from fusewright.ops import BY_NAME, Implementation
from fusewright.ops.launches.experts import Sorted, sort_by_expert

OP = BY_NAME["route"]
HIDDEN = 48


def router(cls: Any, num_experts: int, **config: Any) -> Any:
    config |= {"num_experts": num_experts, "num_local_experts": num_experts}
    made = cls(SimpleNamespace(hidden_size=HIDDEN, **config))
    generator = torch.Generator().manual_seed(3)
    torch.nn.init.normal_(made.weight, generator=generator)
    return made


def check(made: Any, x: Tensor, *attributes: Any, bias: Tensor | None = None) -> None:
    with torch.no_grad():
        logits, weights, ids = made(x)
    ours, chosen = ops.route(logits, bias, *attributes)
    order, wanted = chosen.long().sort(-1), ids.sort(-1)
    assert torch.equal(order.values, wanted.values)
    expected = weights.gather(1, wanted.indices)
    torch.testing.assert_close(ours.gather(1, order.indices), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("method", "groups", "kept"), [("greedy", 1, 1), ("group_limited_greedy", 8, 3)]
)
def test_deepseek_v2(method: str, groups: int, kept: int) -> None:
    made = router(
        DeepseekV2TopkRouter,
        160,
        num_experts_per_tok=6,
        routed_scaling_factor=16.0,
        topk_method=method,
        n_group=groups,
        topk_group=kept,
    )
    x = torch.randn(33, HIDDEN, generator=torch.Generator().manual_seed(5))
    check(made, x, 6, "softmax", False, groups, kept, 16.0)


@pytest.mark.parametrize("renormalize", [True, False])
def test_deepseek_v3(renormalize: bool) -> None:
    made = router(
        DeepseekV3TopkRouter,
        256,
        num_experts_per_tok=8,
        routed_scaling_factor=2.5,
        n_group=8,
        topk_group=4,
        norm_topk_prob=renormalize,
    )
    generator = torch.Generator().manual_seed(7)
    made.e_score_correction_bias.copy_(torch.randn(256, generator=generator) / 10)
    x = torch.randn(33, HIDDEN, generator=generator) / 5
    bias = made.e_score_correction_bias
    check(made, x, 8, "sigmoid", renormalize, 8, 4, 2.5, bias=bias)


@pytest.mark.parametrize("impl", OP.implementations, ids=lambda impl: impl.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_ids_are_in_range_and_distinct_whatever_the_logits(
    impl: Implementation, device: torch.device
) -> None:
    """A damaged step must not read memory that is not there."""
    bad = torch.randn(6, 12, device=device)
    bad[0] = torch.nan
    bad[1, 3] = torch.nan
    bad[2] = -torch.inf
    bad[3, 5:] = torch.inf
    bad[4] = 0
    for attributes in ((4, "softmax"), (4, "sigmoid", True, 3, 2, 1.0)):
        _, ids = OP.overload(impl.name)(bad, None, *attributes)
        assert int(ids.min()) >= 0 and int(ids.max()) < 12
        assert all(len(set(row)) == 4 for row in ids.tolist())
    _, ids = OP.overload(impl.name)(bad, None, 4)
    assert ids[4].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ((13,), "top_k is 13, expected 1 to the 12 experts"),
        ((2, "relu"), "scoring is 'relu', expected 'softmax' or 'sigmoid'"),
        ((2, "softmax", True, 5, 1), "num_groups is 5, expected a divisor of 12 experts"),
        ((2, "softmax", True, 4, 5), "topk_groups is 5, expected 1 to 4"),
        ((5, "softmax", True, 4, 1), "top_k is 5, expected 1 to the 3 experts of 1 groups"),
    ],
)
def test_attributes_out_of_range_are_refused(attributes: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ops.route(torch.randn(2, 12), None, *attributes)


def sort(ids: Tensor, num_experts: int, *first_expert: Tensor) -> tuple[Sorted, int]:
    """Sorted slots, in memory that was full of -1, and the number of launches."""
    launches, by_expert = sort_by_expert(ids, num_experts, *first_expert)
    for tensor in by_expert:
        tensor.fill_(-1)
    for launch in launches:
        launch.run()
    return by_expert, len(launches)


def draw_skewed(experts: int, slots: int) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.multinomial(1.0 / torch.arange(1, experts + 1), slots, True, generator=generator)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "draw"),
    [
        (1025, 1, 3, draw_skewed),
        (1025, 2, 128, draw_skewed),
        (2048, 8, 8, lambda experts, slots: torch.arange(slots) % experts),
        (2051, 3, 40, lambda experts, slots: torch.arange(slots) // 7 % 2 * (experts - 1)),
        (2051, 4, 5, lambda experts, slots: torch.full((slots,), 0)),
        (2051, 4, 5, lambda experts, slots: torch.full((slots,), experts - 1)),
        (1100, 2, 1, lambda experts, slots: torch.full((slots,), 0)),
        (1025, 1, 260, draw_skewed),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_the_sort_of_many_tokens_is_stable_and_that_of_few(
    tokens: int, top_k: int, experts: int, draw: Any, device: torch.device
) -> None:
    """Two launches make the bits that one makes; experts without slots are between the others."""
    ids = draw(experts, tokens * top_k).to(torch.int32).view(tokens, top_k)
    (order, offsets), launches = sort(ids.to(device), experts)
    assert launches == 2
    flat = ids.flatten().long()
    assert torch.equal(order.cpu().long(), flat.argsort(stable=True))
    ends = torch.bincount(flat, minlength=experts).cumsum(0)
    assert offsets.tolist() == [0, *ends.tolist()]
    # With the first expert's id, one launch serves any number of tokens.
    first = torch.zeros(1, dtype=torch.int32, device=device)
    same, launches = sort(ids.to(device), experts, first)
    assert launches == 1
    assert torch.equal(order, same.order) and torch.equal(offsets, same.offsets)


@pytest.mark.parametrize(("tokens", "launches"), [(9, 1), (1024, 1), (1025, 2), (16384, 2)])
def test_more_than_1024_tokens_are_counted_before_they_are_placed(
    tokens: int, launches: int
) -> None:
    ids = torch.empty(tokens, 8, dtype=torch.int32, device="meta")
    assert len(sort_by_expert(ids, 128)[0]) == launches
