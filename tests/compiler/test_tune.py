"""-O3 prefers what is measured to be fastest, among what fits."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fusewright import ops
from fusewright.compiler.lowering.tune import NUM_TOKENS, Timer, Tuner, _rotated


def fake_timer(log: list[str], us: dict[str, Sequence[float]]) -> Timer:
    """Runs the calls, finds out which implementation they are, and answers with its next figure."""

    def timer(fns: Sequence[Callable[[], Any]]) -> float:
        called: list[str] = []

        class Spy(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                called.append(func.namespace.removeprefix("fw_"))
                return func(*args, **(kwargs or {}))

        with Spy():
            for fn in fns[:2]:
                fn()
        name = "triton" if "triton" in called else "native"
        log.append(name)
        return us[name][log.count(name) - 1]

    return timer


def describe(op: ops.SemanticOp, args: tuple[Any, ...]) -> ops.OpDesc:
    """As on a GPU, where Triton fits; the call itself runs under the interpreter."""
    desc = op.describe(args)
    return ops.OpDesc(desc.op, desc.args, "cuda", 90)


@pytest.mark.parametrize(
    ("native", "chosen"),
    [
        ((1.0, 2.0, 3.0, 8.0), "native"),  # half the time at every number of rows
        ((2.0, 4.0, 6.0, 10.0), "native"),  # faster for many rows, else equal
        ((1.0, 4.0, 6.0, 17.0), "triton"),  # faster for few, slower for many
        ((3.0, 4.0, 6.0, 4.0), "triton"),  # a smaller sum, but slower for few
        ((1.95, 3.9, 5.9, 15.9), "triton"),  # noise
        ((1.94, 4.0, 6.0, 16.48), "triton"),  # three percent either way, noise too
        ((1.93, 4.0, 6.0, 16.48), "native"),
        ((1.93, 4.0, 6.0, 16.49), "triton"),
    ],
)
def test_what_is_faster_somewhere_and_slower_nowhere_is_chosen(
    native: Sequence[float], chosen: str
) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs the interpreter: CPU tensors")
    op, args = ops.BY_NAME["silu_mul"], (torch.randn(4, 32),)
    us: dict[str, Sequence[float]] = {"triton": (2.0, 4.0, 6.0, 16.0), "native": native}
    log: list[str] = []
    tuner = Tuner(fake_timer(log, us))
    desc = describe(op, args)
    order = tuner.order(op, desc, args)
    assert order[0].name == chosen and set(order) == set(op.implementations)
    assert ops.choose(op, desc, inline_first=False, order=order).name == chosen
    assert len(log) == 2 * len(NUM_TOKENS)
    assert tuner.order(op, desc, args) is order and len(log) == 2 * len(NUM_TOKENS)
    again = Tuner(fake_timer([], {}), known=json.loads(json.dumps(tuner.measured)))
    assert again.order(op, desc, args) == order and not again.measured
    assert Tuner(known={}).order(op, desc, args) == op.implementations
    (times,) = tuner.measured.values()
    assert times == {n: dict(zip(NUM_TOKENS, figures, strict=True)) for n, figures in us.items()}


@pytest.mark.parametrize("nbytes", [0, 1, 6 << 20, 50 << 20, (100 << 20) - 1, 100 << 20, 1 << 30])
def test_copies_of_the_inputs_are_just_more_than_the_cache_holds(nbytes: int) -> None:
    values = [torch.empty(nbytes, dtype=torch.int8, device="meta"), 1e-5, None]
    copies = _rotated(values)
    assert copies[0] is values and all(copy[1:] == [1e-5, None] for copy in copies)
    assert len({id(copy[0]) for copy in copies}) == len(copies) <= 20
    assert len(copies) == 20 or len(copies) * nbytes > 100 << 20
    assert (len(copies) - 1) * nbytes <= 100 << 20


def test_ops_that_mutate_keep_their_order() -> None:
    op = ops.BY_NAME["kv_store"]
    tuner = Tuner(fake_timer([], {}))
    assert tuner.order(op, describe(op, ()), ()) == op.implementations
    assert not tuner.measured


def test_what_reads_values_on_the_host_is_not_timed() -> None:
    """No CUDA graph holds the definition of ``expert_linear``."""
    op, ids = ops.BY_NAME["expert_linear"], torch.zeros(4, 2, dtype=torch.int32)
    args = (torch.randn(4, 64).bfloat16(), torch.randn(4, 32, 64).bfloat16(), ids)
    desc = describe(op, args)
    assert not any(impl.supports(desc) for impl in op.implementations)
    tuner = Tuner(fake_timer([], {}))
    assert tuner.order(op, desc, args) == op.implementations
    assert not tuner.measured


def test_a_forced_kernel_wins_over_the_measurement() -> None:
    op, args = ops.BY_NAME["silu_mul"], (torch.randn(4, 32),)
    order = tuple(reversed(op.implementations))
    choice = ops.choose(op, describe(op, args), inline_first=False, override="triton", order=order)
    assert choice.name == "triton"


def test_what_is_opt_in_is_chosen_by_name_alone() -> None:
    """However fast it may be in isolation, and at the head of the list."""
    op = ops.BY_NAME["silu_mul"]
    desc = describe(op, (torch.randn(3, 8),))
    triton, native = op.implementations
    order = (replace(triton, opt_in=True), native)
    choice = ops.choose(op, desc, inline_first=False, order=order)
    assert choice.name == "native"
    assert choice.refused == (
        ("triton", "only by --kernels: not known to be faster in whole models"),
    )
    assert ops.choose(op, desc, inline_first=False).name == "triton"
