"""``select`` is a pure function of a description, and what it says is what runs.

A kernel, a weight format and an epilogue are added from here, outside of the package.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusewright.ops import BY_NAME
from fusewright.ops.core.target import Target
from fusewright.ops.linear import desc as _linear_desc
from fusewright.ops.linear.desc import LinearDesc, WeightFormat, describe
from fusewright.ops.linear.kernels import (
    CLUSTER,
    KERNELS,
    LIBRARY,
    PERSISTENT,
    STREAM,
    TILED,
    LinearKernel,
    NoKernelError,
    runner,
    select,
)

H200 = Target(torch.device("meta"), 90, csrc=True)
O_PROJ = LinearDesc("bfloat16", torch.bfloat16, 4096, 4096)
GATED = LinearDesc("bfloat16", torch.bfloat16, 28672, 4096, activation="silu")
GATE_UP = LinearDesc("fp8 token", torch.bfloat16, 28672, 4096, activation="silu", quantize=True)


@pytest.mark.parametrize(
    ("desc", "chosen"),
    [
        (O_PROJ, {1: STREAM, 16: STREAM, 17: CLUSTER, 64: CLUSTER, 65: LIBRARY, 4096: LIBRARY}),
        (replace(O_PROJ, bias=True, activation="silu"), {1: STREAM, 16: STREAM, 17: CLUSTER}),
        (replace(O_PROJ, out_features=7400), {16: STREAM, 17: LIBRARY}),
        (replace(O_PROJ, out_features=4100), {17: LIBRARY}),
        (replace(O_PROJ, out_features=512), {1: LIBRARY}),
        (GATED, {16: STREAM, 17: PERSISTENT, 128: PERSISTENT, 129: LIBRARY}),
        (replace(GATED, bias=True, activation="gelu_tanh"), {17: PERSISTENT}),
        (replace(GATED, activation="relu"), {17: LIBRARY}),
        (replace(GATED, quantize=True), {17: LIBRARY}),
        (replace(GATED, out_features=28680, in_features=4096), {17: LIBRARY}),
        (GATE_UP, {8: STREAM, 9: TILED, 64: TILED, 65: LIBRARY}),
        (replace(GATE_UP, weight_format="fp8 block"), {1: TILED, 65: LIBRARY}),
        (replace(O_PROJ, weight_format="fp8 block"), {16: STREAM, 17: TILED, 129: LIBRARY}),
        (replace(O_PROJ, add=True, bias=True), {1: STREAM, 16: STREAM}),
        (replace(O_PROJ, prologue="norm"), {1: STREAM, 16: STREAM}),
    ],
)
def test_rows_choose_the_kernel(desc: LinearDesc, chosen: dict[int, LinearKernel]) -> None:
    assert {rows: select(desc, rows, H200).kernel.name for rows in chosen} == {
        rows: kernel.name for rows, kernel in chosen.items()
    }


def test_rows_that_copies_cannot_read_are_left_to_others() -> None:
    x, weight = torch.ones(33, 68).bfloat16(), torch.ones(8, 64).bfloat16()
    for kernel in (STREAM, CLUSTER, PERSISTENT):
        assert kernel.run(x[:, 4:], weight, None) is None
        assert kernel.run(x[:, :64].contiguous()[:, 1:], weight[:, 1:], None) is None
    for kernel in (CLUSTER, PERSISTENT):
        assert kernel.run(x[:, :64].contiguous(), weight, torch.ones(9).bfloat16()[1:]) is None


def test_those_before_the_chosen_one_say_why_not() -> None:
    refused = dict(select(O_PROJ, 65, H200).refused)
    assert refused["skinny_linear"] == "65 rows: fastest from 1 to 16"
    assert refused["cluster_linear"] == "65 rows: fastest up to 64"
    assert "_linear_fp8_kernel" not in refused, "only weights with scales are asked about it"
    without = dict(select(O_PROJ, 1, replace(H200, csrc=False)).refused)
    assert without["skinny_linear"] == "csrc is not built into this installation"
    older = dict(select(O_PROJ, 1, replace(H200, sm=80)).refused)
    assert older["skinny_linear"] == "built for SM 9.0, not 8.0"


@pytest.mark.parametrize(
    "desc",
    [
        replace(O_PROJ, add=True),
        replace(O_PROJ, groups=8),
        replace(O_PROJ, weight_format="fp8 token", prologue="norm"),
    ],
)
def test_what_no_kernel_computes_is_an_error_with_all_reasons(desc: LinearDesc) -> None:
    with pytest.raises(NoKernelError) as error:
        select(desc, 17, H200)
    asked = [kernel for kernel in KERNELS if desc.format.scaled or not kernel.scaled]
    assert all(kernel.name in str(error.value) for kernel in asked)


def test_a_kernel_is_a_row() -> None:
    """One for groups of weights, which no kernel of the package multiplies by."""

    def refuses(desc: LinearDesc, rows: int, target: Target) -> str:
        return "" if desc.groups > 1 else "for experts"

    def run(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
        return x @ weight.T

    grouped = LinearKernel("grouped", refuses, run)
    assert select(replace(O_PROJ, groups=8), 1, H200, (*KERNELS, grouped)).kernel is grouped
    plain = LinearKernel("toy", lambda desc, rows, target: "", run)
    x, weight = torch.randn(3, 8), torch.randn(6, 8)
    rest = (None, None, None, None, "silu", None)
    if torch.cuda.is_available():  # the epilogue's kernel runs behind whatever kernel is chosen
        x, weight = x.cuda(), weight.cuda()
        got = runner((plain,))(x, weight, *rest)
        torch.testing.assert_close(got, BY_NAME["linear"].overload()(x, weight, *rest))
    got = runner((plain,))(x, weight, *[None] * 6)
    torch.testing.assert_close(got, x @ weight.T)


def test_a_weight_format_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 with a scale for each row and 64 columns: described, shaped, and refused by kernels that
    do not know it."""
    fp8 = torch.float8_e4m3fn
    made = WeightFormat("fp8 64 columns", fp8, (1, 64), (1, 64))
    monkeypatch.setitem(_linear_desc.WEIGHT_FORMATS, made.name, made)  # type: ignore[arg-type]
    assert made.scale_shapes(5, 96, 256) == ((5, 4), (96, 4))
    x, weight = (torch.zeros(n, 256).to(fp8) for n in (5, 96))
    desc = describe(x, weight, None, torch.ones(5, 4), torch.ones(96, 4), torch.bfloat16)
    assert desc == LinearDesc(made.name, torch.bfloat16, 96, 256)
    assert dict(select(desc, 1, H200).refused)["skinny_linear"].startswith("dtype")


def test_an_epilogue_is_an_argument() -> None:
    """Each changes the description by one field, and nothing else."""
    x, weight, one = torch.randn(3, 64), torch.randn(96, 64), torch.ones(1, 1)
    plain = describe(x, weight)
    assert describe(x, weight, torch.zeros(96)) == replace(plain, bias=True)
    assert describe(x, weight, activation="silu") == replace(plain, activation="silu")
    assert describe(x, weight, out_scale=one) == replace(plain, quantize=True)
    assert describe(x, weight, activation="silu").columns == 48
