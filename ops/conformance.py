"""Checks that an implementation does what its op says: one call on one case, against the reference.

Whatever runs kernels checks them here: the conformance tests, the benchmarks before they time, the
autotuner before it trusts.  Nothing but the op's own declaration is consulted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .core.desc import Case, Tolerance
from .core.float8 import E4M3
from .core.op import SemanticOp

# Written around mutated arguments, to catch stores past either end.
_GUARD_BYTES = 4096
_GUARD = 0xA5


class ConformanceError(AssertionError):
    """An implementation disagrees with its op's reference or fake."""


def check_case(op: SemanticOp, run: Callable[..., Any], case: Case, tolerance: Tolerance) -> None:
    """Run ``run(*case.args)`` and compare with ``op``.

    Compared: values of outputs and mutated arguments with the reference on the same inputs; dtypes,
    shapes and strides with the fake.  Refused: NaN, any change of an argument that the op does not
    declare as mutated, writes around a mutated one, an output that aliases an argument or another
    output.  Memory the implementation allocates starts as NaN (integers: their maximum), so that
    what it forgets to write shows.

    Raises:
        ConformanceError: names op, case, tensor and the first disagreement.
    """
    names = [argument.name for argument in op.overload()._schema.arguments]
    expected_args = [_replica(value) for value in case.args]
    actual_args = [_replica(value) for value in case.args]
    where = f"{op.name}, case {case.label!r}"
    expected = op.overload()(*expected_args)
    with _poisoned_memory():
        actual = run(*actual_args)
    expected_outputs, actual_outputs = _tensors(expected), _tensors(actual)
    if len(actual_outputs) != len(expected_outputs):
        raise ConformanceError(
            f"{where}: {len(actual_outputs)} outputs, expected {len(expected_outputs)}"
        )
    _check_fake(op, case, actual_outputs, where)
    _check_aliases(actual_outputs, actual_args, where)
    for i, (got, want) in enumerate(zip(actual_outputs, expected_outputs, strict=True)):
        compare(got, want, _bound(got, op, case, tolerance), f"{where}: output {i}")
    rows = zip(names, actual_args, expected_args, case.args, strict=False)
    for name, got, want, original in _each_tensor(rows):
        _check_guards(got, f"{where}: argument {name}")
        if name in op.mutates:
            bound = _bound(got, op, case, tolerance)
            compare(got, want, bound, f"{where}: mutated argument {name}")
        elif not torch.equal(_storage_bytes(got), _storage_bytes(_replica(original))):
            raise ConformanceError(f"{where}: argument {name} was changed; mutates={op.mutates}")


