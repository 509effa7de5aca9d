"""Refuses impossible kernel choices before anything is compiled."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ... import ops
from ...config import UserError, option_specs


def check_kernels(kernels: Mapping[str, str]) -> None:
    """Refuse forced implementations if the op does not exist or does not have them.

    Raises:
        UserError: names the ops or implementations that exist.
    """
    for name, implementation in kernels.items():
        if name not in ops.BY_NAME:
            raise UserError(f"kernels={name}=…: no such op; known: {', '.join(ops.BY_NAME)}")
        known = [impl.name for impl in ops.BY_NAME[name].implementations]
        if not set(implementation.split("/")) <= set(known):
            raise UserError(
                f"kernels={name}={implementation}: {name} has no such implementation; "
                f"it has: {', '.join(known)}"
            )


def check_used(named: Iterable[str], used: Collection[str]) -> None:
    """Refuse a kernel choice for an op that is never called.

    Args:
        named: the ops whose kernels the user chose.
        used: the ops of the program and those called beside it.

    Raises:
        UserError: names the ops that are called.
    """
    for name in named:
        if name not in used:
            raise UserError(
                f"kernels={name}=…: nothing calls {name} in this model with these passes; its ops: "
                f"{', '.join(sorted(used))}"
            )


def called(choices: Iterable[str], outside: Iterable[str]) -> set[str]:
    """Names of all ops that are called: those of printed kernel choices, and those ``outside``."""
    return {choice.partition(" -> ")[0] for choice in choices} | set(outside)


def unfit(name: str, forced: str, error: ops.NoImplementationError) -> UserError:
    """The error if the implementation that was asked for does not fit a call of the model."""
    reasons = [reason for _, reason in error.rejected]
    if len(reasons) > 1:
        reasons = [f"{tried}: {reason}" for tried, reason in error.rejected]
    what, fitting = f"kernels={name}={forced}", list(error.fitting)
    if name == "paged_attention":
        (spec,) = (spec for spec in option_specs() if spec.name == "attention_backend")
        what = f"attention backend {forced}"
        fitting = [*(choice for choice in fitting if choice in spec.choices), "auto"]
    return UserError(f"{what}: {'; '.join(reasons)}; use {' or '.join(fitting) or 'another'}")
