"""``Launch`` describes a Triton kernel launch as data, which can be run, interpreted or compiled.

The functions in ``ops/launches`` turn an op's arguments into launches.  The rules by which a kernel
is specialized are those of ``Launch``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from .kernel_table import KERNELS
from .variant import DIVISOR, POINTERS, Constant, Variant

# Triton, too, decides this when it is imported.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Launch:
    """One launch.

    The code is specialized on the dtypes of tensors and on whether their addresses are multiples of
    16; on None and bools, by value; and on whether an integer is 1 (then it is fixed) or a multiple
    of 16, unless it is ``dynamic``.  So a model needs few variants, whatever is in a batch.

    Args:
        kernel: ``module:function`` in ``ops/triton_kernels``.
        args: run-time arguments by name, in the kernel's order.
        constexprs: compile-time constants: tiles and flags.
        dynamic: integer arguments that change with tokens, sequences, blocks or limits of these.
            They are always int32; nothing else is assumed of them.
        programmatic: start before the kernel ahead has finished, on GPUs that can.  The kernel has
            a parameter PROGRAMMATIC and begins as ``ops/triton_kernels/dependent.py`` says.
        max_registers: most registers of a thread, so that more programs fit a multiprocessor; 0: no
            bound.
    """

    kernel: str
    grid: tuple[int, ...]
    args: Mapping[str, Any]
    constexprs: Mapping[str, Constant] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    dynamic: tuple[str, ...] = ()
    programmatic: bool = True
    max_registers: int = 0

    def run(self) -> None:
        """Launch on the current stream of the tensors' device; run interpreted under
        TRITON_INTERPRET=1.

        Raises:
            ValueError: a tensor is not on a GPU, or not on that of the others.
            KernelMissingError: the variant is missing and KERNELS is sealed.
            DriverError: the driver refuses it.
        """
        if _INTERPRETED:
            self._interpret()
            return
        if 0 in self.grid:
            return
        # The key holds at least what ``variant`` depends on; computing the variant takes longer.
        constexprs = self.constexprs
        key: list[Any] = [
            self.kernel,
            self.num_warps,
            self.num_stages,
            self.programmatic,
            self.max_registers,
            *self.args,
            *constexprs,
            *constexprs.values(),
        ]
        values: list[int | float] = []
        device, dynamic = -2, self.dynamic  # -1 is the CPU
        for name, value in self.args.items():
            if isinstance(value, Tensor):
                if (index := value.get_device()) != device:
                    if device >= 0 or index < 0:
                        raise ValueError(
                            f"{self.kernel}: {name} is on {value.device}, expected one GPU for all"
                        )
                    device = index
                address = value.data_ptr()
                values.append(address)
                key += (value.dtype, address % DIVISOR == 0)
            elif name in dynamic:
                values.append(value)
            elif value.__class__ is float:
                values.append(value)
                key.append(float)
            elif value is None or value.__class__ is bool:
                key.append(str(value))
            else:
                key.append(value)
                if value != 1:
                    values.append(value)
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self.run()
            return
        key.append(device)
        found = tuple(key)
        function = KERNELS.functions.get(found)
        if function is None:
            function = KERNELS.load(found, self.variant(), device)
        function.launch(self.grid, torch._C._cuda_getCurrentRawStream(device), values)

    def _interpret(self) -> None:
        from ._triton_compile import interpret

        args = {**self.args, **self.constexprs}
        interpret(
            self.kernel, self.grid, args, num_warps=self.num_warps, num_stages=self.num_stages
        )

    def variant(self) -> Variant:
        """The variant that must be compiled for this launch; tensors may be meta or fake.

        Raises:
            TypeError: an argument is of a type that kernels do not take.
        """
        signature: list[tuple[str, str]] = []
        fixed: list[tuple[str, Constant]] = []
        divisible: list[str] = []
        for name, value in self.args.items():
            if isinstance(value, Tensor) and value.dtype in POINTERS:
                signature.append((name, POINTERS[value.dtype]))
                if _address(value) % DIVISOR == 0:
                    divisible.append(name)
            elif type(value) is float:
                signature.append((name, "fp32"))
            elif type(value) is int and name in self.dynamic:
                signature.append((name, "i32"))
            elif value is None or type(value) is bool or (type(value) is int and value == 1):
                fixed.append((name, value))
            elif type(value) is int:
                signature.append((name, "i32" if -(2**31) <= value < 2**31 else "i64"))
                if value % DIVISOR == 0:
                    divisible.append(name)
            else:
                kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise TypeError(
                    f"{self.kernel}: {name} is {kind}, expected a tensor of {[*POINTERS]}, an int, "
                    "a float, a bool or None"
                )
        return Variant(
            self.kernel,
            tuple(signature),
            (*fixed, *self.constexprs.items()),
            tuple(divisible),
            self.num_warps,
            self.num_stages,
            self.programmatic,
            self.max_registers,
        )


_Result = TypeVar("_Result")
Launches: TypeAlias = tuple[list[Launch], _Result]
"""The launches of a call in order, and the result that they write."""


def _address(tensor: Tensor) -> int:
    """The tensor's address, for questions of alignment; storage without data begins at 0."""
    if tensor.untyped_storage().device.type == "meta":
        return int(tensor.storage_offset()) * tensor.itemsize
    return tensor.data_ptr()


def variants_of(launches: Iterable[Launch]) -> set[Variant]:
    """The variants that must be compiled for these launches."""
    return {launch.variant() for launch in launches}


def representative_sizes() -> list[tuple[int, int]]:
    """Pairs (num_tokens, num_seqs) whose batches together need every variant that any batch needs.

    Tiles depend on the number of tokens, by powers of two up to 1024, and on whether the number of
    sequences exceeds certain limits: 4 for sampling, 1, 64 and 1024 for attention.  Above each
    limit there is a uniform decode, the smallest mixed batch, and a batch that fills any GPU.
    """
    by_tokens = [(1 << n, 1) for n in range(11)]
    by_seqs = [
        (tokens, seqs) for seqs in (1, 2, 5, 65, 1025) for tokens in (seqs, seqs + 1, 1 << 15)
    ]
    return sorted({*by_tokens, *by_seqs})


def run_all(launches: Iterable[Launch]) -> None:
    """Launch them in turn."""
    for launch in launches:
        launch.run()


def run_launches(launches: Callable[..., Launches[Any]]) -> Callable[..., Any]:
    """Make the function of a Triton implementation, which runs what ``launches(*args)`` describes
    and returns its result."""

    def run(*args: Any) -> Any:
        planned, result = launches(*args)
        run_all(planned)
        return result

    return run
