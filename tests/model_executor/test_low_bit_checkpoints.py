"""Checkpoints of 4 and 8 bits: every dialect is read to the numbers that it stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.config.weight_format import STORED_FORMATS
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.loader import load_model
from fusewright.model_executor.parallel import check_parallel
from fusewright.model_executor.quant.scheme import LINEARS
from fusewright.ops.linear.formats import dequantize
from tests.model_executor.low_bit_checkpoints import DIALECTS, Dialect, save
from tests.model_executor.quant_checkpoints import FUSED
from tests.model_executor.test_parallel import ranks_of

every = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
SPREAD = [
    dialect
    for dialect in DIALECTS
    if "act-order" not in dialect.name and STORED_FORMATS[dialect.kind].step(1) <= 64
]


def numbers_of(layer: Any) -> Tensor:
    """What a layer's weight stands for; columns as those of its input."""
    kinds = ("weight", "weight_scale", "weight_zero", "weight_row_scale")
    numbers = dequantize(layer.quant, *(getattr(layer, kind, None) for kind in kinds))
    return numbers if layer.x_order is None else numbers[:, layer.x_order.argsort()]


@every
def test_layers_hold_the_numbers_of_every_dialect(dialect: Dialect, tmp_path: Path) -> None:
    """Merged ones, one below the other; ``down`` and the rows before it in an order of their own
    where columns are sorted."""
    saved = save(dialect, tmp_path).state_dict()
    spec = read_spec(tmp_path)
    assert spec.quant is not None and spec.quant.kind == dialect.kind
    model = load_model(spec, tmp_path, "cpu")
    for layer in range(2):
        for linear in LINEARS:
            held = model.get_submodule(f"layers.{layer}.{linear}")
            names = [f"model.layers.{layer}.{part}.weight" for part in FUSED[linear]]
            exact, numbers = torch.cat([saved[name] for name in names]), numbers_of(held)
            if "act-order" in dialect.name and linear.startswith("mlp"):
                continue
            torch.testing.assert_close(numbers, exact, atol=1e-6, rtol=1e-5, msg=linear)
    if "act-order" in dialect.name:
        x = torch.randn(5, 128)
        mlp = model.get_submodule("layers.1.mlp")
        gate, up, down = (
            saved[f"model.layers.1.mlp.{n}_proj.weight"] for n in ("gate", "up", "down")
        )
        expected = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        torch.testing.assert_close(mlp(x), expected, atol=1e-5, rtol=1e-4)
        assert mlp.down.x_order is None and mlp.gate_up.x_order is not None


@pytest.mark.parametrize("dialect", SPREAD, ids=lambda dialect: dialect.name)
def test_ranks_hold_every_dialect_together(dialect: Dialect, tmp_path: Path) -> None:
    save(dialect, tmp_path)
    spec = read_spec(tmp_path)
    check_parallel(spec, 2)
    whole, ranks = load_model(spec, tmp_path, "cpu"), ranks_of(spec, tmp_path, 2, "auto")
    for name, parts, dim in (("attention.qkv", 3, 0), ("mlp.gate_up", 2, 0), ("mlp.down", 1, 1)):
        of_ranks = [numbers_of(rank.get_submodule(f"layers.1.{name}")) for rank in ranks]
        numbers = numbers_of(whole.get_submodule(f"layers.1.{name}"))
        if name == "attention.qkv":
            sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
            splits = [n.split([s * spec.head_dim // 2 for s in sizes]) for n in of_ranks]
            joined = torch.cat([part for pair in zip(*splits, strict=True) for part in pair])
        else:
            splits = [n.chunk(parts) for n in of_ranks]
            pairs = [torch.cat(pair, dim) for pair in zip(*splits, strict=True)]
            joined = torch.cat(pairs)
        assert torch.equal(joined, numbers), name
