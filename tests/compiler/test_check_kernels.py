"""A kernel choice for an op that nothing calls is refused; ops outside of the program count."""

from __future__ import annotations

import pytest

from fusewright.compiler.lowering.check_kernels import called, check_used
from fusewright.config import UserError


def test_ops_are_called_in_the_program_or_beside_it() -> None:
    used = called(["rms_norm -> triton", "linear -> native: the only one"], ["sample", "linear"])
    assert used == {"rms_norm", "linear", "sample"}
    check_used(["sample", "rms_norm"], used)
    check_used([], ())
    with pytest.raises(
        UserError,
        match=r"^kernels=argmax=…: nothing calls argmax .*; its ops: linear, rms_norm, sample$",
    ):
        check_used(["linear", "argmax"], used)
