"""Every implementation of every op does what the op's reference and fake say, on fresh inputs.

bfloat16 under Triton's interpreter: numpy has no such type, so the interpreter keeps the bits as
integers.  Loads, stores and casts to and from float32 work (casts truncate instead of rounding to
nearest: off by up to a unit in the last place, not half of one); arithmetic and ``tl.dot`` on
bfloat16 do not.  Kernels therefore compute in float32, and interpreted bfloat16 gets twice the
tolerance; on a GPU nothing is widened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map_only

from fusewright.ops import ALL_OPS, Case, Implementation, SemanticOp
from fusewright.ops.conformance import ConformanceError, check_case
from fusewright.ops.core.desc import Tolerance
from fusewright.ops.core.float8 import E4M3

# The interpreter's numpy overflows aloud where hardware saturates.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

# Those that ranks call together are checked in ranks, by test_all_reduce.py.
LOCAL_OPS = [op for op in ALL_OPS if not op.collective]
PAIRS = [
    pytest.param(op, impl, id=f"{op.name}-{impl.name}")
    for op in LOCAL_OPS
    for impl in op.implementations
]
TRIPLES = [
    pytest.param(op, impl, dtype, id=f"{op.name}-{impl.name}-{str(dtype).removeprefix('torch.')}")
    for op in LOCAL_OPS
    for impl in op.implementations
    for dtype in op.dtypes
]


def sm_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def rounds_on(device: torch.device) -> int:
    """How many seeds; one on a CPU, where every run draws another."""
    return 1 if device.type == "cpu" else 3


def tolerance_of(
    op: SemanticOp, impl: Implementation, case: Case, dtype: torch.dtype, device: torch.device
) -> Tolerance:
    """The case's own; twice that for bfloat16 interpreted, whose roundings err twice as far.

    An op on integers needs none: they are compared exactly.
    """
    tolerance = op.tolerance(case, dtype)
    if impl.launches is not None and device.type == "cpu" and dtype == torch.bfloat16:
        return Tolerance(2 * tolerance.atol, 2 * tolerance.rtol)
    return tolerance


def seeded_cases(
    op: SemanticOp, dtype: torch.dtype, device: torch.device, seed: int
) -> Iterator[Case]:
    return op.cases(dtype, device, torch.Generator(device).manual_seed(seed))


def runnable(op: SemanticOp, impl: Implementation, case: Case, device: torch.device) -> str:
    """Empty, or why ``impl`` does not run this case here; Triton runs anywhere, interpreted."""
    if impl.launches is None and device.type not in impl.devices:
        return f"not for {device.type}"
    desc = op.describe(case.args, sm=sm_of(device))
    return impl.supports(desc)


@pytest.mark.product(6)
@pytest.mark.parametrize(("op", "impl", "dtype"), TRIPLES)
def test_implementation_matches_reference(
    op: SemanticOp,
    impl: Implementation,
    dtype: torch.dtype,
    device: torch.device,
    fw_seed: int,
    fw_cases: int,
) -> None:
    checked, refused = 0, {}
    # Interpreting takes seconds: every second case is checked, in one dtype; a run with another
    # seed has the others.
    interpreted = impl.launches is not None and device.type == "cpu"
    turn, most = op.dtypes.index(dtype), len(op.dtypes) * (2 if fw_cases == 1 else 1)
    for seed in range(fw_seed, fw_seed + rounds_on(device)):
        for index, case in enumerate(seeded_cases(op, dtype, device, seed)):
            if reason := runnable(op, impl, case, device):
                refused[case.label] = reason
                continue
            if index and interpreted and (index + seed + turn) % most:
                continue
            try:
                tolerance = tolerance_of(op, impl, case, dtype, device)
                check_case(op, op.overload(impl.name), case, tolerance)
            except ConformanceError as error:
                pytest.fail(f"{impl.name}: {error}\nreplay with --fw-seed={seed}", pytrace=False)
            checked += 1
    if not checked:
        pytest.skip(f"no case runs here: {refused}")


@pytest.mark.product
@pytest.mark.parametrize(("op", "impl"), PAIRS)
def test_dispatcher_op_is_registered_soundly(
    op: SemanticOp, impl: Implementation, device: torch.device, fw_seed: int
) -> None:
    """Schema (mutation, aliasing) and fake, by PyTorch's own checker, on the first case."""
    case = next(seeded_cases(op, op.dtypes[0], device, fw_seed))
    if reason := runnable(op, impl, case, device):
        pytest.skip(reason)
    # PyTorch's check of the schema multiplies what it is given, which FP8 cannot.
    tensors = [arg for arg in tree_leaves(case.args) if isinstance(arg, Tensor)]
    fp8 = any(tensor.dtype == E4M3 for tensor in tensors)
    checks = ("test_faketensor",) if fp8 else ("test_schema", "test_faketensor")
    torch.library.opcheck(op.overload(impl.name), case.args, test_utils=checks)


INLINE = [pair for pair in PAIRS if pair.values[1].inline]


