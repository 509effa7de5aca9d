"""An op's dtype argument survives the plan, its JSON and the code of a piece."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fusewright import ops
from fusewright.compiler.capture.trace import trace
from fusewright.compiler.emit.make_plan import make_plan
from fusewright.compiler.emit.pieces import emit
from fusewright.compiler.lowering.lower import lower
from fusewright.compiler.lowering.partition import partition
from fusewright.compiler.run.plan import Dtype, OpStep, PieceStep, Plan
from fusewright.compiler.run.program import _op_call as op_call
from fusewright.compiler.run.runtime import load_piece


class Quantized(nn.Module):
    """A norm into FP8 and a linear: one piece.  Without the norm: a single op, which the plan
    calls itself."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.norm = norm
        self.register_buffer("weight", torch.randn(48, 64).to(torch.float8_e4m3fn))
        self.register_buffer("norm_weight", torch.rand(64))
        self.register_buffer("scale", torch.full((1, 1), 0.02))

    def forward(self, x: Tensor) -> Tensor:
        weight, scale = self.get_buffer("weight"), self.get_buffer("scale")
        if self.norm:
            norm_weight = self.get_buffer("norm_weight")
            x = torch.ops.fw.rms_norm_quant_static(x, norm_weight, 1e-5, scale)
        return ops.linear(x, weight, None, scale, scale, torch.bfloat16)


def planned(norm: bool) -> tuple[Quantized, Tensor, Plan, dict[str, str]]:
    """Model, input, plan as read back from JSON, and the source of its pieces."""
    model, x = Quantized(norm), torch.randn(37, 64)
    x = x if norm else x.to(torch.float8_e4m3fn)
    traced = trace(model, (x,), {"x": x}, {"x": {0: "num_tokens"}})
    regions = partition(traced.gm)
    lower(traced.gm, hand_kernels=True, kernels={"rms_norm_quant_static": "triton"}, sm=0)
    plan, pieces = make_plan(traced, regions)
    code = emit(pieces, tune=False, dims=traced.dims)
    read = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert read == plan
    return model, x, read, {name: piece.source for name, piece in code.items()}


def test_a_single_op_is_called_with_its_dtype() -> None:
    model, x, plan, _ = planned(norm=False)
    (step,) = plan.steps
    assert isinstance(step, OpStep) and Dtype("bfloat16") in step.args
    slots = {name: i for i, name in enumerate([*plan.inputs, *plan.sizes, *step.outputs])}
    call = op_call(step, slots)
    values = {"x": x, **{f"weights/{name}": value for name, value in model.named_buffers()}}
    (got,) = call([values.get(name) for name in slots])
    assert got.dtype == torch.bfloat16 and torch.equal(got, model(x))


def test_a_piece_spells_the_dtype(tmp_path: Path, device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("on the CPU, interpreted")
    model, x, plan, sources = planned(norm=True)
    (step,) = plan.steps
    assert isinstance(step, PieceStep)
    source = sources[step.piece]
    assert "fw_scaled_mm.linear.default(" in source and ", torch.bfloat16, " in source
    values = {"x": x, **{f"weights/{name}": value for name, value in model.named_buffers()}}
    sizes = {name: values[source].shape[dim] for name, (source, dim) in plan.sizes.items()}
    call = load_piece(source.encode(), tmp_path / "code.py")
    with torch.inference_mode():
        (got,) = call(*[{**values, **sizes}[name] for name in step.inputs])
    assert got.dtype == torch.bfloat16 and got.shape == (37, 48)
    assert torch.allclose(got, model(x), atol=2e-2, rtol=2e-2)
