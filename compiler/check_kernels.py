"""Refuses kernel choices that cannot be, before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping

from .. import ops
from ..config import UserError


def check_kernels(kernels: Mapping[str, str]) -> None:
    """Refuse forced implementations of ops that do not exist or do not have them.

    Raises:
        UserError: names what is there.
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
