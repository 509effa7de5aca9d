"""``torch.compile(backend="fusewright")``: fuses plain modules, says what it did not fuse."""

from __future__ import annotations

import importlib.metadata
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from fusewright.compiler.dynamo_backend import (
    GraphReport,
    UnfusedWarning,
    clear_reports,
    fusewright,
    reports,
)
from tests.compiler.plain_decoder import Norm, PlainDecoder

EAGER = {"rest": "eager"}
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    clear_reports()
    torch.manual_seed(0)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error", UnfusedWarning)
        yield
    torch._dynamo.reset()


def compiled(model: Callable[..., Any], dynamic: bool | None = None, **options: Any) -> Any:
    return torch.compile(model, backend=fusewright, dynamic=dynamic, options=options)


def only_report() -> GraphReport:
    (report,) = reports()
    return report


def counts(report: GraphReport) -> dict[str, int]:
    assert not [site for one in report.passes for site in one.missed]
    return {one.name: one.matched for one in report.passes if one.name != "cleanup"}


def assert_close(got: Tensor, want: Tensor) -> None:
    """Within what roundings of bf16 in another order may do to the logits of a small model."""
    assert got.dtype == want.dtype
    error = (got.float() - want.float()).abs().max() / want.float().abs().max()
    bound = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}[want.dtype]
    assert error < bound, error


ALL = {"canonicalize_norm": 5, "canonicalize_rope": 4, "fuse_add_norm": 4, "fuse_act": 2}


@pytest.mark.parametrize(
    ("gemma", "dtype", "dynamic"),
    [(False, torch.float32, None), (True, torch.float16, None), (True, torch.bfloat16, True)],
)
def test_a_plain_decoder_is_fused(gemma: bool, dtype: torch.dtype, dynamic: bool | None) -> None:
    model = PlainDecoder(gemma=gemma).to(dtype)
    run = compiled(model, dynamic, verify=True, **EAGER)
    for shape in [(2, 7), (3, 5)] if dynamic else [(2, 7)]:
        ids = torch.randint(0, 128, shape)
        assert_close(run(ids), model(ids))
    assert counts(only_report()) == ALL
    assert sum(only_report().library_calls.values()) == 2


def test_inductor_compiles_the_rest() -> None:
    norm = Norm(64, gemma=True).bfloat16()
    run = compiled(norm)
    x = torch.randn(3, 64).bfloat16()
    torch.testing.assert_close(run(x), norm(x))
    assert list(only_report().choices) == ["rms_norm -> native (triton: not for cpu)"]


@pytest.mark.gpu
@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hand_kernels_run_on_a_gpu(gemma: bool, dtype: torch.dtype) -> None:
    model = PlainDecoder(gemma=gemma, size=256).to("cuda", dtype)
    run = compiled(model, True, verify=True)
    for shape in [(2, 33), (3, 5)]:
        ids = torch.randint(0, 128, shape, device="cuda")
        assert_close(run(ids), model(ids))
    assert counts(only_report()) == ALL
    assert all("-> triton" in choice for choice in only_report().choices), str(only_report())
