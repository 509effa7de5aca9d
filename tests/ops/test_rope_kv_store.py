"""``rope_kv_store`` beside its parts: equal bits, what padding keeps, what it costs and refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.ops import BY_NAME, Case

OP = BY_NAME["rope_kv_store"]
FP8_CACHE = torch.zeros(3, 2, 4, 1, 8).to(torch.float8_e4m3fn)
IMPLEMENTATIONS = [impl.name for impl in OP.implementations]


def cases(dtype: torch.dtype, device: torch.device, seed: int = 0) -> Iterator[Case]:
    return OP.cases(dtype, device, torch.Generator(device).manual_seed(seed))


def parts(implementation: str, *args: Any) -> Tensor:
    """The unfused ops, each by the same kind of kernel."""
    positions, q, k, v, table, kv_cache, slots, q_weight, k_weight, eps, *rest = args
    kv_scale, layout, offset = rest
    norm, rope, store = (
        BY_NAME[name].overload(implementation)
        for name in ("rms_norm", "rotary_embedding", "kv_store")
    )
    if q_weight is not None:
        q, k = norm(q, q_weight, eps, offset), norm(k, k_weight, eps, offset)
    q, k = rope(positions, q, k, table, layout)
    store(k, v, kv_cache, slots, kv_scale)
    return q  # type: ignore[no-any-return]


@pytest.mark.product(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bits_are_those_of_its_parts(
    implementation: str, dtype: torch.dtype, device: torch.device, fw_seed: int
) -> None:
    """With norms, of the native parts alone: a kernel's order of summation is its own.  On a GPU
    the compiler also chooses which product of a rotation it fuses with the sum."""
    compared = 0
    for case in cases(dtype, device, fw_seed):
        if implementation == "triton" and case.args[7] is not None:
            continue
        ours, theirs = (list(case.args) for _ in range(2))
        ours[5], theirs[5] = case.args[5].clone(), case.args[5].clone()
        got, want = OP.overload(implementation)(*ours), parts(implementation, *theirs)
        if implementation == "triton" and device.type == "cuda":
            for x, y in ((got, want), (ours[5], theirs[5])):
                eps = torch.finfo(x.dtype).eps
                torch.testing.assert_close(x.float(), y.float(), atol=4 * eps, rtol=2 * eps)
        else:
            assert torch.equal(got, want), case.label
            assert torch.equal(ours[5].float(), theirs[5].float()), case.label
        compared += 1
    assert compared >= 5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_touches_no_slot(implementation: str, device: torch.device) -> None:
    (case,) = (c for c in cases(torch.float32, device) if c.label == "partial 32 of 80, padding")
    args = list(case.args)
    kv_cache, slots = case.args[5].clone(), case.args[6]
    args[5] = kv_cache
    OP.overload(implementation)(*args)
    changed = (kv_cache != case.args[5]).transpose(1, 2).flatten(0, 1).flatten(1).any(1)
    assert sorted(changed.nonzero().flatten().tolist()) == sorted(slots[slots >= 0].tolist())


def nbytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def test_it_costs_its_parts_less_what_stays_in_registers() -> None:
    for case in cases(torch.bfloat16, torch.device("cpu")):
        positions, q, k, v, table, cache, slots, *weights, _, _, _, _ = case.args
        rows = table[:1].expand(len(positions), -1)
        stored = 2 * k.numel() * cache.element_size()
        expected = nbytes(q, q, k, v) + stored + nbytes(positions, slots, rows, *weights)
        assert OP.cost(OP.describe(case.args)).bytes == expected, case.label


@pytest.mark.parametrize("implementation", ["", *IMPLEMENTATIONS])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({3: torch.zeros(2, 2, 8)}, "disagree"),
        ({5: torch.zeros(3, 2, 4, 1, 8).half()}, "kv_cache torch.float16"),
        ({10: torch.ones(2, 1)}, "kv_scale is given for a kv_cache of torch.float32"),
        ({5: FP8_CACHE, 10: torch.ones(2, 2)}, r"kv_scale is torch.float32 \[2, 2\], expected"),
        ({6: torch.zeros(1, dtype=torch.int32)}, "disagree"),
        ({4: torch.zeros(5, 10)}, "rotary_dim 10"),
        ({7: torch.ones(8)}, r"q_weight is \[8\] and k_weight None, expected \[8\] for both"),
        ({7: torch.ones(4), 8: torch.ones(4)}, r"q_weight is \[4\] and k_weight \[4\]"),
        ({11: "twos"}, "layout is 'twos', expected one of: halves, pairs"),
    ],
)
def test_what_disagrees_is_refused(
    implementation: str, changes: dict[int, Tensor], message: str, device: torch.device
) -> None:
    args: list[Any] = [
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, 4, 8),
        torch.zeros(2, 1, 8),
        torch.zeros(2, 1, 8),
        torch.zeros(5, 8),
        torch.zeros(3, 2, 4, 1, 8),
        torch.zeros(2, dtype=torch.int32),
        None,
        None,
        0.0,
        None,
        "halves",
    ]
    for index, value in changes.items():
        args[index] = value
    placed = [arg.to(device) if isinstance(arg, Tensor) else arg for arg in args]
    with pytest.raises(ValueError, match=message):
        OP.overload(implementation)(*placed)