@pytest.mark.parametrize(("op", "impl"), INLINE)
def test_inline_implementation_dissolves_into_aten(
    op: SemanticOp, impl: Implementation, device: torch.device, fw_seed: int
) -> None:
    """What Inductor gets to fuse: no op of ours is left, with every dimension dynamic."""
    case = next(seeded_cases(op, op.dtypes[0], device, fw_seed))
    tensors = [arg for arg in tree_leaves(case.args) if isinstance(arg, Tensor)]

    def call(*given: Tensor) -> Any:
        rest = iter(given)
        args = tree_map_only(Tensor, lambda _: next(rest), case.args)
        return op.overload(impl.name)(*args)

    traced = make_fx(call, tracing_mode="symbolic")(*tensors)
    called = {node.target for node in traced.graph.nodes if node.op == "call_function"}
    ours = [str(target) for target in called if str(target).startswith("fw")]
    assert called and not ours


@pytest.mark.parametrize("op", ALL_OPS, ids=lambda op: op.name)
def test_cases_are_distinct_fresh_and_cover_every_dtype(op: SemanticOp, fw_seed: int) -> None:
    cpu = torch.device("cpu")
    for dtype in op.dtypes:
        cases = list(seeded_cases(op, dtype, cpu, fw_seed))
        labels = [case.label for case in cases]
        assert len(set(labels)) == len(labels), f"two cases of {op.name} share a label"
        again = list(seeded_cases(op, dtype, cpu, fw_seed))
        other = list(seeded_cases(op, dtype, cpu, fw_seed + 1))
        assert _bytes(cases) == _bytes(again), "the generator is not the only source of randomness"
        assert _bytes(cases) != _bytes(other), "the inputs do not depend on the seed"


def _bytes(cases: list[Case]) -> list[bytes]:
    return [
        arg.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for case in cases
        for arg in tree_leaves(case.args)
        if isinstance(arg, Tensor)
    ]


# The test of the test: each of these is wrong in one way, and must be caught.


def _skip_last(fn: Callable[..., Any], *args: Any) -> Any:
    """Leaves the last element of fresh memory unwritten."""
    right = fn(*args)
    out = torch.empty(right.shape, dtype=right.dtype, device=right.device)
    out.view(-1)[:-1] = right.view(-1)[:-1]
    return out


def _one_nan(fn: Callable[..., Any], *args: Any) -> Any:
    out = fn(*args)
    out.view(-1)[0] = torch.nan
    return out


def _one_percent(fn: Callable[..., Any], *args: Any) -> Any:
    out = fn(*args)
    out.view(-1)[-1] += 0.01
    return out


def _other_stride(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args).t().contiguous().t()


def _other_dtype(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args).double()


def _other_shape(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)[:1]


def _extra_output(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args), fn(*args)


def _changes_input(fn: Callable[..., Any], *args: Any) -> Any:
    out = fn(*args)
    args[1].view(-1)[0] += 1
    return out


def _returns_input(fn: Callable[..., Any], *args: Any) -> Any:
    return args[0].copy_(fn(*args))


def _writes_past_the_end(fn: Callable[..., Any], *args: Any) -> Any:
    out = fn(*args)
    args[0].as_strided((1,), (1,), args[0].storage_offset() + args[0].numel())[0] = 0
    return out


WRONG = (
    _skip_last,
    _one_nan,
    _one_percent,
    _other_stride,
    _other_dtype,
    _other_shape,
    _extra_output,
    _changes_input,
    _returns_input,
    _writes_past_the_end,
)


def _rms_norm_case(device: torch.device, seed: int) -> tuple[SemanticOp, Case]:
    op = next(op for op in ALL_OPS if op.name == "rms_norm")
    return op, next(c for c in seeded_cases(op, torch.float32, device, seed) if "7" in c.label)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda fn: fn.__name__.strip("_"))
def test_a_wrong_implementation_is_caught(
    wrong: Callable[..., Any], device: torch.device, fw_seed: int
) -> None:
    op, case = _rms_norm_case(device, fw_seed)
    tolerance = op.tolerances[torch.float32]
    check_case(op, op.reference, case, tolerance)
    with pytest.raises(ConformanceError, match="rms_norm"):
        check_case(op, lambda *args: wrong(op.reference, *args), case, tolerance)


def test_a_wrong_write_to_a_mutated_argument_is_caught(device: torch.device, fw_seed: int) -> None:
    op = next(op for op in ALL_OPS if op.name == "kv_store")
    case = next(seeded_cases(op, torch.float32, device, fw_seed))

    def touches_a_neighbour(k: Tensor, v: Tensor, cache: Tensor, slots: Tensor, _: None) -> None:
        op.reference(k, v, cache, slots)
        cache[-1, 1, -1, 0, 0] += 1 if int(slots[0]) + 1 < cache.shape[0] * cache.shape[2] else 0
        cache[0, 0, 0, 0, 0] += 1 if int(slots[0]) else 0

    with pytest.raises(ConformanceError, match="mutated argument kv_cache"):
        check_case(op, touches_a_neighbour, case, op.tolerances[torch.float32])
    with pytest.raises(ConformanceError, match="mutated argument kv_cache"):
        check_case(op, lambda *args: None, case, op.tolerances[torch.float32])
