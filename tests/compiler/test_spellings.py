"""Spellings drawn at random, with casts, dtypes, strides, sizes and random ops: each runs under the
backend, gives what eager gives, and is refused by no verification; wrong ones are."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.compiler.dynamo_backend import clear_reports, fusewright, reports
from tests.compiler.spellings import BF16, F16, Spelling, draw

SEED, COUNT, BATCH = 14, 840, 12
STEPS = {BF16: 2.0**-8, F16: 2.0**-11, torch.float64: 2.0**-45}
"""Half a last bit, of float64 some."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a cast of complex numbers to real ones
        yield
    torch._dynamo.reset()


@functools.cache
def spellings() -> list[Spelling]:
    return draw(COUNT, SEED)


def run_all(batch: Sequence[Spelling]) -> list[list[Tensor]]:
    return [as_list(spelling.fn(*spelling.inputs)) for spelling in batch]


def as_list(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def compiled(batch: Sequence[Spelling], **options: Any) -> list[list[Tensor]]:
    """What a batch gives as one graph, every spelling with results and sites of its own."""
    torch._dynamo.reset()
    clear_reports()
    functions = [spelling.fn for spelling in batch]
    dynamic = options.pop("dynamic", False)

    def run(inputs: list[tuple[Tensor, ...]]) -> list[list[Tensor]]:
        return [as_list(fn(*given)) for fn, given in zip(functions, inputs, strict=True)]

    torch.manual_seed(0)
    fused = torch.compile(run, backend=fusewright, fullgraph=True, dynamic=dynamic, options=options)
    made: list[list[Tensor]] = fused([spelling.inputs for spelling in batch])
    return made


def eager(batch: Sequence[Spelling]) -> list[list[Tensor]]:
    torch.manual_seed(0)
    return run_all(batch)


def difference(spelling: Spelling, want: Tensor, got: Tensor) -> str:
    """What is not as eager has it, beyond a few roundings to the results' dtype."""
    if (want.dtype, want.shape) != (got.dtype, got.shape):
        return f"{want.dtype}{list(want.shape)} became {got.dtype}{list(got.shape)}"
    if want.is_complex():
        want, got = torch.view_as_real(want), torch.view_as_real(got)
    if not want.is_floating_point():
        return "" if torch.equal(want, got) else "integers differ"
    most, step = torch.finfo(want.dtype).max, STEPS.get(want.dtype, 2.0**-20)
    left, right = (value.double().clamp(-most, most) for value in (want, got))
    size = left.abs()
    if spelling.rows and want.numel():
        size = size.amax(-1, keepdim=True)
    # A subnormal number of float16 is off by 2^-25, and then scaled.
    least = 2.0**-14 if want.dtype == F16 else 1e-30 if want.dtype == torch.float64 else 1e-6
    error = (left - right).abs()
    bad = (error > 6 * step * size + least) | (left.isnan() != right.isnan())
    if not bad.any():
        return ""
    worst = int(torch.where(bad, error.nan_to_num(most), -1.0).argmax())
    return f"{left.flatten()[worst]} became {right.flatten()[worst]} at {worst}"


def differences(batch: Sequence[Spelling], results: list[list[Tensor]]) -> list[str]:
    found = []
    for spelling, want, got in zip(batch, eager(batch), results, strict=True):
        for index, (one, other) in enumerate(zip(want, got, strict=True)):
            if reason := difference(spelling, one, other):
                found.append(f"{spelling.words}: result {index}: {reason}")
    return found


def problems(batch: Sequence[Spelling], **options: Any) -> list[str]:
    """What is wrong with a batch; where it does not compile, with each of its spellings."""
    try:
        return differences(batch, compiled(batch, **options))
    except Exception as error:
        if len(batch) == 1:
            return [f"{batch[0].words}: {type(error).__name__}: {error}"]
        found = [problem for one in batch for problem in problems([one], **options)]
        return found or [f"only together: {[one.words for one in batch]}: {error}"]
