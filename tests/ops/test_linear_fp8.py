"""``linear_fp8`` against float64, for every scheme; what is refused, and why."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.ops import BY_NAME, OpDesc
from fusewright.ops._float8 import E4M3

OP = BY_NAME["linear_fp8"]
SCHEMES = ("tensor", "token", "block")


def sm_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def draw(m: int, n: int, k: int, scheme: str, device: torch.device) -> tuple[Tensor, ...]:
    """x, x_scale, weight, weight_scale; scales differ by factors of up to 100."""

    def scales(rows: int, columns: int) -> Tensor:
        return 10 ** (2 * torch.rand(rows, columns, device=device) - 1)

    x = torch.randn(m, k, device=device).to(E4M3)
    weight = torch.randn(n, k, device=device).to(E4M3)
    if scheme == "tensor":
        return x, scales(1, 1), weight, scales(1, 1)
    if scheme == "token":
        return x, scales(m, 1), weight, scales(n, 1)
    groups = -(-k // 128)
    return x, scales(groups, m).t(), weight, scales(-(-n // 128), groups)


def spread(scale: Tensor, like: Tensor) -> Tensor:
    """The scale of each element, by the indices of blocks: not as the reference does it."""
    sizes = zip(like.shape, scale.shape, strict=True)
    row, col = (torch.arange(n) // (n if s == 1 else 1 if s == n else 128) for n, s in sizes)
    return scale.cpu().double()[row[:, None], col[None, :]]


def relative_error(got: Tensor, args: tuple[Any, ...], bias: Tensor | None) -> float:
    """Of each row relative to its largest element: rows have scales of their own."""
    x, x_scale, weight, weight_scale = args
    exact = (x.cpu().double() * spread(x_scale, x)) @ (
        weight.cpu().double() * spread(weight_scale, weight)
    ).T
    exact += 0.0 if bias is None else bias.cpu().double()
    if not exact.numel():
        return 0.0
    error = (got.cpu().double() - exact).abs() / exact.abs().amax(1, keepdim=True)
    return float(error.max().nan_to_num(torch.inf))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("implementation", ["", *(impl.name for impl in OP.implementations)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2.0**-9), (torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-8)],
)
def test_every_scheme_is_near_float64(
    scheme: str,
    implementation: str,
    dtype: torch.dtype,
    tolerance: float,
    device: torch.device,
    fw_seed: int,
) -> None:
    torch.manual_seed(fw_seed)
    shapes = [(1, 96, 512), (4, 96, 1024), (6, 40, 200), (17, 130, 300), (3, 256, 640), (0, 32, 16)]
    if device.type == "cuda":
        shapes += [(m, 512, 4096) for m in (1, 2, 3, 5, 16, 65, 130)] + [(33, 128, 14336)]
    checked = 0
    for m, n, k in shapes:
        args = draw(m, n, k, scheme, device)
        bias = None if m % 2 else torch.randn(n, device=device).to(dtype)
        call = (*args, bias, dtype)
        if implementation:
            desc = OP.describe(call, sm=sm_of(device))
            if OP.implementation(implementation).supports(desc):
                continue
            if implementation == "skinny" and device.type == "cpu":
                continue
        y = OP.overload(implementation)(*call)
        assert y.dtype == dtype and y.is_contiguous()
        error = relative_error(y, args, bias)
        assert error <= tolerance, f"{m} x {n} x {k}: {error}, --fw-seed={fw_seed}"
        checked += 1
    if not checked:
        pytest.skip(f"{implementation} runs no case of {dtype} here")


def on_gpu(args: tuple[Any, ...], sm: int = 90) -> OpDesc:
    found = OP.describe(args)
    return OpDesc(found.op, found.args, "cuda", sm)


NATIVE_REFUSES = [
    ((4, 40, 512), "tensor", None, 90, r"weight \[40, 512\]: cuBLASLt takes multiples of 16"),
    ((4, 48, 200), "token", None, 90, r"weight \[48, 200\]: cuBLASLt takes multiples of 16"),
    ((4, 48, 640), "block", None, 90, "in_features 640: .* of 512"),
    ((4, 48, 512), "block", None, 100, "blocks of scales are in cuBLASLt for SM 9.0, not 10.0"),
    ((4, 48, 512), "token", torch.float32, 90, "no bias to a float32 result"),
    ((4, 48, 512), "tensor", None, 80, "FP8 came with SM 8.9 .* this GPU is SM 8.0"),
]


@pytest.mark.parametrize(("shape", "scheme", "bias", "sm", "reason"), NATIVE_REFUSES)
def test_cublaslt_is_not_chosen_for_what_it_refuses_or_gets_wrong(
    shape: tuple[int, int, int], scheme: str, bias: torch.dtype | None, sm: int, reason: str
) -> None:
    args = draw(*shape, scheme, torch.device("cpu"))
    added = None if bias is None else torch.zeros(shape[1], dtype=bias)
    desc = on_gpu((*args, added, bias or torch.bfloat16), sm)
    found = OP.implementation("native").supports(desc)
    assert re.search(reason, found) and "linear_fp8" in found


def test_the_portable_kernel_takes_what_cublaslt_refuses() -> None:
    for shape, scheme, bias, sm, _ in NATIVE_REFUSES[:5]:
        args = draw(*shape, scheme, torch.device("cpu"))
        desc = on_gpu((*args, None, bias or torch.bfloat16), sm)
        assert not OP.implementation("triton").supports(desc)


REFUSED = [
    ("other features", lambda a: (a[0], a[1], a[2][:, :-2], a[3], None), "expected \\[M, K\\]"),
    ("x in bfloat16", lambda a: (a[0].bfloat16(), *a[1:], None), "torch.bfloat16, torch.float32"),
    ("scale in half", lambda a: (a[0], a[1].half(), *a[2:], None), "torch.float16"),
    ("a scale a token alone", lambda a: (a[0], a[1], a[2], a[3][:2], None), "scales \\[1, 1\\]"),
    ("short x_scale", lambda a: (a[0], a[1][1:], *a[2:], None), "scales \\[1, 1\\]"),
    ("short bias", lambda a: (*a, torch.zeros(3).bfloat16()), "bias is torch.bfloat16 \\[3\\]"),
    ("float bias", lambda a: (*a, torch.zeros(48)), "bias is torch.float32 \\[48\\]"),
]


@pytest.mark.parametrize(("what", "change", "message"), REFUSED, ids=[r[0] for r in REFUSED])
def test_disagreeing_operands_are_refused_by_every_implementation(
    what: str, change: Any, message: str, device: torch.device
) -> None:
    args = change(draw(4, 48, 64, "token", device))
    placed = [arg.to(device) if isinstance(arg, Tensor) else arg for arg in args]
    for implementation in ("", "native", "triton"):
        with pytest.raises(ValueError, match=message):
            OP.overload(implementation)(*placed, torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        OP.fake(*placed, torch.bfloat16)


def test_a_result_in_an_unknown_dtype_is_refused() -> None:
    args = draw(4, 48, 64, "token", torch.device("cpu"))
    with pytest.raises(ValueError, match=r"to torch\.float64, expected"):
        OP.overload()(*args, None, torch.float64)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_cost_counts_every_argument_and_the_result_once(scheme: str) -> None:
    args = (*draw(5, 48, 640, scheme, torch.device("cpu")), torch.zeros(48).half(), torch.float16)
    cost = OP.cost(OP.describe(args))
    tensors = [t for t in args if isinstance(t, Tensor)]
    assert cost.bytes == sum(t.numel() * t.element_size() for t in tensors) + 5 * 48 * 2
    assert cost.flops == 2 * 5 * 48 * 640
