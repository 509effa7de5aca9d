"""``linear`` against float64: conformance compares with a reference that is F.linear itself."""

from __future__ import annotations

import pytest
import torch

from fusewright.ops import BY_NAME

OP = BY_NAME["linear"]


@pytest.mark.parametrize("implementation", [impl.name for impl in OP.implementations])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-6), (torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-9)],
)
def test_every_case_is_near_float64(
    implementation: str, dtype: torch.dtype, tolerance: float, device: torch.device, fw_seed: int
) -> None:
    generator = torch.Generator(device).manual_seed(fw_seed)
    for case in OP.cases(dtype, device, generator):
        x, weight, bias = case.args
        exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
        got = OP.overload(implementation)(*case.args).double()
        # Relative to the row's size: single elements may cancel.
        error = (got - exact).abs().max() / exact.abs().max() if exact.numel() else 0.0
        assert error <= tolerance, f"{case.label}: {error}, --fw-seed={fw_seed}"