def _each_tensor(rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """The rows (name, tensor, ...), in which lists of tensors are a row for each of them."""
    for name, *values in rows:
        if isinstance(values[0], list):
            yield from ((name, *each) for each in zip(*values, strict=True))
        elif isinstance(values[0], Tensor):
            yield name, *values


def _bound(tensor: Tensor, op: SemanticOp, case: Case, tolerance: Tolerance) -> Tolerance:
    """``tolerance``; for a tensor of FP8 or int8 its own, whatever the dtype of the call."""
    found = op.tolerances if case.tolerances is None else case.tolerances
    default = {E4M3: tolerance, torch.int8: Tolerance(0.0, 0.0)}.get(tensor.dtype)
    return found.get(tensor.dtype, default) if default else tolerance


def compare(actual: Tensor, expected: Tensor, tolerance: Tolerance, where: str) -> None:
    """Raise ConformanceError unless ``actual`` is within tolerance.  Integers must be equal unless
    they are int8, which are quantized values; a NaN never passes."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise ConformanceError(f"{where} is {_describe(actual)}, expected {_describe(expected)}")
    if not expected.dtype.is_floating_point:
        steps = tolerance.atol if expected.dtype == torch.int8 else 0
        bad = (actual.long() - expected.long()).abs() > steps
    else:
        actual, expected = actual.double(), expected.double()
        # An infinite expectation has no error bound: only the same infinity equals it.
        bound = tolerance.atol + tolerance.rtol * expected.abs()
        close = ((actual - expected).abs() <= bound) & expected.isfinite()
        bad = ~(close | (actual == expected))
    if bad.any():
        index = tuple(int(i) for i in bad.nonzero()[0])
        raise ConformanceError(
            f"{where} differs in {int(bad.sum())} of {bad.numel()} elements; first at "
            f"{list(index)}: {actual[index].item()}, expected {expected[index].item()} "
            f"(atol {tolerance.atol}, rtol {tolerance.rtol})"
        )


def _replica(value: Any) -> Any:
    """The tensor with its storage, strides and offset copied, between guard bands."""
    if isinstance(value, list):
        return [_replica(each) for each in value]
    if not isinstance(value, Tensor):
        return value
    source = _bytes_of(value.untyped_storage())
    size = source.numel() + 2 * _GUARD_BYTES
    buffer = torch.full((size,), _GUARD, dtype=torch.uint8, device=value.device)
    buffer[_GUARD_BYTES : size - _GUARD_BYTES] = source
    replica = torch.empty(0, dtype=value.dtype, device=value.device)
    offset = _GUARD_BYTES // value.dtype.itemsize + value.storage_offset()
    replica.set_(buffer.untyped_storage(), offset, value.shape, value.stride())
    return replica


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storage_bytes(replica: Tensor) -> Tensor:
    return _bytes_of(replica.untyped_storage())[_GUARD_BYTES:-_GUARD_BYTES]


def _check_guards(replica: Tensor, where: str) -> None:
    held = _bytes_of(replica.untyped_storage())
    if (held[:_GUARD_BYTES] != _GUARD).any() or (held[-_GUARD_BYTES:] != _GUARD).any():
        raise ConformanceError(f"{where}: something wrote outside of its storage")


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Have torch fill what it allocates, in Python and C++, as it does with deterministic
    algorithms."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_before = torch.is_deterministic_algorithms_warn_only_enabled()
    fill_before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_before)
        torch.utils.deterministic.fill_uninitialized_memory = fill_before  # type: ignore[attr-defined]


def _tensors(result: Any) -> list[Tensor]:
    if result is None:
        return []
    return [result] if isinstance(result, Tensor) else list(result)


def _check_fake(op: SemanticOp, case: Case, outputs: list[Tensor], where: str) -> None:
    with FakeTensorMode() as mode:
        args = tree_map_only(Tensor, mode.from_tensor, list(case.args))
        fakes = _tensors(op.fake(*args))
    if len(fakes) != len(outputs):
        raise ConformanceError(f"{where}: {len(outputs)} outputs, the fake has {len(fakes)}")
    for i, (got, fake) in enumerate(zip(outputs, fakes, strict=True)):
        if _describe(got) != _describe(fake) or got.device.type != fake.device.type:
            raise ConformanceError(
                f"{where}: output {i} is {_describe(got)} on {got.device.type}, the fake says "
                f"{_describe(fake)} on {fake.device.type}"
            )


def _describe(tensor: Tensor) -> str:
    """Dtype, shape and strides, without the strides of dimensions that have no second element."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    stride = [step if size > 1 else "-" for size, step in pairs] if tensor.numel() else "any"
    return f"{tensor.dtype} {list(tensor.shape)} stride {stride}"


def _check_aliases(outputs: list[Tensor], args: list[Any], where: str) -> None:
    def storage(tensor: Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    tensors = [arg for arg in tree_leaves(args) if isinstance(arg, Tensor)]
    taken = {storage(arg): "an argument" for arg in tensors}
    for i, output in enumerate(outputs):
        if output.numel() == 0:
            continue
        if storage(output) in taken:
            raise ConformanceError(f"{where}: output {i} aliases {taken[storage(output)]}")
        taken[storage(output)] = f"output {i}"
