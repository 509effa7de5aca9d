"""A norm without a weight is raised where the op rounds as it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.ops.norm.norm import RMS_NORM
from fusewright.passes import CANONICALIZE, build_passes, run_passes
from tests.passes.graphs import aten, capture, hidden, targets
from tests.passes.test_canonicalize_norm import BF16, llama, names, raised


def torchs(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (32,), eps=1e-6) + w


def no_weight(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) + w


def weight_of_rows(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w[:7, None]


def weight_of_tokens(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (x * w)


def l2_of_llama_4(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) + w


def for_two(x: Tensor, w: Tensor) -> Any:
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return normed + w, normed * x


WITHOUT_WEIGHT: list[tuple[Any, Any, torch.dtype]] = [
    *((aten, l2_of_llama_4, one) for one in (torch.float32, BF16, torch.float16)),
    *((capture, torchs, one) for one in (torch.float32, BF16)),
    *((aten, one, torch.float32) for one in (no_weight, weight_of_rows, weight_of_tokens, for_two)),
]


@pytest.mark.parametrize(("graph", "fn", "dtype"), WITHOUT_WEIGHT, ids=names)
def test_a_norm_without_a_weight_keeps_every_bit(graph: Any, fn: Any, dtype: torch.dtype) -> None:
    gm = graph(fn, x=hidden(dtype=dtype), w=torch.randn(32).to(dtype))
    report, _ = run_passes(gm, [CANONICALIZE[0], *build_passes(["cleanup"])], verify=True)
    assert report.matched == 1 and not report.missed
    (norm,) = gm.graph.find_nodes(op="call_function", target=RMS_NORM.overload())
    assert norm.args[1].target == torch.ops.aten.ones.default and len(norm.args) == 3
    if fn is not torchs:  # which multiplies by the root in another order
        assert [check.max_abs for check in report.checks] == [0.0]


def in_float32(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) + w


def cast_to_another(x: Tensor, w: Tensor) -> Tensor:
    return in_float32(x, w * 0).half() * 2


@pytest.mark.parametrize("fn", [in_float32, cast_to_another], ids=names)
def test_a_norm_without_a_weight_that_goes_on_in_float32_is_no_site(fn: Any) -> None:
    gm = aten(fn, x=hidden(dtype=BF16), w=torch.randn(32))
    before = targets(gm)
    assert raised(gm).sites == [] and targets(gm) == before


def test_groups_of_a_gated_product_are_missed() -> None:
    """As in Mamba2, where Inductor makes one kernel of it."""

    def mamba2(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
        groups = (x.float() * F.silu(gate.float())).view(7, 2, 16)
        normed = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + 1e-6)
        return w * normed.view(7, 32).to(x.dtype)

    gm = aten(mamba2, x=hidden(dtype=BF16), gate=hidden(dtype=BF16), w=torch.randn(32).to(BF16))
    (miss,) = raised(gm).missed
    assert miss.reason == "_to_copy rounds it to torch.bfloat16, x is float32"


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_narrow_weight_of_a_float32_norm_is_widened(dtype: torch.dtype) -> None:
    """As in Mamba, whose residual is float32."""
    gm = aten(llama, x=hidden(), w=torch.randn(32).to(dtype))
    (report,) = run_passes(gm, [CANONICALIZE[0]], verify=True)
    assert report.matched == 1 and [check.max_abs for check in report.checks] == [0.0]
    assert targets(gm) == ["_to_copy.default", "rms_norm.default"]
