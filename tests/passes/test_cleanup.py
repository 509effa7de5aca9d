"""What computes nothing is dropped; what copies or changes anything stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright import ops
from fusewright.passes import build_passes, run_passes
from tests.compiler.test_unroll import SPEC, traced
from tests.passes.graphs import capture, hidden, targets


def test_noops_and_dead_code_go() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.view(-1, 32).to(torch.float32).contiguous()
        _unused = y * 3
        return y.reshape(y.shape[0], 32) + 1

    gm = capture(fn, x=hidden())
    (report,) = run_passes(gm, build_passes(["cleanup"]), verify=True)
    assert targets(gm) == ["add"]
    assert report.matched == 5


def test_what_does_something_stays() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.t().contiguous().to(torch.bfloat16).view(-1)

    gm = capture(fn, x=hidden())
    before = targets(gm)
    run_passes(gm, build_passes(["cleanup"]), verify=True)
    assert targets(gm) == before


def test_copies_stay() -> None:
    gm = capture(lambda x: x.to(torch.float32, copy=True).add_(1), x=hidden())
    run_passes(gm, build_passes(["cleanup"]))
    assert "to" in targets(gm)


def test_ops_that_only_mutate_stay() -> None:
    def fn(k: Tensor, kv_cache: Tensor, slots: Tensor) -> Tensor:
        heads = k.view(-1, 2, 16)
        ops.kv_store(heads, heads, kv_cache, slots)
        return k + 1

    gm = capture(
        fn,
        k=hidden(),
        kv_cache=torch.zeros(4, 2, 8, 2, 16),
        slots=torch.arange(7, dtype=torch.int32),
    )
    run_passes(gm, build_passes(["cleanup"]))
    assert "kv_store.default" in targets(gm)


def test_writes_whose_result_nobody_reads_stay() -> None:
    def fn(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        x.zero_()
        y[0] = 1
        torch.add(z, 1, out=z)
        torch.relu_(z)
        return x + y + z

    inputs = {name: hidden() for name in "xyz"}
    gm = capture(fn, **inputs)
    before = targets(gm)
    run_passes(gm, build_passes(["cleanup"]), verify=True)
    assert targets(gm) == before
    assert {"zero_", "setitem", "relu_"} <= set(before)


def cleaned(fn: Callable[..., Any], **given: Tensor) -> tuple[list[str], list[str]]:
    """Calls before and after, verified."""
    gm = capture(fn, **(given or {"x": hidden(), "y": hidden()}))
    before = targets(gm)
    run_passes(gm, build_passes(["cleanup"]), verify=True)
    return before, targets(gm)


def _same_view(x: Tensor, y: Tensor) -> Any:
    return x.view(-1, 32).expand(-1, 32)[:].squeeze(1).flatten(1) * y


def _copy(x: Tensor, y: Tensor) -> Any:
    return x.clone() * y.to(torch.float32, copy=True)


def _there_and_back(x: Tensor, y: Tensor) -> Any:
    return x.double().to(torch.float32) * y


@pytest.mark.parametrize("fn", [_same_view, _copy, _there_and_back])
def test_what_cannot_be_told_from_its_input_goes(fn: Callable[..., Any]) -> None:
    assert cleaned(fn)[1] == ["mul"]


@pytest.mark.parametrize(
    ("dtype", "through", "stays"),
    [
        (torch.bfloat16, torch.float32, False),
        (torch.float16, torch.float32, False),
        (torch.bfloat16, torch.float64, False),
        (torch.float32, torch.bfloat16, True),
        (torch.float32, torch.float16, True),
        (torch.float16, torch.bfloat16, True),
        (torch.bfloat16, torch.float16, True),
        (torch.float64, torch.float32, True),
    ],
)
def test_a_cast_there_and_back_stays_if_it_rounds(
    dtype: torch.dtype, through: torch.dtype, stays: bool
) -> None:
    x = (torch.randn(7, 32, dtype=torch.float64) * 10.0 ** torch.arange(-28, 4)).to(dtype)
    before, after = cleaned(lambda x: x.to(through).to(dtype) * 2, x=x)
    assert before == ["to", "to", "mul"]
    assert after == (before if stays else ["mul"])
    assert torch.equal(x.to(through).to(dtype), x) != stays


def test_a_cast_to_a_third_type_stays() -> None:
    before, after = cleaned(lambda x: x.float().half() * 2, x=hidden(dtype=torch.bfloat16))
    assert before == after


def test_what_was_computed_before_is_not_again() -> None:
    def fn(x: Tensor, y: Tensor, w: Tensor) -> Any:
        both = [ops.rms_norm(x + y, w, 1e-5).view(-1, 2, 16).chunk(2, -1)[1] for _ in range(2)]
        return both[0] * 2 - both[1]

    before, after = cleaned(fn, x=hidden(), y=hidden(), w=torch.randn(32))
    assert len(before) == 12
    assert after == ["add", "rms_norm.default", "view", "chunk", "getitem", "mul", "sub"]


def test_three_linears_of_one_tensor_quantize_it_once() -> None:
    def fn(x: Tensor) -> Any:
        pairs = [ops.quant_fp8_dynamic(x, 0) for _ in range(3)]
        return [q.float() * (i + scale) for i, (q, scale) in enumerate(pairs)]

    _, after = cleaned(fn, x=hidden())
    assert after.count("quant_fp8_dynamic.default") == 1
    assert after.count("getitem") == 2 and after.count("float") == 1


def _other_eps(x: Tensor, y: Tensor) -> Any:
    w = x[0]
    return ops.rms_norm(y, w, 1e-5) - ops.rms_norm(y, w, 1e-6)


def _other_alpha(x: Tensor, y: Tensor) -> Any:
    return torch.add(x, y) * torch.add(x, y, alpha=2)


def _other_type(x: Tensor, y: Tensor) -> Any:
    return x.div(2) * x.div(2, rounding_mode="floor") * y.pow(2) * y.pow(2.5)


def _other_step(x: Tensor, y: Tensor) -> Any:
    return x[..., 0:4:2] * x[..., 0:4:3] + y[..., :2]


def _swapped(x: Tensor, y: Tensor) -> Any:
    return (x - y) * (y - x)


def _random(x: Tensor, y: Tensor) -> Any:
    return torch.rand_like(x) * torch.rand_like(x) * F.dropout(y, 0.5) * F.dropout(y, 0.5)


def _written_between(x: Tensor, y: Tensor) -> Any:
    first = x * y
    x.add_(1)
    return first - x * y


def _viewed_and_written_between(x: Tensor, y: Tensor) -> Any:
    flat = x.view(-1)
    first = flat * 2
    x.add_(1)
    return first - flat * 2, y


def _one_of_two_is_written(x: Tensor, y: Tensor) -> Any:
    first, second = x + y, x + y
    second.mul_(2)
    return first - second


def _both_are_returned(x: Tensor, y: Tensor) -> Any:
    return x + y, x + y


def _buffers(x: Tensor, y: Tensor) -> Any:
    first, second = torch.empty_like(x), torch.empty_like(x)
    torch.add(x, y, out=first)
    torch.sub(x, y, out=second)
    return first * second


def _source_of_a_copy_is_written(x: Tensor, y: Tensor) -> Any:
    kept = x.clone()
    x.add_(1)
    return kept - x, y


def _copy_is_written(x: Tensor, y: Tensor) -> Any:
    mine = x.to(torch.float32, False, True)
    mine.add_(1)
    return mine - x, y


def _copy_is_returned(x: Tensor, y: Tensor) -> Any:
    return x.clone(), y


def _view_of_a_copy_is_written(x: Tensor, y: Tensor) -> Any:
    mine = x.double().float()
    mine.view(-1).add_(1)
    return mine - x, y


def _to_other_strides(x: Tensor, y: Tensor) -> Any:
    return x.t().contiguous().view(-1) - y.t().clone(memory_format=torch.contiguous_format).view(-1)


@pytest.mark.parametrize(
    "fn",
    [
        _other_eps,
        _other_alpha,
        _other_type,
        _other_step,
        _swapped,
        _random,
        _written_between,
        _viewed_and_written_between,
        _one_of_two_is_written,
        _both_are_returned,
        _buffers,
        _source_of_a_copy_is_written,
        _copy_is_written,
        _copy_is_returned,
        _view_of_a_copy_is_written,
        _to_other_strides,
    ],
)
def test_a_near_miss_stays(fn: Callable[..., Any]) -> None:
    before, after = cleaned(fn)
    assert after == before


def test_the_decoder_has_nothing_to_clean() -> None:
    """So that pieces stay as they were: equal from layer to layer."""
    gm = traced(replace(SPEC, num_layers=3, sliding_windows=(0,) * 3), "cpu").gm
    (report,) = run_passes(gm, build_passes(["cleanup"]), verify=True)
    assert not report.sites


def test_sizes_are_not_guarded_on() -> None:
    """To ask whether a dynamic size is 32 would tie the code to the answer for the example."""
    gm = capture(lambda x: x.transpose(0, 1).sum(0), x=hidden(tokens=33))
    fakes = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    (env,) = {f.shape[0].node.shape_env for f in fakes if isinstance(f, Tensor)}
    guards = len(env.guards)
    run_passes(gm, build_passes(["cleanup"]), verify=True)
    assert len(env.guards) == guards
