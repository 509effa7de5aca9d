"""``kv_store`` where conformance does not look: padding next to every slot, graphs, layouts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusewright.ops import BY_NAME

OP = BY_NAME["kv_store"]
NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM = 3, 4, 2, 8
SLOTS = NUM_BLOCKS * BLOCK_SIZE


@pytest.fixture(params=[impl.name for impl in OP.implementations])
def implementation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def store(implementation: str, slots: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The cache before and after, [slot, K or V, head, dim]; token t is t + 1 and -(t + 1)."""
    cache = torch.full((NUM_BLOCKS, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM), 99.0, device=device)
    cache += torch.arange(SLOTS, device=device).view(NUM_BLOCKS, 1, BLOCK_SIZE, 1, 1)
    before = cache.clone()
    token = torch.arange(1.0, len(slots) + 1, device=device).view(-1, 1, 1)
    k = token.expand(-1, KV_HEADS, HEAD_DIM).contiguous()
    mapping = torch.tensor(slots, dtype=torch.int32, device=device)
    OP.overload(implementation)(k, -k, cache, mapping)
    return tuple(c.transpose(1, 2).flatten(0, 1) for c in (before, cache))  # type: ignore[return-value]


@pytest.mark.product
@pytest.mark.parametrize("slot", range(SLOTS))
@pytest.mark.parametrize("padding", [(1, 0), (0, 1), (3, 5)])
def test_padding_never_touches_any_slot(
    implementation: str, slot: int, padding: tuple[int, int], device: torch.device
) -> None:
    slots = [-1] * padding[0] + [slot] + [-1] * padding[1]
    before, after = store(implementation, slots, device)
    value = float(padding[0] + 1)
    assert (after[slot, 0] == value).all() and (after[slot, 1] == -value).all()
    others = torch.arange(SLOTS, device=device) != slot
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_a_batch_of_only_padding_changes_nothing(
    implementation: str, num_tokens: int, device: torch.device
) -> None:
    before, after = store(implementation, [-1] * num_tokens, device)
    assert torch.equal(before, after)


@pytest.mark.parametrize("scaled", [False, True])
def test_fp8_saturates_and_keeps_what_is_no_number(
    implementation: str, scaled: bool, device: torch.device
) -> None:
    values = torch.tensor([0.0, -1.0, 448.0, 449.0, -1e9, torch.inf, -torch.inf, torch.nan])
    k = values.expand(1, KV_HEADS, HEAD_DIM).to(device)
    cache = torch.zeros(NUM_BLOCKS, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM, device=device)
    cache = cache.to(torch.float8_e4m3fn)
    slots = torch.tensor([5], dtype=torch.int32, device=device)
    scale = torch.tensor([[1.0, 2.0], [4.0, 0.5]], device=device) if scaled else None
    OP.overload(implementation)(k, k, cache, slots, scale)
    stored = cache[1, :, 1].float().cpu()
    for i, head in ((i, head) for i in range(2) for head in range(KV_HEADS)):
        by = 1.0 if scale is None else float(scale[i, head])
        want = torch.tensor([0.0, -1.0 / by, 448 / by, 449 / by, -448, 448, -448, torch.nan])
        want = want.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        torch.testing.assert_close(stored[i, head], want, atol=0, rtol=0, equal_nan=True)


def test_native_has_no_shape_that_depends_on_data() -> None:
    """A fake tensor has no data: nonzero, boolean indexing or ``.item()`` would raise here."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        k = torch.empty(5, KV_HEADS, HEAD_DIM)
        cache = torch.empty(NUM_BLOCKS, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        slots = torch.empty(5, dtype=torch.int32)
        OP.implementation("native").fn(k, k, cache, slots)
        with pytest.raises(torch._subclasses.fake_tensor.DynamicOutputShapeException):
            OP.reference(k, k, cache, slots)


@pytest.mark.gpu
def test_a_captured_graph_stores_what_the_new_mapping_says(implementation: str) -> None:
    device = torch.device("cuda")
    cache = torch.zeros(NUM_BLOCKS, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM, device=device)
    k = torch.ones(3, KV_HEADS, HEAD_DIM, device=device)
    slots = torch.tensor([1, -1, -1], dtype=torch.int32, device=device)
    run = OP.overload(implementation)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(k, k, cache, slots)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(k, k, cache, slots)
    cache.zero_()
    slots.copy_(torch.tensor([-1, 5, 0], dtype=torch.int32))
    k.copy_(torch.arange(1.0, 4.0, device=device).view(3, 1, 1).expand_as(k))
    graph.replay()
    written = cache[:, 0, :, 0, 0].flatten().tolist()
    assert written == [3.0, 0, 0, 0, 0, 2.0] + [0.0] * (SLOTS - 6)
