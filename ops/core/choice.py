"""The one chooser: ``select(description, rows, target, kernels)`` returns a ``Choice``: of kernels
in order of preference, the first that does not refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from .launch import Launch
from .target import Target

Ask: TypeAlias = Callable[[Any, int, Target], str]


def nothing(desc: Any, rows: int, target: Target) -> str:
    return ""


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel: why it does not serve a description with so many rows on a target, "" if it does,
    and with what parameters it runs; for people, as its name."""

    name: str
    refuses: Ask = nothing
    parameters: Ask = nothing


@dataclass(frozen=True)
class Choice:
    """The kernel or implementation that was chosen for an op or a part of it, why each that goes
    before it was refused, and with what parameters it runs."""

    of: str
    kernel: Any
    refused: tuple[tuple[str, str], ...] = ()
    parameters: str = ""

    @property
    def name(self) -> str:
        return str(self.kernel.name)

    @property
    def reason(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self.refused)

    def __str__(self) -> str:
        how = f" [{self.parameters}]" if self.parameters else ""
        return f"{self.of} -> {self.name}{how}" + (f" ({self.reason})" if self.refused else "")


class KernelName(str):
    """The name of a kernel that a call launches, and the choice that led to it.  An op that is made
    of others joins their names, and so hands their choices on."""

    choice: Choice

    def __new__(cls, choice: Choice) -> KernelName:
        name = super().__new__(cls, choice.name)
        name.choice = choice
        return name


class NoKernelError(ValueError):
    """Every kernel of a table refuses."""


def select(desc: Any, rows: int, target: Target, kernels: Sequence[Any], of: str) -> Choice:
    """Choose the kernel for a description with so many rows: a pure function, printable.

    Raises:
        NoKernelError: all of them refuse; has their reasons.
    """
    refused: list[tuple[str, str]] = []
    for kernel in kernels:
        reason = kernel.refuses(desc, rows, target)
        if not reason:
            parameters = kernel.parameters(desc, rows, target)
            return Choice(of, kernel, tuple(refused), parameters)
        refused.append((kernel.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
    raise NoKernelError(f"no kernel for {rows} rows of {desc}: {reasons}")


def launched(launches: Iterable[Launch], of: str) -> tuple[Choice, ...]:
    """The kernels of Triton launches, which nothing was chosen for."""
    return tuple(Choice(of, Kernel(launch.kernel.partition(":")[2])) for launch in launches)
